"""Routers, agents and simulated engines of this machine, around the nats-servers in containers.

Each reaches its region's server through the port that the container publishes, so between the
regions there are only the containers' networks. Rejected: Python in containers too. Its image
would have to be made of this interpreter's own files for every run, and would prove nothing
more about the links.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.address import Address
from mesh.demo.commands import engine_url
from mesh.supervisor.program import FileWritten, Program, ProgramKind, http_ready
from mesh.supervisor.supervisor import ProgramDied, ProgramReady, Supervisor
from tests.containers.leaf_mesh import MESH_TOML, LeafMesh
from tests.support.ports import free_ports

TIME_SCALE = 20  # a prefill of 300 ms takes 15


class Stack:
    """One router and one replica per region, once `start` has returned."""

    def __init__(self, leaf_mesh: LeafMesh, directory: Path) -> None:
        self.deaths: list[ProgramDied] = []
        self.routers: dict[str, str] = {}
        self.engines: dict[str, str] = {}
        self._mesh = leaf_mesh
        self._directory = directory
        self._supervisor = Supervisor(directory, self._report)

    async def start(self, region: str, models: Iterable[str]) -> None:
        """Start a region's processes; its replica serves `models`."""
        replica = self._mesh.topology.region(region).replicas[0]
        named = [word for model in models for word in ("--model", model)]
        engine = self._program(
            *(ProgramKind.ENGINE, region, f"engine-{replica}"),
            command=("agents.cli", "engine-sim", "--time-scale", str(TIME_SCALE), *named),
        )
        await self._supervisor.start(engine)
        self.engines[region] = engine_url(engine)
        agent = self._program(
            *(ProgramKind.AGENT, region, f"agent-{replica}"),
            command=(
                *("agents.cli", "run", "--region", region, "--replica", replica),
                *("--engine-url", self.engines[region]),
                # Engines with two models are not measured, so us alone would have a known speed.
                "--no-speed-probe",
            ),
            environment=self._mesh.environment(region, f"agent-{replica}"),
        )
        await self._supervisor.start(agent)
        await self._supervisor.start(self._router(region))

    async def stop(self) -> None:
        """End every process."""
        await self._supervisor.stop()

    def _router(self, region: str) -> Program:
        address = Address("127.0.0.1", free_ports(1)[0])
        self.routers[region] = f"http://{address}"
        where = ("--region", region, "--config", str(MESH_TOML), "--http", str(address))
        return Program(
            name=f"router-{region}",
            kind=ProgramKind.ROUTER,
            region=region,
            command=(sys.executable, "-m", "mesh.cli.main", "router", *where),
            ready=http_ready(address),
            environment=self._mesh.environment(region, "router"),
        )

    def _program(
        self,
        kind: ProgramKind,
        region: str,
        name: str,
        *,
        command: tuple[str, ...],
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        ready_file = self._directory / f"{name}.json"
        return Program(
            name=name,
            kind=kind,
            region=region,
            command=(sys.executable, "-m", *command, "--ready-file", str(ready_file)),
            ready=FileWritten(ready_file),
            environment=environment or {},
        )

    def _report(self, news: ProgramReady | ProgramDied) -> None:
        if isinstance(news, ProgramDied):
            self.deaths.append(news)
