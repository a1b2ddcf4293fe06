"""A real mesh whose routers stay dead when they are killed, and clients that see it happen.

Everything is a process as `mesh up` starts it, over delayed leaf links; only the routers are not
kept alive. Who owns what is read from the bus as an operator reads it: the lease of each region,
and what routers say of themselves with every sign of life.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus, topology
from infra.credentials_file import read_environment
from infra.topology import Topology
from mesh.demo.local_mesh import LocalMesh
from mesh.demo.options import DemoOptions
from mesh.demo.state_directory import StateDirectory
from mesh.replay.client import ChatStream, StreamFault
from mesh.supervisor import parent_death
from mesh.supervisor.program import Program, wait_until_ready
from schemas import state, subjects, wire
from schemas.exchange import Alive
from tests.support.mesh_up import NO_SPEED_PROBE

ALIVE_S = 0.75  # a router that has not repeated for so long what it owns was killed
TIMEOUT_S = 30.0  # a client that waits longer has lost its request without a word
MODEL = "mistralai/Mistral-7B-Instruct-v0.3"


class FragileMesh(LocalMesh):
    """`kill` the routers of a region, and `revive` them."""

    def __init__(self, mesh: Topology, options: DemoOptions, place: StateDirectory) -> None:
        super().__init__(mesh, options, place, lambda event: None)
        os.environ.update(NO_SPEED_PROBE)  # its agents have this process's
        self._logs = place.logs
        self._programs: dict[str, Program] = {}
        self._routers: dict[str, Process] = {}

    async def _start_router(self, program: Program) -> None:
        self._programs[program.name] = program
        with (self._logs / f"{program.name}.log").open("ab") as log:
            self._routers[program.name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
                *program.command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **program.environment},
                start_new_session=True,
            )
        await self._until_ready(program)

    async def _until_ready(self, program: Program) -> None:
        ready = asyncio.create_task(wait_until_ready(program.ready))
        ended = asyncio.create_task(self._routers[program.name].wait())
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not ready.done():
            ready.cancel()
            raise RuntimeError((self._logs / f"{program.name}.log").read_text() or program.name)

    def _of(self, region: str) -> list[str]:
        return [name for name, program in self._programs.items() if program.region == region]

    async def kill(self, region: str) -> None:
        """kill -9 of every router of the region, at once."""
        gone = [self._routers.pop(name) for name in self._of(region)]
        for process in gone:
            process.send_signal(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in gone))

    async def revive(self, region: str) -> None:
        """Start them again; returns when all are ready."""
        await asyncio.gather(*(self._start_router(self._programs[n]) for n in self._of(region)))

    async def __aexit__(self, *problem: object) -> None:
        for process in self._routers.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._routers.values()))
        await super().__aexit__(*problem)


@dataclass(slots=True)
class Asked:
    """One request and what its client saw of it."""

    endpoint: str  # the region that was asked first
    at: float
    first_at: float | None = None
    served_by: str | None = None
    end: str = ""  # ok, what went wrong, or LOST


LOST = "no word"  # the answer broke off, or nothing came, and the client was not told


@dataclass
class Clients:
    """Ask every region in turn at a steady pace. One whose router is gone asks the next region."""

    endpoints: dict[str, str]
    every_s: float
    tokens: int
    asked: list[Asked] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Ask meanwhile; on the way out every answer is waited for."""
        stop = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._keep_asking(http, tasks, stop))
            try:
                yield
            finally:
                stop.set()

    async def _keep_asking(
        self, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup, stop: asyncio.Event
    ) -> None:
        clock = asyncio.get_running_loop().time
        for number, region in enumerate(itertools.cycle(self.endpoints)):
            if stop.is_set():
                return
            asked = Asked(region, clock())
            self.asked.append(asked)
            tasks.create_task(self._ask(http, asked, number))
            await asyncio.sleep(self.every_s)

    async def _ask(self, http: aiohttp.ClientSession, asked: Asked, number: int) -> None:
        body = orjson.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"{number} " + "word " * 200}],
                "stream": True,
                "max_tokens": self.tokens,
            }
        )
        names = list(self.endpoints)
        first = names.index(asked.endpoint)
        for name in names[first:] + names[:first]:
            with contextlib.suppress(aiohttp.ClientConnectorError):
                asked.end = await self._answer(http, self.endpoints[name], body, asked)
                return
        asked.end = "no router of any region"

    async def _answer(
        self, http: aiohttp.ClientSession, endpoint: str, body: bytes, asked: Asked
    ) -> str:
        clock, stream = asyncio.get_running_loop().time, ChatStream()
        try:
            url = f"{endpoint}/v1/chat/completions"
            async with http.post(url, data=body) as answer:
                if answer.status != 200:
                    return f"HTTP {answer.status}"
                async for chunk in answer.content.iter_any():
                    if asked.first_at is None:
                        asked.first_at = clock()
                        asked.served_by = answer.headers["x-mesh-region"]
                    stream.feed(chunk, clock())
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientError:
            return "connection lost"
        except TimeoutError:
            return LOST
        if stream.fault is None:
            return "ok"
        return "error event" if stream.fault is StreamFault.ERROR_EVENT else LOST


