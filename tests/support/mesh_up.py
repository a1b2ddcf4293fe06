"""A small mesh as a real `mesh up` process on free ports, for end-to-end tests."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S

REGIONS = ("us", "eu", "ap")
NO_SPEED_PROBE = {"MESH_SPEED_PROBE": "0"}  # engines get the requests of the test alone
RTT_MS = {("us", "eu"): 20, ("us", "ap"): 40, ("eu", "ap"): 60}


class MeshUp:
    """A running `mesh up`. `record` is what its ready file says."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path, ready: Path) -> None:
        self.process = process
        self._output = output
        self._ready = ready

    @property
    def record(self) -> dict[str, Any]:
        """The ready file, as it is now: processes that were started again have new ids."""
        record: dict[str, Any] = json.loads(self._ready.read_text())
        return record

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return self._output.read_text()

    @property
    def model(self) -> str:
        return str(self.record["models"][0])

    def endpoint(self, region: str, router: str = "r1") -> str:
        """Where a router's OpenAI API is; clients want it with `/v1`."""
        return str(self.record["regions"][region]["routers"][router])

    def credentials(self, region: str, user: str) -> dict[str, str]:
        """NATS_URL, NATS_USER and NATS_PASSWORD of `router`, `operator` or `agent-<replica>`."""
        path = Path(self.record["regions"][region]["credentials"]) / f"{user}.env"
        lines = path.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    async def started(self) -> None:
        """Wait until it is ready. Fails with its output if it ends or takes too long."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not self._ready.exists():
                    assert self.process.returncode is None, self.output
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not ready in {PATIENCE_S} s:\n{self.output}") from None

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, and return the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


def write_config(
    directory: Path,
    *,
    regions: tuple[str, ...] = REGIONS,
    replicas: int | Mapping[str, int] = 1,
    routers: Sequence[str] | Mapping[str, Sequence[str]] = ("r1",),
    rtt_ms: Mapping[tuple[str, str], float] = RTT_MS,
    monitored: bool = False,
    batch_runners: Sequence[str] = (),
    console: bool = True,
) -> Path:
    """A mesh.toml on free ports. Links that `rtt_ms` leaves out have no delay.

    `replicas`, `routers`: of every region, or of each. `monitored`: with the nats-servers' own HTTP
    pages.
    """
    more = {"console": console, "monitor": monitored}
    listens = ("http", "nats", "leaf", *(name for name, wanted in more.items() if wanted))
    ports = iter(free_ports(len(listens) * len(regions)))
    text = '[mesh]\nname = "test"\n'
    for region in regions:
        addresses = [f'{key} = "127.0.0.1:{next(ports)}"' for key in listens]
        named = routers[region] if isinstance(routers, Mapping) else routers
        names = f"routers = {json.dumps(list(named))}"
        count = replicas if isinstance(replicas, int) else replicas[region]
        lines = [f"[regions.{region}]", *addresses, f"replicas = {count}", names]
        lines += [f"batch_runners = {json.dumps(list(batch_runners))}", ""]
        text += "\n".join(lines)
    for a, b in itertools.combinations(regions, 2):
        rtt = rtt_ms.get((a, b), rtt_ms.get((b, a), 0))
        text += f'[[links]]\nbetween = ["{a}", "{b}"]\nrtt_ms = {rtt}\n'
    path = directory / "mesh.toml"
    path.write_text(text)
    return path


@contextlib.asynccontextmanager
async def mesh_up(
    directory: Path,
    *arguments: str,
    config: Path | None = None,
    time_scale: float | None = 50.0,
    installed: bool = False,
) -> AsyncIterator[MeshUp]:
    """Run `mesh up` with its state in `directory` and yield it when it is ready.

    Without a `config` it has three regions of one replica each, on free ports. Given engines
    have no `time_scale`. `installed`: by its script, and not forked (`forked_programs`).
    """
    module = (sys.executable, "-m", "mesh.cli.main")
    command = (str(Path(sys.executable).with_name("mesh")),) if installed else module
    output, ready = directory / "up.out", directory / "ready.json"
    with output.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(*command, "up"),
            *("--config", str(config or write_config(directory))),
            *("--state", str(directory / ".mesh"), "--ready-file", str(ready)),
            *(() if time_scale is None else ("--time-scale", str(time_scale))),
            *arguments,
            env={**os.environ, **NO_SPEED_PROBE},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    mesh = MeshUp(process, output, ready)
    try:
        await mesh.started()
        yield mesh
    finally:
        try:
            await mesh.stop()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
