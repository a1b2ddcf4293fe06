"""Half an hour of load with a fault a minute: does a mesh at rest hold what it held before?

    make soak [MINUTES=30]

The mesh, the clients and the faults of `make fault-run`. After a first minute of load, and again at
the end, clients stop, and when all is quiet this is read of every process: its own memory, open
descriptors and threads; of routers, what their pages say is under way; of nats-servers,
connections, subscriptions, streams, consumers and what is stored. Counts must be back, and
memory must not be above MEMORY_RATIO of what it was and MEMORY_MORE_MB; a process that was killed
meanwhile is read as any other.
"""

import asyncio
import itertools
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop

from infra import topology
from mesh.demo.options import DemoOptions
from schemas.ids import RegionId
from tests.programs.fault_run.__main__ import SHAPE
from tests.programs.fault_run.report import table
from tests.programs.fault_run.run import AFTER, BEFORE, TIME_SCALE, Result, Run, Settings, started
from tests.programs.fault_run.schedule import Fault, faults
from tests.programs.live.stream_memory import private_bytes
from tests.programs.studies.tables import markdown
from tests.support.mesh_up import RTT_MS, write_config
from tests.support.result_page import result_page

FAULT_EVERY_S = 60.0
FIRST_S = 60.0  # of load, before what is held is read for the first time
REST_S = 30.0  # without clients, before anything is read
BACK_WITHIN_S = 180.0  # from then on
MEMORY_RATIO, MEMORY_MORE_MB = 1.5, 20.0
MEMORY = "memory, MB"
UNDER_WAY = re.compile(
    r"^mesh_(inflight|http_connections|peer_requests_held|body_bytes|answer_buffer_bytes)"
    r"(?:\{[^}]*\})? ([0-9.e+]+)$",
    re.MULTILINE,
)

Held = dict[str, dict[str, float]]  # by process: what of it


def grown(before: Held, after: Held) -> list[str]:
    """What is not back."""
    return [
        f"{name}: {what}: {was:g} before, {now[what]:g} after"
        for name, now in after.items()
        for what, was in before[name].items()
        if now[what] > (was if what != MEMORY else max(MEMORY_RATIO * was, was + MEMORY_MORE_MB))
    ]


def _of_process(pid: int) -> dict[str, float]:
    return {
        MEMORY: round(private_bytes(pid) / 1e6, 1),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
    }


class Soak(Run):
    """One run on a mesh that has started."""

    monitors: Mapping[RegionId, str]  # of each region's nats-server

    async def soaked(self, minutes: float) -> tuple[Result, Held, Held]:
        """What happened, and what was held before and after."""
        await self._load(FIRST_S, 0)
        before = await self._at_rest()
        await self._load(60.0 * minutes, max(1, round(60.0 * minutes / FAULT_EVERY_S)))
        after, deadline = await self._at_rest(), self._now() + BACK_WITHIN_S
        while grown(before, after) and self._now() < deadline:
            after = await self._at_rest()
        self._result.problems += grown(before, after)
        self._conclude()
        return self._result, before, after

    async def _load(self, seconds: float, count: int) -> None:
        """With so many faults."""
        stop, schedule = asyncio.Event(), faults(self._settings.seed, SHAPE)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clients.ask_until(stop, self._settings.streams))
            for fault in itertools.islice(schedule, count):
                await self._fault(fault, self._now() + seconds / count)
            await asyncio.sleep(0.0 if count else seconds)
            stop.set()
        self._account(AFTER if count else BEFORE)

    async def _fault(self, fault: Fault, until: float) -> None:
        await asyncio.sleep((until - self._now()) / 2)
        self._account(self._result.faults[-1].kind if self._result.faults else BEFORE)
        self._result.faults.append(fault)
        await self._broken.do(fault, self._killed)
        self._account(fault.kind)
        await asyncio.sleep(max(0.0, until - self._now()))

    async def _at_rest(self) -> Held:
        await asyncio.sleep(REST_S)
        mesh = self._broken.mesh
        held = {name: _of_process(pid) for name, pid in sorted(mesh.pids.items())}
        async with aiohttp.ClientSession() as http:
            for region, address in self.monitors.items():
                held[f"nats-{region}"] |= await _of_server(http, address)
            for region in self.monitors:
                for router, page in mesh.metrics(region).items():
                    async with http.get(page) as answer:
                        found = UNDER_WAY.findall(await answer.text())
                    for what, value in found:
                        held[f"router-{region}-{router}"][what] = float(value)
        return held


async def _of_server(http: aiohttp.ClientSession, address: str) -> dict[str, float]:
    """Of a nats-server's own pages."""

    async def page(name: str) -> Any:
        async with http.get(f"http://{address}/{name}") as answer:
            return await answer.json()

    server, stored = await page("varz"), await page("jsz")
    return {
        "connections": server["connections"],
        "subscriptions": server["subscriptions"],
        "streams": stored["streams"],
        "consumers": stored["consumers"],
        "stored, MB": round((stored["memory"] + stored["storage"]) / 1e6, 1),
    }


def shown(before: Held, after: Held) -> str:
    """A row for each thing that is held: of all processes of a kind together."""
    kinds = sorted({name.partition("-")[0] for name in after})
    rows = []
    for kind in kinds:
        names = [name for name in after if name.startswith(f"{kind}-")]
        for what in after[names[0]]:
            was, now = (sum(of[name].get(what, 0.0) for name in names) for of in (before, after))
            rows.append((f"{kind} ({len(names)})", what, f"{was:g}", f"{now:g}"))
    return markdown.table(("processes", "held", "before", "after"), rows)


async def soak(place: Path, minutes: float, streams: int, seed: int) -> tuple[Result, Held, Held]:
    """Play it; the mesh's files are left in `place`."""
    config = write_config(
        place,
        regions=tuple(SHAPE.regions),
        replicas=SHAPE.replicas,
        routers=SHAPE.routers,
        rtt_ms=RTT_MS,
        monitored=True,
    )
    options = DemoOptions(config=config, state=place / ".mesh", time_scale=TIME_SCALE)
    settings = Settings(seed=seed, shape=SHAPE, requests=0, faults=0, streams=streams)
    async with started(options, seed) as (mesh, routers, clients):
        run = Soak(settings, mesh, routers, clients, lambda _: None)
        regions = topology.load(config).regions
        run.monitors = {name: str(region.monitor[0]) for name, region in regions.items()}
        return await run.soaked(minutes)


@result_page("soak", "A mesh at rest after half an hour of faults")
@click.command()
@click.option("--minutes", type=click.FloatRange(0.5), default=30.0, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=20, show_default=True, help="At a time.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
def main(minutes: float, streams: int, seed: int) -> None:
    """Load a mesh, break one part a minute, and print what it holds at rest before and after;
    exit 1 if something is not back, or a request ended as none may."""
    with tempfile.TemporaryDirectory() as place:
        result, before, after = uvloop.run(soak(Path(place), minutes, streams, seed))
    click.echo(shown(before, after))
    click.echo()
    click.echo(table(result))
    sys.exit(bool(result.violations))


if __name__ == "__main__":
    main()
