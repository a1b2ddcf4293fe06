"""Four LoRA adapters over six replicas with room for two: every answer is of its own adapter."""

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack

import orjson
import pytest

from tests.agents.simserver.support import MODEL, Engine, config, running
from tests.support.small_mesh import PATIENT, SmallMesh, client, small_mesh
from tests.support.until import until

ADAPTERS = ("a", "b", "c", "d")
SOURCES = tuple(f"{name}=/adapters/{name}" for name in ADAPTERS)
REPLICAS = 6
SIMULATED = config(models=(MODEL,), adapters_max=2, adapter_load_s=2.0, time_scale=20.0)
PROMPTS = tuple(f"Prompt {number}: what is it?" for number in range(3))
EXPLICIT = {429, 502, 503}  # statuses that a client may retry


def asked(adapter: str, prompt: str) -> dict:
    return {"model": adapter, "prompt": prompt, "max_tokens": 12, "stream": True}


async def right_answers() -> dict[tuple[str, str], str]:
    """Of an engine that has them all, and of the model."""
    async with running(config(models=(MODEL,), adapters_max=4, adapter_load_s=0.0)) as engine:
        for name in ADAPTERS:
            await engine_call(engine, "load", name)
        found = {}
        for pair in itertools.product((*ADAPTERS, MODEL), PROMPTS):
            body = {**asked(*pair), "stream": False}
            _, answer = await engine.post("/v1/completions", body)
            found[pair] = answer["choices"][0]["text"]
        return found


async def engine_call(engine: Engine, what: str, adapter: str) -> int:
    body = {"lora_name": adapter, "lora_path": f"/adapters/{adapter}"}
    async with engine.http.post(f"{engine.url}/v1/{what}_lora_adapter", json=body) as response:
        return response.status


async def loaded(engine: Engine) -> set[str]:
    async with engine.http.get(f"{engine.url}/v1/models") as response:
        return {row["id"] for row in (await response.json())["data"]} - {MODEL}


class Clients:
    """Clients that ask for adapters again and again, and how their requests ended."""

    def __init__(self, url: str, right: dict[tuple[str, str], str]) -> None:
        self.url = url
        self.right = right
        self.ended: Counter[object] = Counter()
        self.wrong: list[tuple] = []
        self.is_over = False

    async def run(self, number: int) -> None:
        pairs = list(itertools.product((*ADAPTERS, MODEL), PROMPTS))
        async with client() as session:
            for place in itertools.count(number * 7):
                if self.is_over:
                    return
                pair = pairs[place % len(pairs)]
                async with session.post(
                    f"{self.url}/v1/completions", json=asked(*pair)
                ) as response:
                    self.count(pair, response.status, await response.read())

    def count(self, pair: tuple[str, str], status: int, body: bytes) -> None:
        if status != 200:
            self.ended[status] += 1
            return
        events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
        is_whole = events[-1:] == [b"[DONE]"]
        rows = [orjson.loads(event) for event in events if event != b"[DONE]"]
        text = "".join(row["choices"][0]["text"] for row in rows if row.get("choices"))
        if not is_whole:
            assert rows and "error" in rows[-1], f"a stream ended without a word: {body[-200:]!r}"
        right = self.right[pair]
        if text != right if is_whole else not right.startswith(text):
            self.wrong.append((pair, text))
        self.ended["whole" if is_whole else "error event"] += 1


async def unload_everywhere(engines: list[Engine], adapter: str) -> int:
    """As an operator does at the engines themselves; returns how many had it."""
    statuses = await asyncio.gather(*(engine_call(one, "unload", adapter) for one in engines))
    assert set(statuses) <= {200, 404}
    return statuses.count(200)


async def started(mesh: SmallMesh, stack: AsyncExitStack, policy: str) -> list[Engine]:
    await mesh.router("us", policy=policy, **PATIENT)
    engines = [await stack.enter_async_context(running(SIMULATED)) for _ in range(REPLICAS)]
    for number, engine in enumerate(engines):
        options = {"adapters": SOURCES, "load_adapters": 2, "metrics_port": 0}
        await mesh.agent("us", f"us-{number}", engine, **options)
    await mesh.until_ready("us", REPLICAS, MODEL)
    return engines


@pytest.mark.parametrize("policy", ["mesh", "least-load"])
async def test_no_answer_comes_from_a_wrong_adapter_whatever_operators_unload(
    nats_server, policy
) -> None:
    right = await right_answers()
    assert len(set(right.values())) == len(right), "each adapter has its own answers"
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(small_mesh({"us": nats_server}))
        engines = await started(mesh, stack, policy)
        core = mesh.routers["us"].core
        assert core.models() == (*ADAPTERS, MODEL)
        await until(lambda: all(core.model_card(name).parent == MODEL for name in ADAPTERS))
        clients = Clients(mesh.urls["us"], right)
        running_clients = [asyncio.create_task(clients.run(number)) for number in range(8)]
        unloaded = 0
        for adapter in ADAPTERS * 2:
            before = clients.ended["whole"]
            await until(lambda seen=before: clients.ended["whole"] > seen + 20)
            unloaded += await unload_everywhere(engines, adapter)
        before = clients.ended["whole"]
        await until(lambda: clients.ended["whole"] > before + 40)
        clients.is_over = True
        await asyncio.gather(*running_clients)
        assert not clients.wrong
        assert set(clients.ended) <= {"whole", "error event", *EXPLICIT}, clients.ended
        assert unloaded >= 4, "adapters were unloaded under load"
        for engine in engines:
            assert len(await loaded(engine)) <= 2
