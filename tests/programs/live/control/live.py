"""One mesh of real processes, and what its control plane took of processors and links meanwhile.

nats-servers, leaf links through counting proxies, and routers are those of `mesh up`. Agents are
either all real, each beside a simulated engine, or simulated by one process a region (`beats`).
Processor time is what the kernel counts for each process; bytes are all that TCP carried over a
link, messages what the nats-servers count on it.
"""

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp

from infra import topology
from infra.nats import region_config
from infra.topology import Topology
from mesh.demo.commands import Commands
from mesh.demo.local_mesh import LocalMesh
from mesh.demo.options import DemoOptions
from mesh.demo.state_directory import StateDirectory
from mesh.supervisor.program import FileWritten, Program, ProgramKind
from schemas import subjects
from schemas.ids import RegionId, ReplicaId
from tests.support.mesh_up import NO_SPEED_PROBE, write_config
from tests.support.region_loss import Clients

SETTLE_S = 4.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TOKENS = 32
RTT_MS = 60.0  # of every link; no byte depends on it

Link = tuple[str, str]  # sender, receiver
Key = TypeVar("Key", str, Link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One mesh. `replicas`: of the first region, and of each other one."""

    regions: int
    replicas: int
    elsewhere: int
    requests_per_s: float = 0.0  # of all regions together; needs `real`
    real: bool = False  # agents and engines, each a process of its own

    @property
    def fleet(self) -> dict[str, int]:
        """Replicas by region."""
        names = [f"r{number:02}" for number in range(self.regions)]
        return dict.fromkeys(names, self.elsewhere) | {names[0]: self.replicas}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one scene, while it was looked at."""

    cores: dict[str, float]  # by program: router-r00-r1, nats-r00, agent-r00-0, …
    link_bytes_per_s: dict[Link, float]
    link_messages_per_s: dict[Link, float]
    heartbeats_per_s: dict[str, float]  # that the region's nats-server took

    def of(self, prefix: str) -> list[float]:
        """Cores of the programs whose names begin so."""
        return [used for name, used in self.cores.items() if name.startswith(prefix)]


class ScriptedMesh(LocalMesh):
    """Agents of a region are one process, and there are no engines."""

    def __init__(self, mesh: Topology, options: DemoOptions, place: StateDirectory) -> None:
        super().__init__(mesh, options, place, lambda event: None)
        self._place = place
        self._spoken_for: set[str] = set()

    async def _start_simulated(
        self, commands: Commands, region: RegionId, replica: ReplicaId
    ) -> None:
        if region in self._spoken_for:
            return
        self._spoken_for.add(region)
        ready_file = self._place.run / f"beats-{region}.json"
        program = Program(
            name=f"beats-{region}",
            kind=ProgramKind.AGENT,
            region=region,
            command=(
                *(sys.executable, "-m", "tests.programs.live.control.beats", "--region", region),
                *("--credentials", str(self.credentials(region))),
                *("--ready-file", str(ready_file)),
            ),
            ready=FileWritten(ready_file),
            environment={"PYTHONUNBUFFERED": "1"},
        )
        await self._supervisor.start(program)


async def look(scene: Scene, directory: Path, windows: int, window_s: float) -> list[Cost]:
    """Start the scene, let it settle, and watch it so many times for so long.

    Raises AssertionError if a request failed: then it was not this scene.
    """
    regions = tuple(scene.fleet)
    config = write_config(
        directory,
        regions=regions,
        replicas=scene.fleet,
        rtt_ms={(a, b): RTT_MS for a in regions for b in regions if a < b},
        monitored=True,
    )
    place = StateDirectory(directory / ".mesh")
    options = DemoOptions(config=config, state=place.path, time_scale=20.0)
    mesh_toml = topology.load(config)
    os.environ.update(NO_SPEED_PROBE)  # agents have this process's
    with place.held():
        mesh = (
            LocalMesh(mesh_toml, options, place, lambda event: None)
            if scene.real
            else ScriptedMesh(mesh_toml, options, place)
        )
        async with mesh, aiohttp.ClientSession() as http:
            await mesh.start()
            async with _asked(mesh, scene) as clients:
                await asyncio.sleep(SETTLE_S)
                costs = [await _watch(mesh, mesh_toml, http, window_s) for _ in range(windows)]
            failed = [asked.end for asked in clients.asked if asked.end != "ok"]
            assert not failed, failed
            return costs


@contextlib.asynccontextmanager
async def _asked(mesh: LocalMesh, scene: Scene) -> AsyncIterator[Clients]:
    endpoints = {name: f"http://{routers['r1']}" for name, routers in mesh.endpoints.items()}
    rate = scene.requests_per_s
    clients = Clients(endpoints, 1.0 / rate if rate else math.inf, TOKENS)
    async with clients.asking() if rate else contextlib.nullcontext():
        yield clients


async def _watch(
    mesh: LocalMesh, mesh_toml: Topology, http: aiohttp.ClientSession, window_s: float
) -> Cost:
    clock = asyncio.get_running_loop().time
    before, began_at = await _count(mesh, mesh_toml, http), clock()
    await asyncio.sleep(window_s)
    after, took_s = await _count(mesh, mesh_toml, http), clock() - began_at

    def per_s(was: Mapping[Key, float], now: Mapping[Key, float]) -> dict[Key, float]:
        return {key: (value - was[key]) / took_s for key, value in now.items()}

    return Cost(
        cores=per_s(before.cpu_s, after.cpu_s),
        link_bytes_per_s=per_s(before.link_bytes, after.link_bytes),
        link_messages_per_s=per_s(before.link_messages, after.link_messages),
        heartbeats_per_s=per_s(before.heartbeats, after.heartbeats),
    )


class _Counts(NamedTuple):
    """Since everything started."""

    cpu_s: dict[str, float]
    link_bytes: dict[Link, float]
    link_messages: dict[Link, float]
    heartbeats: dict[str, float]


async def _count(mesh: LocalMesh, mesh_toml: Topology, http: aiohttp.ClientSession) -> _Counts:
    sent: dict[Link, float] = {}
    for (solicitor, acceptor), [proxy] in mesh.wan.items():
        sent[solicitor, acceptor] = proxy.to_target_bytes
        sent[acceptor, solicitor] = proxy.from_target_bytes
    sent_by_link: dict[Link, float] = {}
    beats: dict[str, float] = {}
    for name, region in mesh_toml.regions.items():
        peers = {region_config.link_account(peer): peer for peer in mesh_toml.peers(name)}
        leaves = await _page(http, f"http://{region.monitor[0]}/leafz")
        sent_by_link |= {
            (name, peers[leaf["account"]]): leaf["out_msgs"] for leaf in leaves["leafs"]
        }
        jetstream = await _page(http, f"http://{region.monitor[0]}/jsz?streams=true")
        beats[name] = sum(
            stream["state"]["last_seq"]
            for account in jetstream["account_details"]
            for stream in account["stream_detail"]
            if stream["name"] == subjects.STREAM_HEARTBEATS
        )
    return _Counts({name: cpu_s(pid) for name, pid in mesh.pids.items()}, sent, sent_by_link, beats)


async def _page(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as answer:
        return await answer.json()


def cpu_s(pid: int) -> float:
    """Seconds of processor that the process has taken, in the kernel too. Linux alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
