"""Every region of a topology on this machine, with simulated wide-area links between them.

All that can start together does: a region's routers and engines start once its nats-server
answers, an agent once its engine listens; no region waits for another. The delaying links run
inside this process, in front of the ports where nats-servers accept leaf connections.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_kinds import KINDS
from agents.adapters.engine_probe import recognised
from agents.core.events import EngineScraped, ScrapeFailed
from infra.address import Address
from infra.bus import BusUnreachable
from infra.credentials_file import CREDENTIALS
from infra.nats import bundle, server
from infra.nats.bundle import RegionFiles
from infra.process import end_all
from infra.topology import RegionTable, Topology
from infra.workers import worker_names, worker_page
from mesh.adapters import streams
from mesh.demo.commands import PRELOADED, Commands, engine_url
from mesh.demo.engine_profile import simulated_profile
from mesh.demo.options import (
    DemoOptions,
    FreeAddresses,
    GivenEngine,
    GivenEngineKind,
    profile_files,
)
from mesh.demo.state_directory import StateDirectory, write_atomically
from mesh.demo.stream_checks import keep_checking
from mesh.demo.wan_proxy import WanProxy
from mesh.doctor.logins import read_logins
from mesh.supervisor.program import Program, ProgramKind
from mesh.supervisor.supervisor import ProgramDied, ProgramReady, SupervisedProgram, Supervisor
from schemas.ids import RegionId, ReplicaId, RouterId

log = logging.getLogger(__name__)

# A given engine may still be loading its model: after the first time this is reported, and after
# the second the mesh is up without it, so that one bad engine does not keep the others waiting.
GIVEN_ENGINE_WITHIN_S = 5.0
UP_WITHOUT_IT_AFTER_S = 15.0
AGENT_NOT_READY = "it answers, its agent is not ready yet; if that lasts, `mesh doctor` says why"


@dataclass(frozen=True, slots=True)
class EngineMissing:
    """A given engine does not serve yet; its agent keeps trying."""

    agent: Program
    engine: GivenEngine
    why: str


DemoEvent = ProgramReady | ProgramDied | EngineMissing


class LocalMesh:
    """An async context manager: `start` inside; every process and link is ended on exit."""

    def __init__(
        self,
        topology: Topology,
        options: DemoOptions,
        state: StateDirectory,
        report: Callable[[DemoEvent], None],
    ) -> None:
        """Raises ServerUnusable if this machine has no usable nats-server, TopologyError for a
        profile that can't be used."""
        free = FreeAddresses(topology.addresses())
        self.endpoints = {
            name: _endpoints(region, free) for name, region in topology.regions.items()
        }
        self.pages = {name: _pages(region, free) for name, region in topology.regions.items()}
        # Of each region's first router.
        self.consoles = {
            name: region.console or free.first(region.http.host)
            for name, region in topology.regions.items()
        }
        self.runner_pages = {
            name: {runner: free.first(region.http.host) for runner in region.batch_runners}
            for name, region in topology.regions.items()
        }
        self._profiles = profile_files(topology, options.config)
        self._topology = topology
        self._options = options
        self._state = state
        self._report = report
        self._nats_server = server.find()
        self._supervisor = Supervisor(state.logs, report, PRELOADED)
        self._links = contextlib.AsyncExitStack()
        self._stream_checks: list[asyncio.Task[None]] = []
        # (solicitor, acceptor) → the way to each of the acceptor's nats-servers
        self.wan: dict[tuple[RegionId, RegionId], tuple[WanProxy, ...]] = {}
        # What `start` did not wait for: given engines, and routers that have no engine yet.
        self.missing: list[EngineMissing] = []
        self.routers_not_ready: list[str] = []

    @property
    def pids(self) -> dict[str, int]:
        """The process of every program that runs now, by its name."""
        return self._supervisor.pids

    def credentials(self, region: str) -> Path:
        """The directory of a region's credentials, one file per user."""
        return self._state.config / region / CREDENTIALS

    def metrics(self, region: RegionId) -> dict[RouterId, str]:
        """The metrics page of every process of every router, by the name of that process."""
        table = self._topology.regions[region]
        found = {}
        for router, endpoint in self.endpoints[region].items():
            page = self.pages[region].get(router)
            for number, name in enumerate(worker_names(router, table.workers)):
                where = f"http://{page and worker_page(page, number)}"
                found[name] = f"{where if page else f'{table.scheme}://{endpoint}'}/metrics"
        return found

    def sizes(self) -> Counter[ProgramKind]:
        sizes: Counter[ProgramKind] = Counter()
        for region in self._topology.regions.values():
            sizes[ProgramKind.NATS] += len(region.servers)
            sizes[ProgramKind.ENGINE] += 0 if self._options.engines else len(region.replicas)
            sizes[ProgramKind.AGENT] += len(region.replicas)
            sizes[ProgramKind.ROUTER] += len(region.routers)
            sizes[ProgramKind.BATCH_RUNNER] += len(region.batch_runners)
        return sizes

    async def start(self) -> None:
        """Start everything and return when all is ready, but for what is missing.

        Raises ProgramFailed if a program ends.
        """
        await self._supervisor.preload()
        files = await self._configure()
        commands = Commands(self._topology, self._options, self._state, self._nats_server, files)
        try:
            async with asyncio.TaskGroup() as group:
                for name, region in self._topology.regions.items():
                    group.create_task(self._start_region(group, commands, name, region))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others ended because of the first

    def hurry(self) -> None:
        self._supervisor.hurry()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_all(self._stream_checks)
        await self._supervisor.stop()
        await self._links.aclose()

    async def _configure(self) -> Mapping[RegionId, RegionFiles]:
        """Start the links, and configure the nats-servers to connect through them."""
        write_atomically(self._state.console_key, secrets.token_hex(16).encode())
        for link in self._topology.links:
            targets = self._topology.regions[link.acceptor].leaf
            proxies = tuple(WanProxy(target, one_way_s=link.rtt_s / 2) for target in targets)
            for proxy in proxies:
                await self._links.enter_async_context(proxy)
            self.wan[link.solicitor, link.acceptor] = proxies
        leaf_addresses = {ends: [one.address for one in way] for ends, way in self.wan.items()}
        return bundle.write(
            self._topology,
            self._state.config,
            state_directory=self._state.jetstream,
            leaf_addresses=leaf_addresses,
            tls=self._options.tls,
        )

    async def _start_region(
        self, group: asyncio.TaskGroup, commands: Commands, name: RegionId, region: RegionTable
    ) -> None:
        servers = commands.nats(name)
        await asyncio.gather(*map(self._supervisor.start, servers))
        await self._set_up_streams(name)
        names = (program.name for program in servers)
        urls = dict(zip(names, region.bus_url.split(","), strict=True))
        checks = keep_checking(urls, lambda: self._set_up_streams(name), streams.CHECK_S)
        self._stream_checks.append(asyncio.create_task(checks))
        for router in region.routers:
            page = self.pages[name].get(router)
            console = self.consoles[name] if router == region.routers[0] else None
            program = commands.router(name, router, self.endpoints[name][router], page, console)
            group.create_task(self._start_router(program))
        for runner, page in self.runner_pages[name].items():
            program = commands.batch_runner(name, runner, page)
            group.create_task(self._supervisor.start(program))
        given = deque(engine for engine in self._options.engines if engine.region == name)
        for replica in region.replicas:
            if given:
                group.create_task(self._start_given(commands, name, replica, given.popleft()))
            else:
                group.create_task(self._start_simulated(commands, name, replica))

    async def _set_up_streams(self, name: RegionId) -> None:
        """Make a region's streams, or repair altered ones; a region serves without them too."""
        login = read_logins(self._topology, self._state.config)[name]
        assert login.setup is not None, "rendered before anything is started"
        made = streams.set_up_region(self._topology, name, login.setup, login.batch_setup)
        task = asyncio.create_task(made)
        try:
            await asyncio.wait([task])  # nats-py may lose a cancel
            for stream, what in task.result().items():
                if what == streams.PUT_RIGHT:
                    log.error("stream %s of %s had been altered and was repaired", stream, name)
        except (BusUnreachable, streams.StreamsUnusable) as error:
            log.warning("streams of %s: %s", name, error)
        finally:
            await end_all([task])

    async def _start_router(self, program: Program) -> None:
        router = self._supervisor.launch(program)
        if not self._options.engines:
            await router.wait_ready()
        elif not await _ready_within(router, UP_WITHOUT_IT_AFTER_S):  # for want of an engine
            self.routers_not_ready.append(program.name)

    async def _start_given(
        self, commands: Commands, region: RegionId, replica: ReplicaId, engine: GivenEngine
    ) -> None:
        kind = self._options.engine_kind or await recognised_kind(engine)
        agent = commands.agent(region, replica, engine, kind, self._profiles.get(region))
        supervised = self._supervisor.launch(agent)
        if await _ready_within(supervised, GIVEN_ENGINE_WITHIN_S):
            return
        problem = await engine_problem(engine, kind)
        if problem != AGENT_NOT_READY:  # the engine answers: its agent needs some seconds more
            self._report(EngineMissing(agent, engine, problem))
        if not await _ready_within(supervised, UP_WITHOUT_IT_AFTER_S - GIVEN_ENGINE_WITHIN_S):
            self.missing.append(EngineMissing(agent, engine, await engine_problem(engine, kind)))

    async def _start_simulated(
        self, commands: Commands, region: RegionId, replica: ReplicaId
    ) -> None:
        engine = await self._supervisor.start(commands.engine(region, replica))
        url = engine_url(engine.program)
        # After a restart it must listen where its agent expects it.
        engine.program = commands.engine(region, replica, port=urlsplit(url).port or 0)
        given = GivenEngine(region, url)
        profile = self._profiles.get(region)
        if profile is None and self.runner_pages[region]:
            profile = self._offline_profile()
        agent = commands.agent(region, replica, given, GivenEngineKind.VLLM, profile)
        await self._supervisor.start(agent)

    def _offline_profile(self) -> Path:
        """A file of how agents of simulated engines take offline work."""
        path = self._state.run / "offline-profile.json"
        options = self._options
        write_atomically(path, simulated_profile(options.profile, options.time_scale))
        return path


