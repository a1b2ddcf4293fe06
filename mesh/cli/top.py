"""The command `mesh top`: regions, replicas and requests of a running mesh, live."""

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import orjson

from infra.process import end_all
from infra.topology import Topology
from mesh.cli.mesh_options import find_mesh, mesh_options
from mesh.cli.unusable import Unusable
from mesh.top.rows import CONNECTING, STALE_S, Frame, frame_lines
from mesh.top.watch import FleetWatch
from schemas.ids import RegionId

EVERY_S = 1.0
LISTEN_S = STALE_S + 0.5  # then who is silent is known
AWAY_S = 3.0  # more, for a bus that is not connected yet
LOOK_S = 0.05
PIPED_COLUMNS = 120


@click.command()
@mesh_options("The directory that `mesh infra nats --out` wrote, or some regions' part of it.")
@click.option(
    "--region",
    "regions",
    multiple=True,
    help="Connect to this region's bus only. Once for each region.",
)
@click.option(
    "--every-s",
    type=click.FloatRange(0.1, 60),
    default=EVERY_S,
    help="Time between two frames, in seconds.",
)
@click.option("--once", is_flag=True, help="Print one frame as text, and end.")
@click.option("--json", "for_programs", is_flag=True, help="Print one frame as JSON, and end.")
def command(
    config: Path | None,
    credentials: Path,
    regions: tuple[str, ...],
    every_s: float,
    once: bool,
    for_programs: bool,
) -> None:
    """Show regions, replicas, traffic and requests of a running mesh, live.

    Connects to the bus of each region of which there are credentials, as its observer (or
    operator); of the others it shows what they publish to their peers. Press ? for the keys. Where
    the output is no terminal it prints one frame, as with --once. Exit code 2: no bus could be
    reached.
    """
    logging.basicConfig(level=logging.CRITICAL)  # of the connections; the screen shows what fails
    watch = _watch(config, credentials, regions)
    if once or for_programs or not (sys.stdout.isatty() and sys.stdin.isatty()):
        frame = asyncio.run(_with(watch, _one_frame(watch)))
        if for_programs:
            click.echo(orjson.dumps(frame, option=orjson.OPT_INDENT_2))
            return
        width = shutil.get_terminal_size((PIPED_COLUMNS, 0)).columns
        for line in frame_lines(frame, width, time.time()):
            click.echo(line)
        return
    from mesh.top.screen import TopScreen  # loads a library that other uses do not need

    asyncio.run(_with(watch, TopScreen(watch, every_s).run_async()))


def _watch(config: Path | None, credentials: Path, regions: tuple[str, ...]) -> FleetWatch:
    mesh = find_mesh(config, credentials)
    chosen = _known(mesh.topology, regions)
    usable = {
        name: login
        for name, login in mesh.logins().items()
        if name in chosen and (login.observer or login.operator)
    }
    if not usable:
        raise Unusable(
            f"no <region>/credentials/observer.env of {', '.join(chosen)} below {credentials}"
        )
    return FleetWatch(mesh.topology, usable)


def _known(mesh: Topology, regions: tuple[str, ...]) -> list[RegionId]:
    for name in regions:
        if name not in mesh.regions:
            raise Unusable(f"no region {name!r}; there are {', '.join(mesh.regions)}")
    return [RegionId(name) for name in regions or mesh.regions]


async def _with(watch: FleetWatch, work: Coroutine[Any, Any, Any]) -> Any:
    """Do the work while the buses are watched; an error of either ends both."""
    watching, working = asyncio.create_task(watch.run()), asyncio.create_task(work)
    try:
        await asyncio.wait([watching, working], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await working
    finally:
        await end_all([watching, working])
        with suppress(asyncio.CancelledError, Exception):
            await watching


async def _one_frame(watch: FleetWatch) -> Frame:
    """When every bus has been listened to, or did not answer in time."""
    started_at = watch.clock()
    while True:
        await asyncio.sleep(LOOK_S)
        connected = watch.connected_s()
        if all(each_s is not None and each_s >= LISTEN_S for each_s in connected):
            return watch.frame()
        if watch.clock() - started_at >= LISTEN_S + AWAY_S:
            break
    frame = watch.frame()
    if all(each_s is None for each_s in connected):
        silent = ", ".join(row.region for row in frame.regions if row.bus == CONNECTING)
        why = [*frame.notes, *([f"no answer yet from that of {silent}"] if silent else [])]
        raise Unusable(f"no bus could be reached: {'; '.join(why)}")
    return frame
