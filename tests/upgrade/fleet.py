"""Three regions as operators run them, process by process, each of this version or of the last.

The last release is installed from its wheel, which is kept beside this file, into a folder of its
own; its dependencies are those of this environment. Both versions are called by their programs,
with the options that docs/install.md shows.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from agents.core.offline_profile import decode_profile, encode_profile
from infra import bus
from infra.address import Address
from infra.credentials_file import read_environment
from infra.nats import server
from mesh.demo.engine_profile import simulated_profile
from mesh.supervisor import parent_death
from mesh.supervisor.program import (
    FileWritten,
    ReadinessProbe,
    http_ready,
    speaks_nats,
    wait_until_ready,
)
from schemas import subjects
from tests.support.ports import free_ports

[WHEEL] = Path(__file__).parent.glob("*.whl")
READY_S, END_S, COMMAND_S = 300.0, 120.0, 300.0  # a machine may be ten times as busy
TIME_SCALE = 1.0  # of the engines: 400 tokens take some seconds
ROUTERS = {"us": ("r1", "r2"), "eu": ("r1", "r2"), "ap": ("r1",)}
REPLICAS = {"us": 2, "eu": 2, "ap": 1}
RUNNERS = {"us": ("batch-0",), "eu": (), "ap": ("batch-0",)}


@dataclass(frozen=True, slots=True)
class Version:
    """Programs of one version, and what their environment has besides."""

    number: str
    programs: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, program: str, *words: str | Path) -> list[str]:
        return [sys.executable, str(self.programs / program), *map(str, words)]

    async def run(self, program: str, *words: str | Path, cwd: Path) -> tuple[int, str]:
        """The status of a command, and all that it printed."""
        process = await asyncio.create_subprocess_exec(
            *self.command(program, *words),
            cwd=cwd,
            env={**os.environ, **self.environment, "COLUMNS": "200"},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode()


def this_version() -> Version:
    return Version(metadata.version("inference-mesh"), Path(sys.executable).parent)


def install_last(folder: Path) -> Version:
    """The last release, installed there."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--target", folder, WHEEL),
        ],
        check=True,
    )
    number = WHEEL.name.split("-")[1]
    return Version(number, folder / "bin", {"PYTHONPATH": str(folder)})


@dataclass(slots=True)
class Unit:
    """What an operator's unit file says of one process, and the process while it runs."""

    name: str
    region: str
    program: str  # mesh, mesh-agent, or the nats-server
    words: tuple[str | Path, ...]
    ready: ReadinessProbe
    service: str = ""  # on the bus, of routers and agents
    version: Version | None = None
    process: Process | None = None
    ends: list[int] = field(default_factory=list)  # its exit statuses


