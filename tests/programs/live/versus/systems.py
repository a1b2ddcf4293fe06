"""The systems: three regions of four simulated A100s each, and what stands before them.

The mesh has a router in every region (`mesh up`). A rival is one real process in one region, HOME,
the busiest. Its engines and its clients of other regions are behind TCP links that delay each way
by half the round trip; a connection's handshake is not delayed, which favours the rivals.

sglang-router sets no TCP_NODELAY on the connections that it accepts: a small write waits until the
one before is acknowledged, 40 ms later at most. Here the engine's head leaves 150 ms or more before
its first token and is acknowledged by then: one request at a time has its first token 5 ms later
through either rival than without it (two busy cores). So both are measured as found.

vllm-router 0.1.17 asks every engine to render a prompt (`/v1/chat/completions/render`, of vLLM),
and waits for the slowest, before it places the request: a round trip to the farthest region.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from mesh.sim.rtt import DEFAULT_MS, RttTable
from schemas.ids import RegionId
from tests.programs.bench.installs import ENVIRONMENTS
from tests.programs.bench.processes import Look, Processes
from tests.programs.bench.systems.rust_routers import start_router
from tests.programs.live.versus import links
from tests.programs.live.versus.links import ready_file, write_links
from tests.support.mesh_up import REGIONS, mesh_up, write_config
from tests.support.ports import free_ports

HOME = "us"
MESH, SGLANG, VLLM, SMG = "mesh", "sglang-router", "vllm-router", "smg"
SYSTEMS = (MESH, SGLANG, VLLM, SMG)
VERBS: Mapping[str, tuple[str, ...]] = {SGLANG: ("launch",), VLLM: (), SMG: ("launch",)}
RTT = RttTable()


@dataclass(frozen=True, slots=True)
class Running:
    """A system that answers. `endpoints`: where each region's clients ask."""

    endpoints: Mapping[str, str]
    settings: str


@contextlib.asynccontextmanager
async def running(name: str, directory: Path, replicas: int) -> AsyncIterator[Running]:
    """The system with fresh engines, so many in each region. Raises Absent."""
    start = mesh_system if name == MESH else rival_system
    async with start(name, directory, replicas) as system:
        yield system


@contextlib.asynccontextmanager
async def mesh_system(name: str, directory: Path, replicas: int) -> AsyncIterator[Running]:
    config = write_config(directory, replicas=replicas, rtt_ms=DEFAULT_MS)
    async with mesh_up(directory, config=config, time_scale=1.0) as mesh:
        endpoints = {region: mesh.endpoint(region) for region in REGIONS}
        yield Running(endpoints, "a router in every region, all settings as by default")


@contextlib.asynccontextmanager
async def rival_system(name: str, directory: Path, replicas: int) -> AsyncIterator[Running]:
    abroad = [region for region in REGIONS if region != HOME]
    async with Processes(directory / "logs") as processes:
        started = await start_engines(processes, replicas * len(REGIONS))
        engines = {
            region: started[at * replicas : (at + 1) * replicas]
            for at, region in enumerate(REGIONS)
        }
        [port] = free_ports(1)
        targets = [(engine, region) for region in abroad for engine in engines[region]]
        targets += [(f"127.0.0.1:{port}", region) for region in abroad]
        near = await delayed_links(processes, directory, targets)
        clients = dict(zip(abroad, near[-len(abroad) :], strict=True))
        workers = [f"http://{address}" for address in [*engines[HOME], *near[: -len(abroad)]]]
        router = await start_router(processes, ENVIRONMENTS, name, VERBS[name], workers, port)
        await processes.until(f"{name} with all engines", knows(router.url, len(workers)))
        doors = {HOME: router.url, **{region: f"http://{at}" for region, at in clients.items()}}
        yield Running(doors, f"one in {HOME}; {router.settings}")


async def start_engines(processes: Processes, number: int, *options: str) -> list[str]:
    """So many simulated engines' addresses, once they answer."""
    ports = free_ports(number)
    await asyncio.gather(
        *(
            processes.start(
                f"engine-{port}",
                (sys.executable, "-m", "agents.cli", "engine-sim", "--port", str(port), *options),
                ready=processes.answers(f"http://127.0.0.1:{port}/health"),
            )
            for port in ports
        )
    )
    return [f"127.0.0.1:{port}" for port in ports]


async def delayed_links(
    processes: Processes, directory: Path, targets: Sequence[tuple[str, str]]
) -> list[str]:
    """The near end of a link to each target, of HOME and the region named beside it."""
    file = directory / "links.json"
    write_links(file, [(target, one_way_s(region)) for target, region in targets])

    async def listens() -> bool:
        return ready_file(file).exists()

    program = (sys.executable, "-m", links.__name__, str(file))
    await processes.start("links", program, ready=listens)
    addresses: list[str] = orjson.loads(ready_file(file).read_bytes())
    return addresses


def knows(url: str, engines: int) -> Look:
    """Whether the router has found so many healthy engines."""

    async def look() -> bool:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/workers") as answer:
            workers = (await answer.json())["workers"]
        return sum(bool(worker["is_healthy"]) for worker in workers) == engines

    return look


def one_way_s(region: str) -> float:
    """Between HOME and that region."""
    return RTT.rtt_s(RegionId(HOME), RegionId(region)) / 2