@dataclass
class Ownership:
    """Who owns which region's replicas, by what the bus says, with the time it was heard."""

    leases: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # owner, when it began
    _says: dict[tuple[str, str, str], float] = field(default_factory=dict)  # until when
    both: Counter[str] = field(default_factory=Counter)  # seconds with two, by region
    first_sign: dict[str, float] = field(default_factory=dict)  # of a region's routers, since asked
    _both_since: dict[str, float] = field(default_factory=dict)

    def hear_lease(self, msg: Msg) -> None:
        lease = state.decode_lease(msg.data)
        turns = self.leases.setdefault(lease.region, [])
        if not turns or turns[-1][1] != lease.owner:
            turns.append((_now(), lease.owner))

    def hear_alive(self, msg: Msg) -> None:
        """A router says what it owns; two regions at once for one is what must be short."""
        _, region, _, router, _ = msg.subject.split(".")
        said = wire.decode_as(Alive, msg.data)
        self.first_sign.setdefault(region, _now())
        for owned in {*said.owned, *(one for _, _, one in self._says)}:
            key = (region, router, owned)
            if owned in said.owned:
                self._says[key] = _now() + ALIVE_S
            else:
                self._says.pop(key, None)
            self._count(owned)

    def _count(self, owned: str) -> None:
        now = _now()
        self._says = {key: until for key, until in self._says.items() if until > now}
        owners = {region for region, _, what in self._says if what == owned}
        since = self._both_since.pop(owned, None)
        if since is not None:
            self.both[owned] = max(self.both[owned], now - since)
        if len(owners) > 1:
            self._both_since[owned] = now if since is None else since

    async def until(self, region: str, owners: Sequence[str], within_s: float) -> tuple[float, str]:
        """When one of these came to own the region's replicas, and which; the latest turn."""
        async with asyncio.timeout(within_s):
            while True:
                turns = self.leases.get(region, [])
                if turns and turns[-1][1] in owners:
                    return turns[-1]
                await asyncio.sleep(0.01)


def _now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def watching(mesh: FragileMesh, regions: Sequence[str]) -> AsyncIterator[Ownership]:
    """Listen as an operator in every region: each hears what its own region's routers say."""
    seen = Ownership()

    async def lease(msg: Msg) -> None:
        seen.hear_lease(msg)

    async def alive(msg: Msg) -> None:
        seen.hear_alive(msg)

    clients: list[Client] = []
    try:
        for region in regions:
            told = read_environment(mesh.credentials(region) / "operator.env")
            client = await bus.connect(_address(told), name="watcher", inbox_prefix="_INBOX.watch")
            clients.append(client)
            await client.subscribe(subjects.leased(region), cb=lease)
            await client.subscribe(subjects.alive(region, subjects.ANY), cb=alive)
        yield seen
    finally:
        for client in clients:
            await client.close()


def _address(told: Any) -> bus.BusAddress:
    return bus.BusAddress(told["NATS_URL"], told["NATS_USER"], told["NATS_PASSWORD"])


@contextlib.asynccontextmanager
async def fragile_mesh(
    directory: Path, config: Path, *, policy: str = "least-load", time_scale: float = 20.0
) -> AsyncIterator[FragileMesh]:
    """The mesh of that mesh.toml, up."""
    place = StateDirectory(directory / ".mesh")
    options = DemoOptions(config=config, state=place.path, time_scale=time_scale, policy=policy)
    with place.held():
        async with FragileMesh(topology.load(config), options, place) as mesh:
            await mesh.start()
            yield mesh


@dataclass(frozen=True, slots=True)
class Round:
    """One loss of a region, and its return. Times in seconds."""

    adopted_s: float  # from the kill to the lease
    served_s: float  # from the kill to the first token that a replica of the region gave
    by: str
    back_s: float  # from its first router's first sign of life to the lease
    both_s: float  # longest that two regions said they own it
    ends: Counter[str]  # of requests: ok, and every other end


async def lose(
    mesh: FragileMesh,
    seen: Ownership,
    lost: Sequence[str],
    others: Sequence[str],
    *,
    every_s: float,
    tokens: int,
    warm_s: float = 1.0,
    gone_s: float = 3.0,
    back_s: float = 1.0,
) -> dict[str, Round]:
    """Kill every router of the lost regions at once under load, wait, and let them come back.

    A round for each of them; `ends` is of all requests, the same in all.
    """
    endpoints = {name: f"http://{mesh.endpoints[name]['r1']}" for name in (*lost, *others)}
    clients = Clients(endpoints, every_s, tokens)
    async with clients.asking():
        await asyncio.sleep(warm_s)
        killed_at = _now()
        await asyncio.gather(*map(mesh.kill, lost))
        adopted = {region: await seen.until(region, others, 20.0) for region in lost}
        await asyncio.sleep(gone_s)
        for region in lost:
            seen.first_sign.pop(region, None)
        revived_at = _now()
        await asyncio.gather(*map(mesh.revive, lost))
        again = {region: await seen.until(region, (region,), 20.0) for region in lost}
        await asyncio.sleep(back_s)
    ends = Counter(asked.end for asked in clients.asked)
    return {
        region: Round(
            adopted_s=adopted_at - killed_at,
            served_s=_served_s(clients.asked, region, killed_at, revived_at),
            by=by,
            back_s=max(0.0, again[region][0] - seen.first_sign[region]),  # heard in any order
            both_s=seen.both[region],
            ends=ends,
        )
        for region, (adopted_at, by) in adopted.items()
    }


def _served_s(asked: Sequence[Asked], region: str, killed_at: float, revived_at: float) -> float:
    """From the kill to the first token that its replicas gave to who asked afterwards."""
    served = [
        one.first_at - killed_at
        for one in asked
        if killed_at < one.at < revived_at and one.served_by == region and one.first_at is not None
    ]
    return min(served, default=float("inf"))
