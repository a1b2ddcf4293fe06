"""`mesh batch-runner` as a real process."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from infra.nats.region_config import BATCH
from tests.support.nats_regions import NatsRegions
from tests.support.until import PATIENCE_S


class RunnerProcess:
    """One batch runner of a region; `say`: what it has printed when it was ready."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def until_ready(self) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self.process.stdout.readline()
        assert b"is ready" in line, (line, await self.end())

    async def end(self) -> tuple[int, str]:
        """Its status and its log, once it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            _, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, err.decode()


def arguments(regions: NatsRegions, toml: Path, region: str, name: str) -> list[str]:
    """Of the command, with the credentials that were rendered."""
    files = regions.files[region].credentials
    return [
        *("--region", region, "--name", name, "--config", str(toml)),
        *("--credentials", str(files["router"]), "--batch-credentials", str(files[BATCH])),
    ]


@contextlib.asynccontextmanager
async def runner_process(
    regions: NatsRegions, toml: Path, *options: str, region: str = "us", name: str = "batch-0"
) -> AsyncIterator[RunnerProcess]:
    """Started, ready, and killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", "batch-runner"),
        *(*arguments(regions, toml, region, name), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    runner = RunnerProcess(process)
    try:
        await runner.until_ready()
        yield runner
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
