"""The command line and environment of every process of a demo; nothing else knows them."""

import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from agents.engine_key import ENGINE_KEY
from infra.address import Address
from infra.nats.bundle import RegionFiles
from infra.topology import Topology
from infra.workers import worker_page
from mesh.demo.options import EngineKind, GivenEngine, Options
from mesh.demo.program import Every, FileWritten, Kind, Program, http_ready, speaks_nats
from mesh.demo.state_directory import StateDirectory
from schemas.ids import RegionId

# Within the grace that the supervisor gives them (see `supervisor.GRACE_S`).
ROUTER_DRAIN_S = 8.0
AGENT_DRAIN_S = 3.0
PYTHON_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}  # a log shows what a process said before it died


class Commands:
    """Makes the programs of one demo."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        state: StateDirectory,
        nats_server: Path,
        files: Mapping[RegionId, RegionFiles],
    ) -> None:
        """`files`: the rendered configuration and credentials of every region."""
        self._topology = topology
        self._options = options
        self._state = state
        self._nats_server = nats_server
        self._files = files

    def nats(self, region: str) -> Program:
        """A region's nats-server."""
        return Program(
            name=f"nats-{region}",
            kind=Kind.NATS,
            region=region,
            command=(str(self._nats_server), "-c", str(self._files[RegionId(region)].config)),
            ready=speaks_nats(self._topology.region(region).nats),
        )

    def router(self, region: str, router: str, http: Address, metrics: Address | None) -> Program:
        """One of a region's routers; where it listens, and where its first worker has a page."""
        options = self._options
        who = ("--region", region, "--router", router, "--drain-s", str(ROUTER_DRAIN_S))
        config: tuple[str, ...] = ("--config", str(options.config), "--http", str(http))
        log = ("--log-level", options.log_level)
        choices = {
            "--policy": options.policy,
            "--pushing": options.pushing,
            "--hold-order": options.hold_order,
        }
        workers = self._topology.region(region).workers
        faces = [http]  # a worker that is not up yet answers nobody at its own page
        if metrics is not None:
            faces += [worker_page(metrics, number) for number in range(workers)]
            config += ("--workers", str(workers), "--metrics", str(metrics))
        given = [word for name, value in choices.items() if value for word in (name, value)]
        return Program(
            name=f"router-{region}-{router}",
            kind=Kind.ROUTER,
            region=region,
            command=_python("mesh.cli.main", "router", *who, *config, *log, *given),
            ready=Every(tuple(http_ready(face) for face in faces)),
            environment=self._as_user(region, "router"),
        )

    def engine(self, region: str, replica: str, *, port: int = 0) -> Program:
        """The simulated engine of a replica; port 0: one that is free, see `engine_url`."""
        name = f"engine-{replica}"
        ready_file = self._state.run / f"{name}.json"
        settings = ["--port", str(port), "--time-scale", str(self._options.time_scale)]
        if self._options.profile is not None:
            settings += ["--profile", self._options.profile]
        return Program(
            name=name,
            kind=Kind.ENGINE,
            region=region,
            command=_python("agents.cli", "engine-sim", *settings, "--ready-file", str(ready_file)),
            ready=FileWritten(ready_file),
            environment=PYTHON_ENVIRONMENT,
        )

    def agent(self, region: str, replica: str, engine: GivenEngine, kind: EngineKind) -> Program:
        """The agent beside an engine."""
        name = f"agent-{replica}"
        ready_file = self._state.run / f"{name}.json"
        given = ["--metrics-url", engine.metrics_url] if engine.metrics_url else []
        given += [] if engine.batch_max is None else ["--batch-max", str(engine.batch_max)]
        given += [word for model in engine.models for word in ("--model", model)]
        key = {} if engine.key is None else {ENGINE_KEY: engine.key.get_secret_value()}
        return Program(
            name=name,
            kind=Kind.AGENT,
            region=region,
            command=_python(
                *("agents.cli", "run", "--region", region, "--replica", replica),
                *("--engine-kind", kind.value, "--engine-url", engine.url, *given),
                *("--drain-timeout", str(AGENT_DRAIN_S), "--ready-file", str(ready_file)),
            ),
            ready=FileWritten(ready_file),
            environment=self._as_user(region, f"agent-{replica}") | key,
        )

    def _as_user(self, region: str, user: str) -> dict[str, str]:
        credentials = self._files[RegionId(region)].credentials[user]
        return {**PYTHON_ENVIRONMENT, **read_environment(credentials)}


def engine_url(program: Program) -> str:
    """Where a simulated engine that is ready listens."""
    assert isinstance(program.ready, FileWritten)
    return str(orjson.loads(program.ready.path.read_bytes())["url"])


def read_environment(path: Path) -> Mapping[str, str]:
    """The variables in a file of `NAME=value` lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)
