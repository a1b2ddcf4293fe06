"""A simulated engine on a free port of this test's own event loop."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from agents.sim.profiles import L4_LLAMA
from agents.simserver.faults import Faults
from agents.simserver.server import SimConfig, SimServer

MODEL = "sim/tiny"
BASE = SimConfig(models=(MODEL, "sim/alias"), profile=L4_LLAMA, time_scale=50.0)


def config(**changes: object) -> SimConfig:
    """The usual engine of these tests with some things changed."""
    return dataclasses.replace(BASE, **changes)


def faults(**switches: object) -> Faults:
    return Faults().changed(switches)


class Engine:
    """A running server and a client for what the OpenAI SDK doesn't do."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def metrics(self) -> dict[str, float]:
        """The samples without histograms: name → value."""
        async with self.http.get(f"{self.url}/metrics") as response:
            assert response.status == 200
            text = await response.text()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.split("{")[0]: float(value) for name, value in samples if "le=" not in name}

    async def until(
        self, holds: Callable[[dict[str, float]], bool], timeout_s: float = 20.0
    ) -> dict[str, float]:
        """The metrics once `holds` says so of them."""
        async with asyncio.timeout(timeout_s):
            while True:
                numbers = await self.metrics()
                if holds(numbers):
                    return numbers
                await asyncio.sleep(0.002)

    async def post(self, path: str, body: object) -> tuple[int, dict[str, object]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def running(settings: SimConfig = BASE) -> AsyncIterator[Engine]:
    runner = web.AppRunner(
        SimServer(settings).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession() as http:
            yield Engine(f"http://127.0.0.1:{runner.addresses[0][1]}", http)
    finally:
        await runner.cleanup()


def chat(content: str = "Tell me a story", **more: object) -> dict[str, object]:
    """A chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
