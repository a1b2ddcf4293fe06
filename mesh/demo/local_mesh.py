"""Every region of a topology on this machine, with the wide area between them.

All that can start together does: a region's routers and engines start once its nats-server
speaks, an agent once its engine listens; no region waits for another. The delaying links run
inside this process, in front of the ports where nats-servers accept leaf connections.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from infra.address import Address
from infra.bus import BusUnreachable
from infra.ending import end_all
from infra.nats import bundle, server
from infra.nats.bundle import RegionFiles
from infra.topology import Region, Topology
from infra.workers import worker_names, worker_page
from mesh.adapters import streams
from mesh.demo import ports
from mesh.demo.child import Child, Died, Ready
from mesh.demo.commands import Commands, engine_url
from mesh.demo.engine_look import why_silent
from mesh.demo.options import EngineKind, GivenEngine, Options
from mesh.demo.program import Kind, Program
from mesh.demo.state_directory import StateDirectory
from mesh.demo.supervisor import Supervisor
from mesh.demo.wan_proxy import WanProxy
from mesh.doctor.logins import read_logins
from schemas.ids import RegionId, ReplicaId, RouterId

log = logging.getLogger(__name__)

# A given engine may still be loading its model. It is waited for, but after this long not silently.
GIVEN_ENGINE_WITHIN_S = 5.0
# And after this long the mesh is up without it: one bad engine must not keep the good ones away.
UP_WITHOUT_IT_AFTER_S = 15.0


@dataclass(frozen=True, slots=True)
class EngineSilent:
    """A given engine does not serve yet; its agent goes on asking."""

    agent: Program
    engine: GivenEngine
    why: str


Event = Ready | Died | EngineSilent


class LocalMesh:
    """An async context manager: `start` inside, every process and link is ended on exit."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        state: StateDirectory,
        report: Callable[[Event], None],
    ) -> None:
        """Raises ServerUnusable if this machine has no nats-server that will do."""
        self.endpoints = {name: _endpoints(region) for name, region in topology.regions.items()}
        self.pages = {name: _pages(region) for name, region in topology.regions.items()}
        self._topology = topology
        self._options = options
        self._state = state
        self._report = report
        self._nats_server = server.find()
        self._supervisor = Supervisor(state.logs, report)
        self._links = contextlib.AsyncExitStack()
        self._keepers: list[asyncio.Task[None]] = []
        self.wan: dict[tuple[RegionId, RegionId], WanProxy] = {}  # (solicitor, acceptor) → link
        self.missing: list[EngineSilent] = []  # given engines that `start` did not wait for

    @property
    def pids(self) -> dict[str, int]:
        """The process of every program that runs now, by its name."""
        return self._supervisor.pids

    def credentials(self, region: str) -> Path:
        """The directory of a region's credentials, one file a user."""
        return self._state.config / region / bundle.CREDENTIALS

    def metrics(self, region: RegionId) -> dict[RouterId, str]:
        """The page of metrics of every router's every process, by the name that it goes by."""
        workers = self._topology.regions[region].workers
        found = {}
        for router, door in self.endpoints[region].items():
            page = self.pages[region].get(router)
            for number, name in enumerate(worker_names(router, workers)):
                where = door if page is None else worker_page(page, number)
                found[name] = f"http://{where}/metrics"
        return found

    def sizes(self) -> Counter[Kind]:
        """How many programs of each kind the mesh has."""
        sizes: Counter[Kind] = Counter()
        for region in self._topology.regions.values():
            engines = 0 if self._options.engines else len(region.replicas)
            sizes[Kind.NATS] += 1
            sizes[Kind.ENGINE] += engines
            sizes[Kind.AGENT] += len(region.replicas)
            sizes[Kind.ROUTER] += len(region.routers)
        return sizes

    async def start(self) -> None:
        """Start everything and return when all is ready, but for the engines in `missing`.

        Raises GaveUp if a program ends.
        """
        files = await self._configure()
        commands = Commands(self._topology, self._options, self._state, self._nats_server, files)
        try:
            async with asyncio.TaskGroup() as group:
                for name, region in self._topology.regions.items():
                    group.create_task(self._start_region(group, commands, name, region))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others ended because of the first

    def hurry(self) -> None:
        """Let nothing drain any more: kill at once."""
        self._supervisor.hurry()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_all(self._keepers)
        await self._supervisor.stop()
        await self._links.aclose()

    async def _configure(self) -> Mapping[RegionId, RegionFiles]:
        """Raise the links, and tell the nats-servers to dial each other through them."""
        leaf_addresses: dict[tuple[RegionId, RegionId], Address] = {}
        for link in self._topology.links:
            target = self._topology.regions[link.acceptor].leaf
            proxy = WanProxy(target, one_way_s=link.rtt_s / 2)
            await self._links.enter_async_context(proxy)
            self.wan[link.solicitor, link.acceptor] = proxy
            leaf_addresses[link.solicitor, link.acceptor] = proxy.address
        return bundle.write(
            self._topology,
            self._state.config,
            state_directory=self._state.jetstream,
            leaf_addresses=leaf_addresses,
        )

    async def _start_region(
        self, group: asyncio.TaskGroup, commands: Commands, name: RegionId, region: Region
    ) -> None:
        await self._supervisor.start(commands.nats(name))
        await self._set_up_streams(name)
        self._keepers.append(asyncio.create_task(self._keep_streams(name)))
        for router in region.routers:
            page = self.pages[name].get(router)
            program = commands.router(name, router, self.endpoints[name][router], page)
            group.create_task(self._start_router(program))
        given = deque(engine for engine in self._options.engines if engine.region == name)
        for replica in region.replicas:
            if given:
                group.create_task(self._start_given(commands, name, replica, given.popleft()))
            else:
                group.create_task(self._start_simulated(commands, name, replica))

    async def _set_up_streams(self, name: RegionId) -> None:
        """Make them, or put right what somebody altered; a region serves without them too."""
        setup = read_logins(self._topology, self._state.config)[name].setup
        assert setup is not None, "rendered before anything is started"
        has_peers = bool(self._topology.peers(name))
        task = asyncio.create_task(streams.set_up(setup, name, has_peers=has_peers))
        try:
            await asyncio.wait([task])  # nats-py may lose a cancel
            for stream, what in task.result().items():
                if what == streams.PUT_RIGHT:
                    log.error("stream %s of %s was altered, and is put right", stream, name)
        except (BusUnreachable, streams.StreamsUnusable) as error:
            log.warning("streams of %s: %s", name, error)
        finally:
            await end_all([task])

    async def _keep_streams(self, name: RegionId) -> None:
        while True:
            await asyncio.sleep(streams.CHECK_S)
            await self._set_up_streams(name)

    async def _start_router(self, program: Program) -> None:
        child = self._supervisor.launch(program)
        if self._options.engines:  # it may have none to be ready with
            await _ready_within(child, UP_WITHOUT_IT_AFTER_S)
        else:
            await child.wait_ready()

    async def _start_given(
        self, commands: Commands, region: RegionId, replica: ReplicaId, engine: GivenEngine
    ) -> None:
        kind = self._options.engine_kind
        agent = commands.agent(region, replica, engine, kind)
        child = self._supervisor.launch(agent)
        if await _ready_within(child, GIVEN_ENGINE_WITHIN_S):
            return
        self._report(EngineSilent(agent, engine, await why_silent(engine, kind)))
        if not await _ready_within(child, UP_WITHOUT_IT_AFTER_S - GIVEN_ENGINE_WITHIN_S):
            self.missing.append(EngineSilent(agent, engine, await why_silent(engine, kind)))

    async def _start_simulated(
        self, commands: Commands, region: RegionId, replica: ReplicaId
    ) -> None:
        engine = await self._supervisor.start(commands.engine(region, replica))
        url = engine_url(engine.program)
        # Started again after a crash, it must be where its agent looks for it.
        engine.program = commands.engine(region, replica, port=urlsplit(url).port or 0)
        agent = commands.agent(region, replica, GivenEngine(region, url), EngineKind.VLLM)
        await self._supervisor.start(agent)


async def _ready_within(child: Child, wait_s: float) -> bool:
    """Whether it becomes ready in time. Raises GaveUp if it ends instead."""
    try:
        async with asyncio.timeout(wait_s):
            await child.wait_ready()
    except TimeoutError:
        return False
    return True


def _endpoints(region: Region) -> dict[RouterId, Address]:
    """Where each router listens: the first as configured, the others wherever there is room."""
    first, *others = region.routers
    return {first: region.http, **{router: ports.free(region.http.host) for router in others}}


def _pages(region: Region) -> dict[RouterId, Address]:
    """Where each router's first worker has a page of its own; empty where none needs one."""
    first, *others = region.routers
    if region.metrics is None and region.workers == 1:
        return {}
    here = region.metrics or ports.free_row(region.http.host, region.workers)
    return {
        first: here,
        **{router: ports.free_row(region.http.host, region.workers) for router in others},
    }
