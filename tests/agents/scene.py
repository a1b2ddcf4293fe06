"""An agent in this process, its engine, and a router."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple

from agents.config import AgentConfig
from agents.runtime.process import Stop, run
from schemas.state import ReplicaState
from tests.agents.fake_router import REGION, REPLICA, FakeRouter, fake_router
from tests.agents.scripted_engine import (
    CHUNKED,
    LAST_CHUNK,
    Conversation,
    Script,
    ScriptedEngine,
    chunk,
    plain,
    running,
)


@dataclass(slots=True)
class Scene:
    """A running agent, and both of its neighbours."""

    router: FakeRouter
    engine: ScriptedEngine
    stop: Stop
    task: asyncio.Task


class RunningAgent(NamedTuple):
    """Ask it to stop, or wait for its end."""

    stop: Stop
    task: asyncio.Task


@contextlib.asynccontextmanager
async def running_agent(
    router: FakeRouter, nats_url: str, clock: Callable[[], float] = time.monotonic, **settings
) -> AsyncIterator[RunningAgent]:
    """An agent that is ready; it has no speed probe unless the settings say so."""
    values = {
        "region": REGION,
        "replica": REPLICA,
        "engine_kind": "vllm",
        "nats_url": nats_url,
        "read_interval_ms": 10,
        "speed_probe": False,
        **settings,
    }
    stop = Stop()
    task = asyncio.create_task(run(AgentConfig(**values), clock, time.time_ns(), stop))
    try:
        await router.state(state=ReplicaState.READY)
        yield RunningAgent(stop, task)
    finally:
        stop.request()
        stop.request()
        await task


@contextlib.asynccontextmanager
async def scene(
    nats_server, script: Script, *, clock: Callable[[], float] = time.monotonic, **settings
) -> AsyncIterator[Scene]:
    async with (
        running(script) as engine,
        fake_router(nats_server.url) as router,
        running_agent(
            router, nats_server.url, clock, **{"engine_url": engine.url, **settings}
        ) as agent,
    ):
        yield Scene(router, engine, agent.stop, agent.task)


async def hello(talk: Conversation) -> None:
    await talk.send(plain(200, b'{"text":"hello"}'))


class Gate:
    """A script whose answer begins at once and ends when the test opens the gate."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def __call__(self, talk: Conversation) -> None:
        await talk.send(CHUNKED + chunk(b"data: 1\n\n"))
        waiting = asyncio.create_task(talk.hung_up())
        opened = asyncio.create_task(self.open.wait())
        await asyncio.wait((waiting, opened), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if waiting.done():
            self.hung_up.set()
            return
        waiting.cancel()
        await talk.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
