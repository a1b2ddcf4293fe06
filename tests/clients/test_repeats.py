"""How often SDKs and gateways repeat what was refused, and whom a gateway then refuses too.

The refusals are the mesh's own, by `schemas.http`, and statuses that were considered instead.
docs/decisions/refused-in-vain.md has the table, and what was chosen by it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from schemas.http import Fault, error_body, error_headers
from tests.clients.commands import answers
from tests.clients.gateways import GATEWAYS
from tests.clients.table import column
from tests.clients.test_gateways import hello
from tests.programs.bench.installs import ROOT

PAGE = ROOT / "docs" / "decisions" / "refused-in-vain.md"
TOLD = Fault.RESIDENCY, Fault.TOO_LATE, Fault.DEADLINE, Fault.SATURATED, Fault.NO_REPLICA
REFUSALS: Mapping[str, tuple[int, Fault, Mapping[str, str]]] = {
    **{
        f"{fault.value.status} `{fault.value.code}`": (
            fault.value.status, fault, error_headers(fault)
        )
        for fault in TOLD
    },
    "504 without the header": (504, Fault.DEADLINE, {}),
    "412": (412, Fault.TOO_LATE, {}),
    "451": (451, Fault.RESIDENCY, {}),
}  # fmt: skip


class Refusing:
    """An upstream that refuses as a request's text says, and answers any other."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = body["messages"][-1]["content"]
        self.asked[text] += 1
        if text not in REFUSALS:
            return await hello(request, body)
        status, fault, headers = REFUSALS[text]
        said = error_body(fault, "no")
        return web.Response(
            status=status, body=said, headers=headers, content_type="application/json"
        )

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def refusing() -> AsyncIterator[Refusing]:
    found, app = Refusing(), web.Application()
    app.router.add_post("/{path:.+}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.port = runner.addresses[0][1]
        yield found
    finally:
        await runner.cleanup()


async def by_openai(base: str, text: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="unused") as api:
        with pytest.raises(openai.APIStatusError):
            await api.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}]
            )


async def by_anthropic(base: str, text: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=base, api_key="unused") as api:
        with pytest.raises(anthropic.APIStatusError):
            await api.messages.create(
                model="tiny", max_tokens=5, messages=[{"role": "user", "content": text}]
            )


@pytest.mark.parametrize(("name", "ask"), [("openai", by_openai), ("anthropic", by_anthropic)])
async def test_an_sdk_repeats_what_a_repeat_may_mend_alone(
    name: str, ask: Callable[[str, str], Awaitable[None]]
) -> None:
    async with refusing() as upstream:
        await asyncio.gather(*(ask(upstream.base, text) for text in REFUSALS))
        assert {text: f"{upstream.asked[text]}×" for text in REFUSALS} == column(PAGE, name)


@pytest.mark.clients
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", GATEWAYS)
async def test_a_gateway(tmp_path, name: str) -> None:
    """As it is, over two regions where a model may have several upstreams: one client is refused
    twice, then another one asks."""
    models = {text: f"model-{number}" for number, text in enumerate(REFUSALS)}
    async with refusing() as upstream, aiohttp.ClientSession() as http:
        regions = [f"{upstream.base}/{region}/v1" for region in ("us", "eu")]
        entries = [(model, url) for model in models.values() for url in regions]
        async with GATEWAYS[name](entries, tmp_path, set_up=False) as gateway:
            await answers(gateway.health)

            async def status(model: str, text: str) -> int:
                said = {"messages": [{"role": "user", "content": text}]}
                async with http.post(**gateway.asked(model, **said)) as answer:
                    return answer.status

            found = {}
            for text, model in models.items():
                assert await status(model, "hello") == 200
                assert await status(model, text) != 200
                asked = upstream.asked[text]
                await status(model, text)
                stops = await status(model, "hello") != 200
                found[text] = f"{asked}×{', then stops it' if stops else ''}"
    assert found == column(PAGE, name)
