"""The processes around a router under load: started, asked for their figures, ended."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson

START_S = 30.0


@contextlib.asynccontextmanager
async def fleet(
    nats_url: str, replicas: int, *, each_per_s: float = 10.0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running fleet; `sent_by` ends it and returns what it sent."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.programs.live.load.fleet", "--nats-url", nats_url),
        *("--replicas", str(replicas), "--each-per-s", str(each_per_s)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def sent_by(process: asyncio.subprocess.Process) -> Mapping[str, int]:
    """End a fleet, and read what it has sent."""
    process.send_signal(signal.SIGTERM)
    out, _ = await process.communicate()
    sent: Mapping[str, int] = orjson.loads(out)
    return sent


async def ask(port: int, **options: object) -> dict[str, Any]:
    """Run clients to their end; options as of `tests.programs.live.load.clients`."""
    words = [word for name, value in options.items() for word in (_option(name), str(value))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.programs.live.load.clients", "--port", str(port), *words),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, "the clients failed; their words are above"
    report: dict[str, Any] = orjson.loads(out)
    return report


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
