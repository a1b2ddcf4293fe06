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
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop

from infra import topology
from mesh.demo.options import DemoOptions
from mesh.demo.session import served_models
from mesh.demo.state_directory import StateDirectory
from schemas.ids import RegionId
from tests.programs.fault_run.__main__ import SHAPE
from tests.programs.fault_run.breaking import Breakable
from tests.programs.fault_run.clients import Clients, Router
from tests.programs.fault_run.report import table
from tests.programs.fault_run.run import AFTER, BEFORE, TIME_SCALE, Result, Settings
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


class Soak:
    """One run on a mesh that has started."""

    def __init__(
        self,
        broken: Breakable,
        routers: Sequence[Router],
        model: str,
        monitors: Mapping[RegionId, str],
        seed: int,
    ) -> None:
        """`monitors`: of each region's nats-server."""
        self._broken, self._monitors = broken, monitors
        self._routers = {router.name: router for router in routers}
        self._clients = Clients(routers, model, seed)
        self._settings = Settings(seed=seed, shape=SHAPE, requests=0, faults=0)
        self.result = Result(self._settings)

    async def play(self, minutes: float, streams: int) -> tuple[Held, Held]:
        """What was held before and after."""
        await self._load(FIRST_S, 0, streams)
        before = await self._at_rest()
        count = max(1, round(60.0 * minutes / FAULT_EVERY_S))
        await self._load(60.0 * minutes, count, streams)
        after = await self._at_rest()
        deadline = asyncio.get_running_loop().time() + BACK_WITHIN_S
        while grown(before, after) and asyncio.get_running_loop().time() < deadline:
            after = await self._at_rest()
        self.result.problems += grown(before, after)
        ended = self._broken.ended_by_themselves
        self.result.problems += [f"ended by itself: {one}" for one in ended]
        return before, after

    async def _load(self, seconds: float, count: int, streams: int) -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clients.ask_until(stop, streams))
            schedule = faults(self._settings.seed, self._settings.shape)
            for _ in range(count):
                await self._fault(replace(next(schedule), pause_s=seconds / count))
            if not count:
                await asyncio.sleep(seconds)
            stop.set()
        self._account(AFTER if count else BEFORE)

    async def _fault(self, fault: Fault) -> None:
        ends_at = asyncio.get_running_loop().time() + fault.pause_s
        await asyncio.sleep(fault.pause_s / 2)
        self._account(self.result.faults[-1].kind if self.result.faults else BEFORE)
        self.result.faults.append(fault)
        await self._broken.do(fault, self._killed)
        self._account(fault.kind)
        await asyncio.sleep(max(0.0, ends_at - asyncio.get_running_loop().time()))

    def _killed(self, program: str) -> None:
        if router := self._routers.get(program):
            router.kills.append(asyncio.get_running_loop().time())

    def _account(self, spell: str) -> None:
        new = self._clients.requests[len(self.result.spells) :]
        self.result.spells += [(spell, request) for request in new]

    async def _at_rest(self) -> Held:
        await asyncio.sleep(REST_S)
        mesh = self._broken.mesh
        held = {name: _of_process(pid) for name, pid in sorted(mesh.pids.items())}
        async with aiohttp.ClientSession() as http:
            for region, address in self._monitors.items():
                held[f"nats-{region}"] |= await _of_server(http, address)
            for region in self._monitors:
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
    state, regions = StateDirectory(place / ".mesh"), topology.load(config)
    options = DemoOptions(config=config, state=state.path, time_scale=TIME_SCALE)
    with state.held():
        broken = Breakable(regions, options, state)
        async with broken.mesh as mesh:
            await mesh.start()
            [model] = await served_models(regions)
            routers = [
                Router(f"router-{region}-{name}", f"http://{address}")
                for region, addresses in mesh.endpoints.items()
                for name, address in addresses.items()
            ]
            monitors = {name: str(region.monitor[0]) for name, region in regions.regions.items()}
            run = Soak(broken, routers, model, monitors, seed)
            before, after = await run.play(minutes, streams)
            return run.result, before, after


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
