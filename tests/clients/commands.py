"""Other people's commands, and servers of theirs that take a while to answer."""

import asyncio
import contextlib
from pathlib import Path

import aiohttp

SCRIPTS = Path(__file__).with_name("scripts")
WITHIN_S = 300.0


async def output(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """What a client printed; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "NO_COLOR": "1", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-2000:]
    return out.decode()


async def answers(url: str) -> None:
    """Wait until that URL answers."""
    async with asyncio.timeout(WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
