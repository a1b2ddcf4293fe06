"""One run: a mesh, clients at work, and one fault after another; then all must be well again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from infra import topology
from mesh.demo.options import DemoOptions
from mesh.demo.session import served_models
from mesh.demo.state_directory import StateDirectory
from schemas import http
from tests.programs.fault_run.breaking import Breakable
from tests.programs.fault_run.clients import Clients, Request, Router
from tests.programs.fault_run.reading import End
from tests.programs.fault_run.schedule import Fault, Kind, Shape, faults
from tests.support.mesh_up import RTT_MS, write_config

TIME_SCALE = 4.0  # of the engines: an answer takes half a second where nothing is broken
BEFORE, AFTER = "before any fault", "after the last one"
SATURATED = f"429 {http.Fault.SATURATED.value.code}"  # as `read_refusal` returns it
WELL_WITHIN_S = 30.0  # from there on no router may refuse or break anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much of it."""

    seed: int
    shape: Shape
    requests: int  # at least; the round of faults under way is played to its end
    faults: int  # at least
    kinds: Sequence[Kind] = tuple(Kind)
    streams: int = 20
    quick: bool = False  # short stops
    time_scale: float = TIME_SCALE
    well_s: float = 2.0  # of clients' work before the first fault and after the last


@dataclass
class Result:
    """What happened. `spells` names what was going on as each request ended."""

    settings: Settings
    faults: list[Fault] = field(default_factory=list)
    spells: list[tuple[str, Request]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # beside requests' own violations

    @property
    def requests(self) -> list[Request]:
        """Every one that ended."""
        return [request for _, request in self.spells]

    @property
    def violations(self) -> list[str]:
        """All that must not be."""
        own = [
            f"request {one.number} ({spell}, {one.router}): {'; '.join(wrong)}"
            for spell, one in self.spells
            if (wrong := _wrong(spell, one))
        ]
        return own + self.problems


def _wrong(spell: str, one: Request) -> list[str]:
    """What is wrong with a request: by itself, or at that time, or at this load."""
    wrong = [*one.violations]
    if spell == BEFORE and one.end is not End.WHOLE and not wrong:
        wrong.append(f"{one.end} {one.detail}")
    elif one.detail == SATURATED:
        wrong.append(f"{one.detail} at a load far below what the engines can do")
    return wrong


async def run(settings: Settings, place: Path, show: Callable[[str], None]) -> Result:
    """Play it; the mesh's files are left in `place`. Raises GaveUp if the mesh does not start."""
    shape = settings.shape
    config = write_config(
        place,
        regions=tuple(shape.regions),
        replicas=shape.replicas,
        routers=shape.routers,
        rtt_ms=RTT_MS,
    )
    options = DemoOptions(config=config, state=place / ".mesh", time_scale=settings.time_scale)
    async with started(options, settings.seed) as (broken, routers, clients):
        return await Run(settings, broken, routers, clients, show).play()


@asynccontextmanager
async def started(
    options: DemoOptions, seed: int, breakable: type[Breakable] = Breakable
) -> AsyncIterator[tuple[Breakable, list[Router], Clients]]:
    """A mesh that can be broken, where its routers are, and clients of them all."""
    known, state = topology.load(options.config), StateDirectory(options.state)
    with state.held():
        broken = breakable(known, options, state)
        async with broken.mesh as mesh:
            await mesh.start()
            [model] = await served_models(known)
            # A client that finds none listening goes on to another region's.
            places = [(name, region) for region, named in mesh.endpoints.items() for name in named]
            routers = [
                Router(f"router-{region}-{name}", f"http://{mesh.endpoints[region][name]}")
                for name, region in sorted(places)
            ]
            yield broken, routers, Clients(routers, model, seed)


class Run:
    """Of one mesh, once."""

    def __init__(
        self,
        settings: Settings,
        broken: Breakable,
        routers: list[Router],
        clients: Clients,
        show: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._broken = broken
        self._routers = {router.name: router for router in routers}
        self._clients = clients
        self._show = show
        self._result = Result(settings)

    async def play(self) -> Result:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clients.ask_until(stop, self._settings.streams))
            await asyncio.sleep(self._settings.well_s)
            self._account(BEFORE)
            try:
                await self._faults()
            except TimeoutError:
                self._result.problems.append("what was killed did not become ready again")
            await asyncio.sleep(self._settings.well_s)
            stop.set()
        self._account(AFTER)
        await self._become_well()
        self._conclude()
        return self._result

    async def _faults(self) -> None:
        settings, played = self._settings, self._result.faults
        schedule = faults(settings.seed, settings.shape, kinds=settings.kinds, quick=settings.quick)
        for fault in schedule:
            enough = len(self._result.spells) >= settings.requests
            if enough and len(played) >= settings.faults:
                return
            await asyncio.sleep(fault.pause_s)
            self._account(played[-1].kind if played else BEFORE)
            began, before = self._now(), len(self._result.spells)
            played.append(fault)
            await self._broken.do(fault, self._killed)
            self._account(fault.kind)
            count = len(self._result.spells)
            self._show(
                f"{len(played)}: {fault.kind}: {fault.what}: {self._now() - began:.1f} s, "
                f"{count - before} requests ended, {count} in all, "
                f"{len(self._result.violations)} violations"
            )

    async def _become_well(self) -> None:
        """Every router answers whole again, soon."""
        deadline = self._now() + WELL_WITHIN_S
        while not await self._all_whole():
            if self._now() > deadline:
                last = self._result.requests[-len(self._routers) :]
                ends = ", ".join(f"{one.router}: {one.end} {one.detail}" for one in last)
                self._result.problems.append(f"not well {WELL_WITHIN_S:g} s after all: {ends}")
                return

    async def _all_whole(self) -> bool:
        since = len(self._result.spells)
        await self._clients.ask_each()
        self._account(AFTER)
        asked = self._result.requests[since:]
        return all(one.end is End.WHOLE for one in asked) and len(asked) == len(self._routers)

    def _conclude(self) -> None:
        """Every request ended once, and no process by itself."""
        ended = self._broken.ended_by_themselves
        self._result.problems += [f"ended by itself: {one}" for one in ended]
        numbers = sorted(one.number for one in self._result.requests)
        if numbers != [*range(1, self._clients.asked + 1)]:
            self._result.problems.append(
                f"{self._clients.asked} requests were made, {len(numbers)} ended, "
                f"{len({*numbers})} different ones"
            )

    def _account(self, spell: str) -> None:
        """What has ended since is this one's."""
        self._result.spells += [
            (spell, request) for request in self._clients.requests[len(self._result.spells) :]
        ]

    def _killed(self, program: str) -> None:
        if router := self._routers.get(program):
            router.kills.append(self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
