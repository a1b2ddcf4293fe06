"""The command line and environment of every program of a demo."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from infra.address import Address
from infra.nats.bundle import RegionFiles
from infra.nats.region_config import ADMIN, BATCH, OBSERVER
from infra.topology import Topology
from infra.workers import worker_page
from mesh.demo.options import DemoOptions, GivenEngine, GivenEngineKind
from mesh.demo.state_directory import StateDirectory, write_atomically
from mesh.supervisor.program import (
    AllReady,
    FileWritten,
    Program,
    ProgramKind,
    http_ready,
    speaks_nats,
)
from schemas.ids import RegionId

# Less than the supervisor's grace (`GRACE_S`).
ROUTER_DRAIN_S = 8.0
AGENT_DRAIN_S = 3.0
RUNNER_DRAIN_S = 2.0  # what a replica has of a job is computed again after the next start
# What the Python programs of a mesh import.
PRELOADED = (
    "agents.cli",
    "agents.runtime.command",
    "agents.simserver.command",
    "agents.simserver.serving",  # which the command imports when it runs
    "mesh.cli.batch_runner",
    "mesh.cli.main",
    "mesh.cli.router",
)


@dataclass(frozen=True, slots=True)
class Commands:
    """Makes the programs of one demo."""

    topology: Topology
    options: DemoOptions
    state: StateDirectory
    nats_server: Path
    files: Mapping[RegionId, RegionFiles]  # the rendered configuration and credentials

    def nats(self, region: str) -> list[Program]:
        """Each nats-server of the region."""
        servers = self.topology.region(region).servers
        configs = self.files[RegionId(region)].configs
        return [
            Program(
                name=f"nats-{region}{server.suffix}",
                kind=ProgramKind.NATS,
                region=region,
                command=(str(self.nats_server), "-c", str(config)),
                folder=config.parent,
                ready=speaks_nats(server.nats),
            )
            for server, config in zip(servers, configs, strict=True)
        ]

    def router(
        self,
        region: str,
        router: str,
        http: Address,
        metrics: Address | None,
        console: Address | None = None,
    ) -> Program:
        """One of a region's routers. `metrics`: the page of its first worker, if workers have any;
        `console`: where it serves one.

        It is ready when every worker is; one that does not listen yet is missed only at its page.
        """
        options, workers = self.options, self.topology.region(region).workers
        arguments: dict[str, str | None] = {
            "--region": region,
            "--router": router,
            "--drain-s": str(ROUTER_DRAIN_S),
            "--config": str(options.config),
            "--bus-servers": str(len(self.topology.region(region).servers)),
            "--http": str(http),
            "--log-level": options.log_level,
            "--policy": options.policy,
            "--pushing": options.pushing,
        }
        if BATCH in (credentials := self.files[RegionId(region)].credentials):
            arguments["--batch-credentials"] = str(credentials[BATCH])
        probes = [http_ready(http, tls=self.topology.region(region).tls is not None)]
        if metrics is not None:
            probes += [http_ready(worker_page(metrics, number)) for number in range(workers)]
            arguments |= {"--workers": str(workers), "--metrics": str(metrics)}
        words = _words(arguments)
        if console is not None:
            words += self._console(console)
        return Program(
            name=f"router-{region}-{router}",
            kind=ProgramKind.ROUTER,
            region=region,
            preloaded=True,
            command=_python("mesh.cli.main", "router", *self._as_user(region, "router"), *words),
            ready=AllReady(tuple(probes)),
        )

    def _console(self, address: Address) -> Iterator[str]:
        """A console that sees every region and may change each."""
        yield from ("--console", str(address))
        yield from ("--console-admin-key-file", str(self.state.console_key))
        for name, files in self.files.items():
            yield from ("--console-credentials", f"{name}={files.credentials[OBSERVER]}")
            yield from ("--console-admin-credentials", f"{name}={files.credentials[ADMIN]}")

    def batch_runner(self, region: str, name: str, metrics: Address) -> Program:
        """One of a region's batch runners; `metrics`: its page."""
        arguments = {
            "--region": region,
            "--name": name,
            "--batch-credentials": str(self.files[RegionId(region)].credentials[BATCH]),
            "--metrics": str(metrics),
            "--config": str(self.options.config),
            "--drain-s": str(RUNNER_DRAIN_S),
            "--log-level": self.options.log_level,
        }
        words = *self._as_user(region, "router"), *_words(arguments)
        return Program(
            name=f"batch-runner-{region}-{name}",
            kind=ProgramKind.BATCH_RUNNER,
            region=region,
            preloaded=True,
            command=_python("mesh.cli.main", "batch-runner", *words),
            ready=http_ready(metrics),
        )

    def engine(self, region: str, replica: str, *, port: int = 0) -> Program:
        """The simulated engine of a replica; port 0: a free one, see `engine_url`."""
        name = f"engine-{replica}"
        ready_file = self.state.run / f"{name}.json"
        words = ["--port", str(port), "--time-scale", str(self.options.time_scale)]
        if self.options.profile is not None:
            words += ["--profile", self.options.profile]
        return Program(
            name=name,
            kind=ProgramKind.ENGINE,
            region=region,
            preloaded=True,
            command=_python("agents.cli", "engine-sim", *words, "--ready-file", str(ready_file)),
            ready=FileWritten(ready_file),
        )

    def agent(
        self,
        region: str,
        replica: str,
        engine: GivenEngine,
        kind: GivenEngineKind,
        profile: Path | None = None,
    ) -> Program:
        """The agent of that engine. `profile`: how it takes offline work; None: not at all."""
        name = f"agent-{replica}"
        ready_file = self.state.run / f"{name}.json"
        arguments = {
            "--region": region,
            "--replica": replica,
            "--engine-kind": kind.value,
            "--engine-url": engine.url,
            "--metrics-url": engine.metrics_url,
            "--batch-max": None if engine.batch_max is None else str(engine.batch_max),
            "--load-s": None if engine.load_s is None else f"{engine.load_s:g}",
            "--profile": None if profile is None else str(profile),
            "--drain-timeout": str(AGENT_DRAIN_S),
            "--ready-file": str(ready_file),
        }
        words = [*self._as_user(region, f"agent-{replica}"), *_words(arguments)]
        words += [word for model in engine.models for word in ("--model", model)]
        routes = self.topology.regions[RegionId(region)].routes
        words += [word for path in routes for word in ("--route", path)]
        if engine.key is not None:
            file = self.state.run / f"{name}.key"
            write_atomically(file, engine.key.get_secret_value().encode())
            words += ["--engine-key-file", str(file)]
        return Program(
            name=name,
            kind=ProgramKind.AGENT,
            region=region,
            preloaded=True,
            command=_python("agents.cli", "run", *words),
            ready=FileWritten(ready_file),
        )

    def _as_user(self, region: str, user: str) -> tuple[str, str]:
        """The option that gives a program its secrets: neither `ps` nor an environment has them."""
        return "--credentials", str(self.files[RegionId(region)].credentials[user])


def engine_url(program: Program) -> str:
    """Where a simulated engine that is ready listens."""
    assert isinstance(program.ready, FileWritten)
    return str(orjson.loads(program.ready.path.read_bytes())["url"])


def _words(options: Mapping[str, str | None]) -> list[str]:
    """Of a command line, without options that have no value."""
    return [word for name, value in options.items() if value for word in (name, value)]


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)
