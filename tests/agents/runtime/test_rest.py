"""An engine at rest is scraped seldom, and at once when something happens.

Here an agent that rests would never scrape again by itself.
"""

import contextlib
from collections.abc import AsyncIterator

import pytest

from agents.adapters import http_client
from agents.core import scrape_pace
from agents.core.scrape_pace import ScrapePace
from agents.runtime import agent
from schemas.state import ReplicaState
from tests.agents.scene import Gate, Scene, scene
from tests.support.until import until

NEVER_S = 10_000.0
RUNNING = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"


@contextlib.asynccontextmanager
async def resting(nats_server, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> AsyncIterator[Scene]:
    paces: list[ScrapePace] = []

    def made(busy_s: float) -> ScrapePace:
        paces.append(ScrapePace(busy_s))
        return paces[-1]

    monkeypatch.setattr(scrape_pace, "REST_S", NEVER_S)
    monkeypatch.setattr(http_client, "KEEPALIVE_S", NEVER_S)
    monkeypatch.setattr(agent, "ScrapePace", made)
    async with scene(nats_server, gate) as made_scene:
        await until(lambda: paces[0].rests)
        yield made_scene


async def test_an_engine_that_dies_at_rest_is_down(nats_server, monkeypatch) -> None:
    async with resting(nats_server, monkeypatch, Gate()) as one:
        await one.engine.stop()
        await one.router.state(state=ReplicaState.DOWN)
        await one.engine.start()
        await one.router.state(state=ReplicaState.READY)


async def test_a_request_ends_the_rest(nats_server, monkeypatch) -> None:
    gate = Gate()
    async with resting(nats_server, monkeypatch, gate) as one:
        one.engine.metrics = RUNNING
        inbox = await one.router.send_work(1)
        await one.router.state(running=1, kv_used_ratio=0.5)
        gate.open.set()
        await one.router.answer(inbox)
