"""One run of `mesh up`, from the configuration to the end of the last process."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import orjson
from rich.console import Console

from infra.certificates import CA
from infra.topology import DEFAULT_FILE, SERVER_KEYS, RegionTable, Topology
from mesh.demo.encrypted_file import with_tls
from mesh.demo.local_mesh import DemoEvent, LocalMesh
from mesh.demo.options import DemoOptions, fitted, port_problems
from mesh.demo.screen import Screen
from mesh.demo.state_directory import StateDirectory, write_atomically
from mesh.runtime.mesh_file import load_mesh
from mesh.supervisor.supervisor import ProgramReady
from schemas.ids import RegionId

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A signal so soon after the first counts once. `make` forwards a SIGTERM that its whole group
# received, on a busy machine seconds later; people press Ctrl-C twice.
SAME_SIGNAL_S = {signal.SIGTERM: 5.0, signal.SIGINT: 0.5, signal.SIGHUP: 0.5}
LISTED_WITHIN_S = 1.0  # of a mesh whose routers are ready: digests leave five times a second
MODELS_WITHIN_S = 5.0


class PortsUnusable(RuntimeError):
    """The mesh can't listen where it should; the message has a line for each address."""


async def run(options: DemoOptions, console: Console) -> None:
    """Run a mesh until a signal ends it.

    Raises TopologyError, StateInUse or PortsUnusable before anything is started, and
    ProgramFailed if a program ends before the mesh is ready.
    """
    topology = fitted(load_mesh(options.config), options)
    state = StateDirectory(options.state)
    if problems := port_problems(topology):
        state.require_free()  # the likeliest reason for taken ports has an error of its own
        raise PortsUnusable(_ports_text(options.config, problems))
    with state.held():
        if options.tls:
            topology, options = _encrypted(topology, options, state)
        session = DemoSession(topology, options, state, console)
        try:
            await session.run()
        finally:
            session.remove_records()


def _encrypted(
    topology: Topology, options: DemoOptions, state: StateDirectory
) -> tuple[Topology, DemoOptions]:
    """The same with a mesh.toml whose routers serve https, which is written beside their files."""
    file = state.config / "mesh.toml"
    write_atomically(file, with_tls(options.config.read_text("utf-8"), topology).encode())
    read = load_mesh(file).regions
    regions = {
        name: region.model_copy(
            update={
                "tls": read[name].tls,
                "endpoint": read[name].endpoint,
                # Else a relative one would be looked for beside the new file.
                "profile": region.profile and str(options.config.parent / region.profile),
            }
        )
        for name, region in topology.regions.items()
    }
    return topology.model_copy(update={"regions": regions}), replace(options, config=file)


def _ports_text(config: Path, problems: Sequence[str]) -> str:
    lines = [f"{config}: {problem}" for problem in problems]
    if config == DEFAULT_FILE:
        lines.append("to use other ports: copy that file, change them there, pass it by --config")
    return "\n".join(lines)


class DemoSession:
    """A mesh, the screen that shows it, and the files that say where it runs."""

    def __init__(
        self, topology: Topology, options: DemoOptions, state: StateDirectory, console: Console
    ) -> None:
        self._topology = topology
        self._config, self._engines_given = options.config, bool(options.engines)
        self._records = [state.running, *([options.ready_file] if options.ready_file else [])]
        self._state = state
        self._ca = state.config / CA if options.tls else None
        self._mesh = LocalMesh(topology, options, state, self._on_event)
        self._screen = Screen(console, self._mesh.sizes(), state.logs)
        self._models: list[str] = []
        self._up = False
        self._ending_since: float | None = None

    async def run(self) -> None:
        """Start, show, and wait for a signal; then end every process."""
        with self._signals():
            try:
                async with self._mesh:
                    await self._start()
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self._ending_since is None:
                    raise

    def remove_records(self) -> None:
        for record in self._records:
            record.unlink(missing_ok=True)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.remove_records()
        mesh = self._mesh
        with self._screen.starting():
            await mesh.start()
            self._models = await served_models(self._topology)
        self._up = True
        took_s = loop.time() - started
        self._screen.up(
            self._topology,
            self._models,
            took_s,
            mesh.missing,
            mesh.routers_not_ready,
            self._ca,
            self._state.config,
        )
        self._screen.consoles(map(self._console, mesh.consoles), self._state.console_key)
        self._write_records()

    def _on_event(self, event: DemoEvent) -> None:
        if self._up and isinstance(event, ProgramReady):
            self._write_records()  # it has another process now
        self._screen.report(event)

    def _console(self, region: RegionId) -> str:
        return f"{self._topology.regions[region].scheme}://{self._mesh.consoles[region]}/"

    def _write_records(self) -> None:
        regions = {
            name: {
                "endpoint": f"{region.scheme}://{region.http}",
                "nats": region.bus_url,
                "credentials": str(self._mesh.credentials(name)),
                "replicas": region.replicas,
                "workers": region.workers,
                "servers": {key: [*map(str, getattr(region, key))] for key in SERVER_KEYS},
                "routers": {
                    router: f"{region.scheme}://{address}"
                    for router, address in self._mesh.endpoints[name].items()
                },
                "metrics": self._mesh.metrics(name),
                "console": self._console(name),
                "batch_runners": {
                    runner: f"http://{page}/metrics"
                    for runner, page in self._mesh.runner_pages[name].items()
                },
            }
            for name, region in self._topology.regions.items()
        }
        record = {
            "pid": os.getpid(),
            "state": str(self._state.path),
            "config": str(self._config),
            "models": self._models,
            "console_key": str(self._state.console_key),
            "ca": str(self._ca) if self._ca else None,
            "regions": regions,
            "processes": self._mesh.pids,
            "engines_given": self._engines_given,
        }
        for path in self._records:
            write_atomically(path, orjson.dumps(record, option=orjson.OPT_INDENT_2))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal ends the mesh in order, a second one at once."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: signal.Signals) -> None:
            now = loop.time()
            if self._ending_since is not None:
                if now - self._ending_since > SAME_SIGNAL_S[number]:
                    self._mesh.hurry()
                return
            self._ending_since = now
            task.cancel()
            self._screen.ending()  # last: a terminal that was closed can't be written to

        for number in SIGNALS:
            loop.add_signal_handler(number, interrupt, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


async def served_models(topology: Topology) -> list[str]:
    """The models that the routers list; a router that does not answer right now is left out.

    A router lists its own as its last digest told them, up to a digest later than it is ready.
    """
    models: set[str] = set()
    until = time.monotonic() + LISTED_WITHIN_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(MODELS_WITHIN_S)) as http:
        for region in topology.regions.values():
            while not (found := await _listed(http, region)):
                if not region.replicas or time.monotonic() >= until:
                    break
                await asyncio.sleep(0.05)
            models.update(found)
    return sorted(models)


async def _listed(http: aiohttp.ClientSession, region: RegionTable) -> set[str]:
    url = f"{region.scheme}://{region.http}/v1/regions"  # without a key
    try:
        async with http.get(url, ssl=False) as response:  # it is one of ours
            listed = orjson.loads(await response.read()).get("data", ())
    except (aiohttp.ClientError, TimeoutError):
        return set()
    return {model for each in listed if each["home"] for model in each["models"]}