async def _ready_within(program: SupervisedProgram, wait_s: float) -> bool:
    """Whether it becomes ready in time. Raises ProgramFailed if it ends instead."""
    try:
        async with asyncio.timeout(wait_s):
            await program.wait_ready()
    except TimeoutError:
        return False
    return True


def _endpoints(region: RegionTable, free: FreeAddresses) -> dict[RouterId, Address]:
    """Where each router listens: the first as configured, the others on free ports."""
    first, *others = region.routers
    return {first: region.http, **{router: free.first(region.http.host) for router in others}}


def _pages(region: RegionTable, free: FreeAddresses) -> dict[RouterId, Address]:
    """The metrics page of each router's first worker; empty where the endpoint has /metrics."""
    first, *others = region.routers
    if region.metrics is None and region.workers == 1:
        return {}
    host, workers = region.http.host, region.workers
    pages = {first: region.metrics or free.first(host, workers)}
    return pages | {router: free.first(host, workers) for router in others}


async def recognised_kind(given: GivenEngine) -> GivenEngineKind:
    """As which kind an agent is to serve it, by what it shows."""
    page, key = given.metrics_page, given.key
    seen = await recognised(given.url, page, None if key is None else key.get_secret_value())
    if seen is None:
        text = "%s does not answer yet: its agent takes it for %s (--engine-kind)"
        log.warning(text, given.url, GivenEngineKind.VLLM)
    if seen == GivenEngineKind.OPENAI and given.metrics_url:
        seen = None  # the page of metrics that it was given is not there: the agent will say so
    return GivenEngineKind(seen or GivenEngineKind.VLLM)


async def engine_problem(given: GivenEngine, kind: GivenEngineKind) -> str:
    """Why a given engine does not serve as one of that kind, and what to do. Takes 2 s at most.

    Reads the engine with the agent's own code: heartbeats carry no reasons, and reading them from
    the agent's log would make its wording an interface.
    """
    found = await _read_engine(given, kind)
    if isinstance(found, EngineScraped):
        return AGENT_NOT_READY
    if kind is not GivenEngineKind.OPENAI and isinstance(
        await _read_engine(given, GivenEngineKind.OPENAI), EngineScraped
    ):
        return f"{found.detail}; if that server has no metrics, use --engine-kind openai"
    return found.detail


async def _read_engine(given: GivenEngine, kind: GivenEngineKind) -> EngineScraped | ScrapeFailed:
    engine = EngineClient(
        api_url=given.url,
        metrics_url=given.metrics_page,
        kind=KINDS[kind],
        clock=asyncio.get_running_loop().time,
        options=EngineOptions(
            key=None if given.key is None else given.key.get_secret_value(),
            models=given.models,
            reads_batch_max=False,
        ),
    )
    try:
        return await engine.scrape()
    finally:
        engine.close()
