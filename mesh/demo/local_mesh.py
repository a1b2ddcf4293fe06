"""Every region of a topology on this machine, with the wide area between them.

All that can start together does: a region's routers and engines start once its nats-server
speaks, an agent once its engine listens; no region waits for another. The delaying links run
inside this process, in front of the ports where nats-servers accept leaf connections.
"""

import asyncio
import contextlib
from collections import Counter, deque
from pathlib import Path
from typing import Self

from infra.topology import Region, Topology
from mesh.demo.child import Report
from mesh.demo.commands import Commands, engine_port
from mesh.demo.options import EngineKind, GivenEngine, Options
from mesh.demo.program import Kind
from mesh.demo.state_directory import StateDirectory
from mesh.demo.supervisor import Supervisor
from mesh.demo.wan_proxy import WanProxy
from schemas.ids import RegionId, ReplicaId


class LocalMesh:
    """An async context manager: `start` inside, every process and link is ended on exit."""

    def __init__(
        self, topology: Topology, options: Options, state: StateDirectory, report: Report
    ) -> None:
        self._topology = topology
        self._options = options
        self._state = state
        self._supervisor = Supervisor(state.logs, report)
        self._links = contextlib.AsyncExitStack()

    @property
    def pids(self) -> dict[str, int]:
        """The process of every program that runs now, by its name."""
        return self._supervisor.pids

    def credentials(self, region: str) -> Path:
        """The directory of a region's credentials, one file a user."""
        return self._state.config / region / "credentials"

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
        """Start everything and return when all is ready. Raises GaveUp if a program ends."""
        commands = await self._configure()
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
        await self._supervisor.stop()
        await self._links.aclose()

    async def _configure(self) -> Commands:
        """Raise the links, and tell the nats-servers to dial each other through them."""
        leaf_urls: dict[tuple[RegionId, RegionId], str] = {}
        for link in self._topology.links:
            target = self._topology.regions[link.acceptor].leaf
            proxy = WanProxy(target, one_way_s=link.rtt_s / 2)
            await self._links.enter_async_context(proxy)
            leaf_urls[link.solicitor, link.acceptor] = str(proxy.address)
        raise NotImplementedError(leaf_urls)

    async def _start_region(
        self, group: asyncio.TaskGroup, commands: Commands, name: RegionId, region: Region
    ) -> None:
        await self._supervisor.start(commands.nats(name))
        for router in region.routers:
            group.create_task(self._supervisor.start(commands.router(name, router)))
        given = deque(engine for engine in self._options.engines if engine.region == name)
        for replica in region.replicas:
            if given:
                agent = commands.agent(name, replica, given.popleft(), self._options.engine_kind)
                group.create_task(self._supervisor.start(agent))
            else:
                group.create_task(self._start_simulated(commands, name, replica))

    async def _start_simulated(
        self, commands: Commands, region: RegionId, replica: ReplicaId
    ) -> None:
        engine = await self._supervisor.start(commands.engine(region, replica))
        port = engine_port(engine.program)
        # Started again after a crash, it must be where its agent looks for it.
        engine.program = commands.engine(region, replica, port=port)
        given = GivenEngine(region, f"http://127.0.0.1:{port}")
        await self._supervisor.start(commands.agent(region, replica, given, EngineKind.VLLM))
