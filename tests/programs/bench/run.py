"""A whole run: everything started side by side, every cell played in turns, everything ended."""

import asyncio
import itertools
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.programs.bench.cells import Cell
from tests.programs.bench.measure import Figures, Meter, machine
from tests.programs.bench.processes import Absent, Processes
from tests.programs.bench.results import Results
from tests.programs.bench.systems.direct import direct
from tests.programs.bench.systems.dynamo import dynamo, mesh_dynamo
from tests.programs.bench.systems.mesh import forwarded, last_release, mesh
from tests.programs.bench.systems.rust_routers import sglang_router, smg, vllm_router
from tests.programs.bench.systems.system import Place, System
from tests.programs.bench.targets import LAST_RELEASE
from tests.support.ports import free_ports

ENGINES = 2
FILES_MIN = 8192  # a thousand streams are two sockets each in some processes

Start = Callable[[Place], Awaitable[System]]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is played."""

    cells: Sequence[Cell]
    rounds: int
    systems: Mapping[str, Start]  # in the order of their turns
    environments: Path  # of installed programs


def systems(environments: Path, trees: Sequence[Path]) -> dict[str, Start]:
    """All that can be measured, by name; `trees`: other checkouts of the mesh, to compare with."""
    return {
        "direct": direct,
        "mesh": mesh,
        **{f"mesh of {tree.name}": partial(_other, tree=tree) for tree in trees},
        LAST_RELEASE: partial(last_release, name=LAST_RELEASE),
        "forwarded": forwarded,
        "sglang-router": partial(sglang_router, environments=environments),
        "vllm-router": partial(vllm_router, environments=environments),
        "smg": partial(smg, environments=environments),
        "dynamo": partial(dynamo, environments=environments),
        "mesh-dynamo": partial(mesh_dynamo, environments=environments),
    }


async def run(settings: Settings, show: Show) -> Results:
    """Play everything; what can't be started or played is in the results."""
    _allow_files()
    found = Results(machine=machine() | {"rounds": settings.rounds, "engines": ENGINES})
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        async with Processes(Path(name) / "logs") as processes:
            place = Place(processes, await engines(processes, ENGINES), Path(name))
            up = await _start_all(place, settings, found, show)
            meter = Meter(place.directory, settings.environments)
            turns = itertools.count()
            for system in up:  # connections, caches, first imports: of none of the rounds
                await _turn(meter, settings.cells[0], system, next(turns), found)
            for cell, number in itertools.product(settings.cells, range(settings.rounds)):
                found.cells[cell.name] = cell.title()
                for system in up:
                    figures = await _turn(meter, cell, system, next(turns), found)
                    found.add(cell.name, system.name, figures)
                    show(_line(cell, number + 1, system, figures))
    return found


async def _start_all(place: Place, settings: Settings, found: Results, show: Show) -> list[System]:
    up = []
    for name, start in settings.systems.items():
        try:
            system = await start(place)
        except Absent as problem:
            found.absent[name] = str(problem)
            show(f"{name} is absent: {problem}")
        else:
            found.settings[name] = system.settings
            if system.has_own_engines:
                found.apart.append(name)
            up.append(system)
    return up


async def _turn(meter: Meter, cell: Cell, system: System, turn: int, found: Results) -> Figures:
    try:
        return await meter.measure(cell, system, turn)
    except Absent as problem:
        found.absent[f"{system.name}: {cell.name}"] = str(problem)
        return {}


async def _other(place: Place, tree: Path) -> System:
    return await mesh(place, name=f"mesh of {tree.name}", tree=tree)


async def engines(processes: Processes, count: int) -> list[str]:
    """Start so many scripted ones; their addresses."""

    async def one(port: int) -> str:
        url = f"http://127.0.0.1:{port}"
        command = (sys.executable, "-m", "tests.programs.bench.engine", str(port))
        look = processes.answers(f"{url}/health")
        await processes.start(f"engine-{port}", command, ready=look)
        return url

    return list(await asyncio.gather(*map(one, free_ports(count))))


def _allow_files() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now < FILES_MIN:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES_MIN, most), most))


def _line(cell: Cell, number: int, system: System, figures: Figures) -> str:
    known = ", ".join(f"{name} {value:,.1f}" for name, value in figures.items())
    return f"{cell.name}, round {number}, {system.name}: {known or 'nothing'}"
