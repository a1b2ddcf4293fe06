"""Routers and agents of one or several regions in this process, each region on its own server."""

import asyncio
import contextlib
import io
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import orjson

from agents.config import AgentConfig
from agents.runtime.process import Stop
from agents.runtime.process import run as run_agent
from infra.auth_table import AuthTable
from infra.bus import BusAddress
from infra.nats.region_config import BATCH
from infra.process import end_all
from mesh.adapters import streams
from mesh.adapters.access_log import AccessLogFormat
from mesh.adapters.recorder import RecordTo
from mesh.core.model.settings import RouterSettings
from mesh.http.callers import ApiKeys
from mesh.http.server import CONNECTIONS_MAX, HttpTimes
from mesh.runtime.config import BatchAccess, RegionEntry, RouterConfig
from mesh.runtime.router import Router
from schemas.ids import RegionId, RouterId
from tests.support.nats_regions import NatsRegions
from tests.support.nats_server import NatsServer
from tests.support.scripted_engine import Behaviour, ScriptedEngine, scripted_engine
from tests.support.until import PATIENCE_S

_EPOCHS = itertools.count(time.time_ns() // 1_000_000)
# Of a router that takes no silence for a loss, and refuses nobody for a long queue: for tests of
# something else, that a server or a process which stands still for a moment is not to disturb.
PATIENT = {
    "heartbeat_late_s": 240.0,
    "heartbeat_lost_s": 240.0,
    "digest_late_s": 240.0,
    "digest_lost_s": 240.0,
    "queue_delay_s_max": 0.0,
}


class SmallMesh:
    """Start what a test needs; everything ends with `async with`."""

    def __init__(self, servers: Mapping[str, NatsServer] | NatsRegions) -> None:
        self._servers = servers
        rendered = isinstance(servers, NatsRegions)
        self._regions = tuple(servers.topology.regions if rendered else servers)
        self.listens_s = 0.0  # routers take what they have not heard of for unknown at once
        self.stack = AsyncExitStack()
        self.routers: dict[str, Router] = {}
        self.agents: dict[str, tuple[asyncio.Task[None], Stop]] = {}
        self.urls: dict[str, str] = {}
        self.engines: tuple[ScriptedEngine, ...] = ()  # whose behaviour `set_all` changes

    def _address(self, region: str, user: str) -> BusAddress:
        if isinstance(self._servers, NatsRegions):
            return self._servers.address(region, user)
        return BusAddress(self._servers[region].url)

    def _batch_access(self, region: str) -> BatchAccess | None:
        """Its store of files and batches, where mesh.toml gives it batch runners."""
        servers = self._servers
        if not isinstance(servers, NatsRegions) or BATCH not in servers.files[region].credentials:
            return None
        return BatchAccess(self._address(region, BATCH), servers.topology.batch)

    async def router(
        self,
        region: str,
        name: str = "r1",
        *,
        record: RecordTo | None = None,
        entries: Mapping[RegionId, RegionEntry] | None = None,
        skew_ms: int = 0,
        keys: ApiKeys | None = None,
        auth: AuthTable = AuthTable(),  # noqa: B008 - frozen
        peers: tuple[str, ...] | None = None,
        http_times: HttpTimes = HttpTimes(),  # noqa: B008 - frozen
        connections_max: int = CONNECTIONS_MAX,
        cors_origins: tuple[str, ...] = (),
        routes: tuple[str, ...] = (),
        drain_s: float = 5.0,
        sse_keep_alive_s: float = 10.0,
        http_port: int = 0,
        access_log: AccessLogFormat = AccessLogFormat.OFF,
        **settings: object,
    ) -> str:
        """A router of the region; returns its base URL. Others than `r1` are found as `us/r2`.

        `peers`: whom it knows, if not all other regions.
        """
        known = self._regions if peers is None else peers
        bus_servers = 1
        if isinstance(self._servers, NatsRegions):  # with streams
            bus_servers = len(self._servers.servers(region))
        else:
            address = self._address(region, "router")
            with contextlib.suppress(streams.StreamsUnusable):  # some have no JetStream
                await streams.set_up(address, RegionId(region), has_peers=len(known) > 1)
        config = RouterConfig(
            region=RegionId(region),
            router=RouterId(name),
            peers=tuple(RegionId(other) for other in known if other != region),
            http_host="127.0.0.1",
            http_port=http_port,
            bus=self._address(region, "router"),
            bus_servers=bus_servers,
            settings=RouterSettings(**settings),
            hash_key="test",
            epoch=next(_EPOCHS) + skew_ms,
            seed=7,
            drain_s=drain_s,
            sse_keep_alive_s=sse_keep_alive_s,
            access_log=access_log,
            record=record,
            entries=entries or {},
            keys=keys or {},
            auth=auth,
            http_times=http_times,
            connections_max=connections_max,
            cors_origins=cors_origins,
            routes=routes,
            batch=self._batch_access(region),
        )
        router = Router(config)
        router.core.state.models.listens_s = self.listens_s
        self.stack.push_async_callback(router.close)
        await router.open()
        place = region if name == "r1" else f"{region}/{name}"
        self.routers[place] = router
        self.urls[place] = f"http://127.0.0.1:{router.http_port}"
        return self.urls[place]

    async def agent(
        self,
        region: str,
        replica: str,
        engine: ScriptedEngine,
        *,
        skew_ms: int = 0,
        **options: object,
    ) -> None:
        """An agent beside the engine. `skew_ms`: how far its host's clock is off."""
        address = self._address(region, f"agent-{replica}")
        config = AgentConfig(
            region=RegionId(region),
            replica=replica,
            engine_url=engine.url,
            nats_url=address.url,
            nats_user=address.user,
            nats_password=address.password,
            bus_ca=address.ca,
            read_interval_ms=20,
            heartbeat_ms=50,
            **{"engine_kind": "vllm", "speed_probe": False, **options},
        )
        stop = Stop()
        task = asyncio.create_task(run_agent(config, time.monotonic, next(_EPOCHS) + skew_ms, stop))
        self.agents[replica] = (task, stop)
        self.stack.push_async_callback(self.kill_agent, replica)

    async def kill_agent(self, replica: str) -> None:
        """End an agent without a word, as a power cut does."""
        task, _ = self.agents[replica]
        await end_all([task])

    def sample(self, region: str, name: str, **labels: str) -> float:
        """The sum of the samples with these labels, and any others, on the page of the region's
        router; 0.0 where it has none yet."""
        registry = self.routers[region]._metrics.registry
        return sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition of this process's own objects."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"waited {PATIENCE_S:g} s for {what}") from None

    async def until_ready(self, region: str, replicas: int, model: str = "tiny") -> None:
        """Wait until the region's router may push work to that many replicas."""
        router = self.routers[region]
        core = router.core
        clock = asyncio.get_running_loop().time

        def free() -> int:
            return sum(
                core.replicas.unavailable_because(replica, model, clock()) is None
                for replica in core.replicas
            )

        await self.until(lambda: free() == replicas, f"{replicas} free replicas in {region}")

    async def until_ready_of(self, region: str, model: str, replicas: int) -> None:
        """Wait until that many replicas of the region serve the model."""
        core = self.routers[region].core

        def ready() -> int:
            return sum(core.replicas.serves(replica, model) for replica in core.replicas)

        await self.until(lambda: ready() == replicas, f"{replicas} replicas of {model}")

    async def until_peer(self, region: str, peer: str, model: str = "tiny") -> None:
        """Wait until the region's router would forward to the peer."""
        peers = self.routers[region].core.peers
        clock = asyncio.get_running_loop().time

        def available() -> bool:
            known = peers.get(peer)
            return known is not None and not peers.unavailable_because(known, model, clock())

        await self.until(available, f"{peer} to be available in {region}")


@asynccontextmanager
async def one_region(server: NatsServer) -> AsyncIterator[SmallMesh]:
    """us, with two replicas that are ready; `engines`: theirs."""
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": server}) as mesh,
    ):
        await mesh.router("us", policy="round-robin")
        await mesh.agent("us", "us-0", first)
        await mesh.agent("us", "us-1", second)
        await mesh.until_ready("us", 2)
        mesh.engines = (first, second)
        yield mesh


