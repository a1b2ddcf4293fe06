"""nats-server, router and agent stop together and go on, as on a host that swaps or is paused."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from agents.core.routers import SILENCE_S
from tests.support.mesh_up import NO_SPEED_PROBE
from tests.support.router_process import router_process
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import chat
from tests.support.stopped import stopped
from tests.support.until import PATIENCE_S

pytestmark = pytest.mark.drill

STREAMS = 16
LAST = b"data: [DONE]\n\n"


@asynccontextmanager
async def agent_process(nats_url: str, engine_url: str) -> AsyncIterator[int]:
    """`mesh-agent run` of us-0; its process id."""
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents.cli", "run", "--region", "us", "--replica", "us-0"),
        *("--engine-url", engine_url),
        env={**os.environ, **NO_SPEED_PROBE, "NATS_URL": nats_url},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield made.pid
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def test_a_common_standstill_breaks_no_answer(nats_server, tmp_path) -> None:
    """The engine goes on meanwhile: of half the answers, all is there before the others wake."""
    early, late = asyncio.Event(), asyncio.Event()

    async def behaviour(request, body):
        stream = await opened(request)
        name = body["messages"][0]["content"]
        await stream.write(event(f"{name} begins"))
        await (early if name.startswith("early") else late).wait()
        await stream.write(event(f"{name} ends"))
        await stream.write(LAST)
        return stream

    names = [f"{'early' if n % 2 else 'late'} {n}" for n in range(STREAMS)]
    begun: set[str] = set()

    async def ask(session: aiohttp.ClientSession, url: str, name: str) -> bytes:
        async with session.post(url, json=chat(name, stream=True)) as answer:
            assert answer.status == 200, await answer.text()
            got = bytearray()
            async for chunk in answer.content.iter_any():
                got += chunk
                begun.add(name)
            return bytes(got)

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(scripted_engine())
        engine.behaviour = behaviour
        agent = await stack.enter_async_context(agent_process(nats_server.url, engine.url))
        router = await stack.enter_async_context(
            router_process(tmp_path, nats_server.url, workers=1)
        )
        await router.until_serves(0)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"{router.url}/v1/chat/completions"
        asked = {name: asyncio.create_task(ask(session, url, name)) for name in names}
        async with asyncio.timeout(PATIENCE_S):
            while len(begun) < STREAMS:
                for task in asked.values():
                    if task.done():
                        task.result()  # raises why it ended
                await asyncio.sleep(0.01)
        async with AsyncExitStack() as standing:
            for pid in (nats_server.pid, router.pid, *router.workers(), agent):
                await standing.enter_async_context(stopped(pid))
            early.set()
            await asyncio.sleep(SILENCE_S + 1.0)  # longer than anybody may be silent otherwise
        late.set()
        async with asyncio.timeout(PATIENCE_S):
            got = {name: await task for name, task in asked.items()}
    whole = {name: event(f"{name} begins") + event(f"{name} ends") + LAST for name in names}
    assert got == whole
