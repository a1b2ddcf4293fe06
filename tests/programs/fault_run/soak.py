"""Half an hour of load with a fault a minute: does a mesh at rest hold what it held before?

    make soak [MINUTES=30]

The mesh, the clients and the faults of `make fault-run`. After a first minute of load, and again at
the end, clients stop, and when all is quiet this is read of every process: its own memory, open
descriptors and threads; of routers, what their pages say is under way; of nats-servers,
connections, subscriptions, streams, consumers and what is stored. A process that was killed
meanwhile is read as any other.

Every process must be there again. Streams, consumers, connections and subscriptions must be as many
as before, other counts no more. Memory may be 1.5 times what it was, or 20 MB more, whichever is
larger; of each nats-server, 64 MB: Go's runtime lets the heap double before it collects (GOGC) and
gives memory back late. One had 20.9 MB before and 41.2 MB after half an hour (49,422 requests, 30
faults). Three things are shown and not judged: nats-servers' threads, as Go's runtime keeps each
that it has started, which is no leak; what they store, which the load may add to; and the memory of
forked processes together with what they share with the process that they were forked from, which
tells growth from pages that were shared and have been written to since.
"""

import asyncio
import contextlib
import itertools
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
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
from tests.programs.live.stream_memory import memory_kib, private_bytes
from tests.programs.studies.tables import markdown
from tests.support.mesh_up import RTT_MS, write_config
from tests.support.result_page import result_page

FAULT_EVERY_S = 60.0
FIRST_S = 60.0  # of load, before what is held is read for the first time
REST_S = 30.0  # without clients, before anything is read
BACK_WITHIN_S = 180.0  # from then on
APART_S = 1.0  # between two readings of a nats-server
ANSWERS_WITHIN = aiohttp.ClientTimeout(total=10.0)  # a page
MEMORY_RATIO, MEMORY_MORE_MB, SERVER_MEMORY_MB = 1.5, 20.0, 64.0
MEMORY, THREADS, STORED = "memory, MB", "threads", "stored, MB"
WITH_SHARED = "memory with what a fork shares, MB"
SERVER = "nats-"
EXACT = ("streams", "consumers", "connections", "subscriptions")
UNDER_WAY = re.compile(
    r"^mesh_(inflight|http_connections|peer_requests_held|body_bytes|answer_buffer_bytes)"
    r"(?:\{[^}]*\})? ([0-9.e+]+)$",
    re.MULTILINE,
)

Held = dict[str, dict[str, float]]  # by process: what of it


def not_back(before: Held, after: Held) -> list[str]:
    """What is missing, and what is more than it may be."""
    missing = [f"{name}: not there after" for name in before.keys() - after.keys()]
    missing += [f"{name}: not there before" for name in after.keys() - before.keys()]
    both = [name for name in before if name in after]
    return sorted(missing) + [
        line for name in both for line in _not_back(name, before[name], after[name])
    ]


def _not_back(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    for what in {**before, **after}:
        was, now = before.get(what), after.get(what)
        if was is None or now is None:
            yield f"{name}: {what}: not read {'before' if was is None else 'after'}"
        elif now > _most(name, what, was) or (what in EXACT and now != was):
            yield f"{name}: {what}: {was:g} before, {now:g} after"


def _most(name: str, what: str, was: float) -> float:
    """That it may be."""
    is_server = name.startswith(SERVER)
    if what == MEMORY:
        return SERVER_MEMORY_MB if is_server else max(MEMORY_RATIO * was, was + MEMORY_MORE_MB)
    is_shown_only = what in (STORED, WITH_SHARED) or (is_server and what == THREADS)
    return math.inf if is_shown_only else was


def _of_process(pid: int) -> dict[str, float]:
    return {
        MEMORY: round(private_bytes(pid) / 1e6, 1),
        WITH_SHARED: round(1024 * memory_kib(pid)["Anonymous"] / 1e6, 1),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        THREADS: len(list(Path(f"/proc/{pid}/task").iterdir())),
    }


class Soak(Run):
    """One run on a mesh that has started."""

    monitors: Mapping[RegionId, str]  # of each region's nats-server

    async def soaked(self, minutes: float) -> tuple[Result, Held, Held]:
        """What happened, and what was held before and after."""
        await self._load(FIRST_S, 0)
        before = await self._at_rest()
        await self._load(60.0 * minutes, max(1, round(60.0 * minutes / FAULT_EVERY_S)))
        await self._become_well()
        after, deadline = await self._at_rest(), self._now() + BACK_WITHIN_S
        while not_back(before, after) and self._now() < deadline:
            after = await self._at_rest()
        self._result.problems += not_back(before, after)
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
        try:
            await self._broken.do(fault, self._killed)
        except TimeoutError:
            self._result.problems.append(f"not ready again after {fault.kind}: {fault.what}")
        self._account(fault.kind)
        await asyncio.sleep(max(0.0, until - self._now()))

    async def _at_rest(self) -> Held:
        """Without what can't be read, as it has ended or does not answer."""
        await asyncio.sleep(REST_S)
        mesh = self._broken.mesh
        held: Held = {}
        async with aiohttp.ClientSession(timeout=ANSWERS_WITHIN) as http:
            for name, pid in sorted(mesh.pids.items()):
                with contextlib.suppress(OSError):
                    held[name] = _of_process(pid)
            for region, address in self.monitors.items():
                with contextlib.suppress(OSError, aiohttp.ClientError, KeyError):
                    held[f"{SERVER}{region}"] |= await _of_server(http, address)
                for router, page in mesh.metrics(region).items():
                    with contextlib.suppress(OSError, aiohttp.ClientError, KeyError):
                        held[f"router-{region}-{router}"] |= await _of_router(http, page)
        return held


async def _of_router(http: aiohttp.ClientSession, page: str) -> dict[str, float]:
    """What its page says is under way."""
    async with http.get(page) as answer:
        return {what: float(value) for what, value in UNDER_WAY.findall(await answer.text())}


async def _of_server(http: aiohttp.ClientSession, address: str) -> dict[str, float]:
    """Of its own pages, read twice: a check of its streams connects for a moment."""
    one = await _pages_of_server(http, address)
    await asyncio.sleep(APART_S)
    other = await _pages_of_server(http, address)
    return {what: min(value, other[what]) for what, value in one.items()}


async def _pages_of_server(http: aiohttp.ClientSession, address: str) -> dict[str, float]:
    async def page(name: str) -> Any:
        async with http.get(f"http://{address}/{name}") as answer:
            return await answer.json()

    server, stored = await page("varz"), await page("jsz")
    return {
        "connections": server["connections"],
        "subscriptions": server["subscriptions"],
        "streams": stored["streams"],
        "consumers": stored["consumers"],
        STORED: round((stored["memory"] + stored["storage"]) / 1e6, 1),
    }


def shown(before: Held, after: Held) -> str:
    """A row for each thing that is held: of all processes of a kind together."""
    kinds = sorted({name.partition("-")[0] for name in before})
    rows = []
    for kind in kinds:
        names = [name for name in before if name.startswith(f"{kind}-")]
        for what in before[names[0]]:
            was, now = (
                sum(of.get(name, {}).get(what, 0.0) for name in names) for of in (before, after)
            )
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
