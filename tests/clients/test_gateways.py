"""What arrives of a client's request through gateways that others wrote (docs/gateways.md)."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import orjson
import pytest
from aiohttp import web

from tests.clients.commands import answers
from tests.clients.gateways import GATEWAYS, LABELLED, MODEL, Gateway
from tests.clients.table import column
from tests.programs.bench.installs import ROOT
from tests.support.scripted_engine import (
    USAGE,
    Behaviour,
    ScriptedEngine,
    cut_after,
    fail,
    hang,
    scripted_engine,
)
from tests.support.small_mesh import PATIENT, SmallMesh, small_mesh

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]
PAGE = ROOT / "docs" / "gateways.md"
HUNG_UP_WITHIN_S, STAYS_S = 20.0, 2.0
FIELDS = {
    "user": "u",
    "prompt_cache_key": "conversation-1",
    "priority": 1,
    "cache_salt": "secret",
    "top_k": 5,
    "min_tokens": 1,
    "chat_template_kwargs": {"enable_thinking": False},
}


@dataclass(slots=True)
class Upstream:
    """A region with one engine, whose behaviour a test writes."""

    mesh: SmallMesh
    engine: ScriptedEngine

    @property
    def url(self) -> str:
        return self.mesh.urls["us"] + "/v1"

    @property
    def labelled(self) -> str:
        return self.mesh.urls["us"] + "/labels/mars/v1"

    def asked(self) -> float:
        return self.mesh.sample("us", "mesh_requests_total")


@pytest.fixture
async def upstream(nats_server) -> AsyncIterator[Upstream]:
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT)
        engine.computed = itertools.count().__next__  # it computes on, so its agent waits for it
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        yield Upstream(mesh, engine)


NAMED = {"id": "x", "created": 1, "model": MODEL}
PART = {"index": 0, "delta": {"content": "a word"}, "finish_reason": None}
CHUNK = {**NAMED, "object": "chat.completion.chunk", "choices": [PART]}
A_WORD = b"data: " + orjson.dumps(CHUNK) + b"\n\n"  # with every field that OpenAI's has


async def hello(request: web.Request, body: dict) -> web.StreamResponse:
    """An answer with every field that OpenAI's has."""
    message = {"role": "assistant", "content": "hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {**NAMED, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    return web.json_response(answer)


def held(first: bytes, gate: asyncio.Event) -> Behaviour:
    """Silent after `first` until the gate opens, then a whole answer."""

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        if body.get("stream"):
            return await hang(first, gate)(request, body)
        await gate.wait()
        return await hello(request, body)

    return behaviour


class Client:
    """Asks a gateway."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway, self.http = gateway, http

    def post(self, *, labelled: bool = False, model: str = MODEL, stream: bool = False, **more):
        headers = dict(more.pop("headers", {}))
        said = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        asked = self.gateway.asked(LABELLED if labelled else model, **said, **more)
        asked["headers"].update(headers)
        return self.http.post(**asked)

    async def status(self, **more) -> tuple[int, str]:
        async with self.post(**more) as answer:
            return answer.status, await answer.text()


async def found(client: Client, upstream: Upstream) -> dict[str, str]:
    """What was tried → what became of it."""
    engine, found = upstream.engine, {}
    engine.behaviour = hello
    status, text = await client.status(**FIELDS)
    assert status == 200, text
    body = engine.seen[-1]
    lost = [name for name in FIELDS if body.get(name) != FIELDS[name]]
    found["fields lost"] = ", ".join(lost) or "none"
    status, _ = await client.status(headers={"x-mesh-residency": "mars"})
    found["label in a header"] = "arrives" if status != 200 else "lost"
    status, _ = await client.status(labelled=True)
    found["label in the base URL"] = "arrives" if status != 200 else "lost"
    async with client.post(headers={"x-request-id": "mine-1"}) as answer:
        found["request id"] = "comes back" if "mine-1" in str(answer.headers) else "lost"
    status, text = await client.status(model="missing")
    found["unknown model"] = (
        f"{status}, {'' if 'missing' in text and 'tiny' in text else 'not '}its message"
    )
    for what, first, stream in (
        ("hang-up before the first token", b"", True),
        ("hang-up inside a stream", A_WORD, True),
        ("hang-up, not streamed", b"", False),
    ):
        gate = asyncio.Event()
        engine.behaviour = held(first, gate)
        engine.arrived.clear()
        engine.hung_up.clear()
        asking = asyncio.create_task(client.status(stream=stream))
        await asyncio.wait_for(engine.arrived.wait(), 30.0)
        await asyncio.sleep(STAYS_S)
        assert not engine.hung_up.is_set()
        asking.cancel()
        await asyncio.wait([asking])
        try:
            await asyncio.wait_for(engine.hung_up.wait(), HUNG_UP_WITHIN_S)
            found[what] = "cancels"
        except TimeoutError:
            found[what] = "goes on"
            ended = upstream.asked() + 1
            gate.set()
            await upstream.mesh.until(lambda ended=ended: upstream.asked() >= ended, "its end")
    engine.behaviour = hello
    for code in (503, 429):  # a replica that has said 429 gets less for a while
        engine.behaviour, before = fail(code), upstream.asked()
        status, _ = await client.status()
        found[f"engine's {code}"] = f"{status}, asked {upstream.asked() - before:.0f}×"
    engine.behaviour = cut_after(A_WORD)
    try:
        async with client.post(stream=True) as answer:
            text = (await answer.content.read()).decode()
        found["stream that breaks"] = "an error" if '"error"' in text else f"hidden: {text[-200:]}"
    except aiohttp.ClientError:
        found["stream that breaks"] = "an error"
    engine.behaviour = hello
    return found


@pytest.mark.parametrize("set_up", [False, True], ids=["as it is", "set up"])
@pytest.mark.parametrize("name", GATEWAYS)
async def test_a_gateway(upstream, tmp_path, name, set_up):
    entries = [(MODEL, upstream.url), (LABELLED, upstream.labelled), ("missing", upstream.url)]
    gateway = GATEWAYS[name](entries, tmp_path, set_up=set_up)
    async with gateway as running, aiohttp.ClientSession() as http:
        await answers(running.health)
        results = await found(Client(running, http), upstream)
    assert results == column(PAGE, f"{name}, {'set up' if set_up else 'as it is'}")