class Fleet:
    """`start`, then `upgrade` unit by unit. An async context manager that ends every process."""

    def __init__(self, place: Path, last: Version, new: Version) -> None:
        self.place, self.last, self.new = place, last, new
        self.config = place / "mesh.toml"
        self.rendered = place / "rendered"
        self.logs = place / "logs"
        self.logs.mkdir()
        ports = (Address("127.0.0.1", port) for port in free_ports(32))
        self.nats = {region: next(ports) for region in ROUTERS}
        self.http = {
            f"router-{region}-{name}": next(ports)
            for region, names in ROUTERS.items()
            for name in names
        }
        self.config.write_text(self._toml(ports))
        self.units = {unit.name: unit for unit in self._units(ports)}

    def __getitem__(self, name: str) -> Unit:
        return self.units[name]

    def credentials(self, region: str, user: str) -> Path:
        return self.rendered / region / "credentials" / f"{user}.env"

    async def render(self, version: Version) -> None:
        await self.command(
            version, "infra", "nats", "--out", self.rendered, "--state-dir", self.place / "state"
        )

    async def make_streams(self, version: Version) -> None:
        await self.command(version, "infra", "streams", "--credentials", self.rendered)

    async def command(self, version: Version, *words: str | Path) -> str:
        """What a command of `mesh` printed about this mesh.toml; it must have succeeded."""
        return await self.answer(version, *words, "--config", self.config)

    async def answer(self, version: Version, *words: str | Path) -> str:
        status, output = await version.run("mesh", *words, cwd=self.place)
        assert status == 0, f"{version.number}: mesh {' '.join(map(str, words))}: {output}"
        return output

    async def start(self, version: Version) -> None:
        """Everything, as that version."""
        await self.render(version)
        profile = replace(decode_profile(simulated_profile(None, TIME_SCALE)), curves=None)
        (self.place / "profile.json").write_bytes(encode_profile(profile))
        await self._start(lambda unit: unit.program == "nats-server", version)
        await self.make_streams(version)
        await self._start(lambda unit: unit.name.startswith("engine-"), self.new)
        await self._start(lambda unit: unit.process is None, version)

    async def _start(self, chosen: Callable[[Unit], bool], version: Version) -> None:
        async with asyncio.TaskGroup() as group:
            for unit in self.units.values():
                if chosen(unit):
                    group.create_task(self.launch(unit, version))

    async def launch(self, unit: Unit, version: Version) -> None:
        """Start it and return when it is ready, as `systemctl start` does."""
        assert unit.process is None, unit.name
        unit.ready.reset()
        unit.version = version
        command = version.command(unit.program, *unit.words)
        if unit.program == "nats-server":
            command = [str(server.find()), *map(str, unit.words)]
        with self._log(unit).open("ab") as log:
            unit.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command),
                cwd=self.place,
                env={**os.environ, **version.environment},
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
            )
        ready = asyncio.create_task(wait_until_ready(unit.ready))
        ended = asyncio.create_task(unit.process.wait())
        try:
            await asyncio.wait((ready, ended), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            assert ready.done(), f"{unit.name} is not ready: {self.tail(unit)}"
        finally:
            ready.cancel()
            ended.cancel()

    async def stop(self, unit: Unit) -> None:
        """SIGTERM, and wait until it has drained and ended, as `systemctl stop` does."""
        assert unit.process is not None, unit.name
        unit.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            status = await unit.process.wait()
        unit.process = None
        unit.ends.append(status)
        assert status in (0, 1 if unit.program == "nats-server" else 0), self.tail(unit)

    async def change(self, unit: Unit, version: Version) -> None:
        """Drain it, end it, and start it as that version."""
        await self.stop(unit)
        await self.launch(unit, version)

    def reload_nats(self, region: str) -> None:
        """As `systemctl reload mesh-nats@…`."""
        process = self[f"nats-{region}"].process
        assert process is not None
        process.send_signal(signal.SIGHUP)

    def tail(self, unit: Unit) -> str:
        return "\n".join(self._log(unit).read_text(errors="replace").splitlines()[-20:])

    def log_lines(self) -> Iterator[tuple[str, str]]:
        """All that routers, agents and runners logged: whose, and the line."""
        for unit in self.units.values():
            if unit.program != "nats-server" and self._log(unit).exists():
                for line in self._log(unit).read_text(errors="replace").splitlines():
                    yield unit.name, line

    async def versions_on_the_bus(self, region: str) -> dict[str, str]:
        """Routers and agents of a region by their unit's name, and the version each shows there."""
        told = read_environment(self.credentials(region, "observer"))
        client = await bus.connect(
            bus.BusAddress(told["NATS_URL"], told["NATS_USER"], told["NATS_PASSWORD"]),
            name="upgrade",
            inbox_prefix=subjects.INBOX_ROOT,
        )
        found = {}
        try:
            for unit in self.units.values():
                if unit.region != region or not unit.service or unit.process is None:
                    continue
                answer = await client.request(f"$SRV.INFO.{unit.service}", timeout=10.0)
                found[unit.name] = str(json.loads(answer.data)["version"])
        finally:
            await client.close()
        return found

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(self, *problem: object) -> None:
        """Those that need others first: routers and runners, agents, engines, nats-servers."""
        running = [unit.process for unit in self.units.values() if unit.process is not None]
        for process in running:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in running))

    def _log(self, unit: Unit) -> Path:
        return self.logs / f"{unit.name}.log"

    def _toml(self, ports: Iterator[Address]) -> str:
        text = '[mesh]\nname = "upgraded"\n'
        for region, names in ROUTERS.items():
            text += (
                f'[regions.{region}]\nhttp = "{self.http[f"router-{region}-{names[0]}"]}"\n'
                f'nats = "{self.nats[region]}"\nleaf = "{next(ports)}"\n'
                f"replicas = {REPLICAS[region]}\nrouters = {json.dumps(names)}\n"
                f"batch_runners = {json.dumps(RUNNERS[region])}\n"
                f'residency = ["{region}"]\n'
            )
        for a, b in itertools.combinations(ROUTERS, 2):
            text += f'[[links]]\nbetween = ["{a}", "{b}"]\nrtt_ms = 1\n'
        return text

    def _units(self, ports: Iterator[Address]) -> Iterator[Unit]:
        for region in ROUTERS:
            conf = self.rendered / region / "nats.conf"
            words: tuple[str | Path, ...] = ("--config", conf)
            yield Unit(
                f"nats-{region}", region, "nats-server", words, speaks_nats(self.nats[region])
            )
            for router in ROUTERS[region]:
                yield self._router(region, router)
            for number in range(REPLICAS[region]):
                yield from self._replica(region, f"{region}-{number}", next(ports))
            for runner in RUNNERS[region]:
                yield self._runner(region, runner, next(ports))

    def _router(self, region: str, router: str) -> Unit:
        name = f"router-{region}-{router}"
        batch = ("--batch-credentials", self.credentials(region, "batch"))
        return Unit(
            name,
            region,
            "mesh",
            (
                *("router", "--credentials", self.credentials(region, "router")),
                *("--router", router, "--config", self.config, "--http", str(self.http[name])),
                *(batch if RUNNERS[region] else ()),
            ),
            http_ready(self.http[name]),
            f"{subjects.SERVICE_ROUTER}.{router}",
        )

    def _replica(self, region: str, replica: str, engine: Address) -> Iterator[Unit]:
        file = self.place / f"engine-{replica}.json"
        words = ("--port", str(engine.port), "--time-scale", str(TIME_SCALE), "--ready-file", file)
        yield Unit(
            f"engine-{replica}", region, "mesh-agent", ("engine-sim", *words), FileWritten(file)
        )
        file = self.place / f"agent-{replica}.json"
        yield Unit(
            f"agent-{replica}",
            region,
            "mesh-agent",
            (
                *("run", "--credentials", self.credentials(region, f"agent-{replica}")),
                *("--replica", replica, "--engine-url", f"http://{engine}"),
                *("--profile", self.place / "profile.json", "--ready-file", file),
            ),
            FileWritten(file),
            f"{subjects.SERVICE_AGENT}.{replica}",
        )

    def _runner(self, region: str, runner: str, page: Address) -> Unit:
        return Unit(
            f"batch-runner-{region}-{runner}",
            region,
            "mesh",
            (
                *("batch-runner", "--credentials", self.credentials(region, "router")),
                *("--batch-credentials", self.credentials(region, "batch"), "--name", runner),
                *("--config", self.config, "--metrics", str(page)),
            ),
            http_ready(page),
        )