@asynccontextmanager
async def one_replica(server: NatsServer, **router: object) -> AsyncIterator[SmallMesh]:
    """us, with one replica that is ready; `engines`: its. `router`: what its router is to have."""
    async with scripted_engine() as engine, small_mesh({"us": server}) as mesh:
        await mesh.router("us", **router)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        mesh.engines = (engine,)
        yield mesh


def set_all(mesh: SmallMesh, behaviour: Behaviour) -> None:
    """Every engine of the mesh behaves so from now on."""
    for engine in mesh.engines:
        engine.behaviour = behaviour


@asynccontextmanager
async def small_mesh(
    servers: Mapping[str, NatsServer] | NatsRegions,
) -> AsyncIterator[SmallMesh]:
    """A mesh of the regions that `servers` names; rendered ones are joined with credentials."""
    mesh = SmallMesh(servers)
    async with mesh.stack:
        yield mesh


def chat(text: str = "hello", *, stream: bool = False, **fields: object) -> dict:
    message = {"role": "user", "content": text}
    return {"model": "tiny", "messages": [message], "stream": stream, **fields}


def upload(body: dict | bytes) -> io.BytesIO:
    """A large body as the client library wants it."""
    return io.BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


async def post(
    mesh: SmallMesh, body: dict, region: str = "us", **headers: str
) -> tuple[int, bytes, Mapping[str, str]]:
    """Ask for a chat: status, body and headers of the whole answer."""
    async with client() as session:
        url = mesh.urls[region] + "/v1/chat/completions"
        async with session.post(url, data=upload(body), headers=headers) as answer:
            return answer.status, await answer.read(), answer.headers
