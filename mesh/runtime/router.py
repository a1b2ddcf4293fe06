"""The router process: bus, core, HTTP servers, and periodic work."""

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Self

from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from infra.address import Address
from infra.process import end_all, first_of
from infra.tracing import package_version
from mesh.adapters.access_log import AccessLog, AccessLogFormat
from mesh.adapters.bus import Listeners, RouterBus
from mesh.adapters.metrics import BatchMetrics, RouterMetrics
from mesh.adapters.recorder import Recorder
from mesh.core.model import events as ev
from mesh.core.recording import RecordingHeader
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.http.batch_api import BatchApi
from mesh.http.routes import EVERY_PATH, OF_ONE_PROCESS, HttpApi, Served
from mesh.http.server import PAGE_CONNECTIONS, ConnectionLimit, HttpServer
from mesh.runtime.batch_door import BatchStoreDoor
from mesh.runtime.config import RouterConfig
from mesh.runtime.control_plane import Pings
from mesh.runtime.name_claim import NameClaim, NameTaken
from mesh.runtime.request_manager import RequestManager
from mesh.runtime.request_questions import RequestQuestions
from mesh.runtime.ticks import IDLE_S, keep_alive, keep_ticking
from schemas import http
from schemas.replies import PING_PREFIX
from schemas.state import ReplicaState

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
LAST_REQUESTS_S = 1.0  # a busy connection brings its next request sooner
ERRORS_SENT_S = 0.5  # for errors to reach clients whose answers are cut off
CUT_S = 0.25  # for the HTTP server to end answers, and again for handlers that are cut
CANCEL_AGAIN_S = 0.1


class PortTaken(OSError):
    """The HTTP address can't be had; the message names it, and where it was given."""

    @classmethod
    def at(cls, where: Address, key: str, config: RouterConfig, error: OSError) -> Self:
        """Of that address, given by that key of the region's table or by the option of its name."""
        in_file = f"change {key} of [regions.{config.region}] in mesh.toml"
        remedy = f"choose another for --{key}" if key in config.by_option else in_file
        number = error.errno or 0  # negative where a name could not be looked up
        why = os.strerror(number) if number > 0 else error.strerror
        return cls(f"can't listen on {where} ({why}); free it, or {remedy}")


async def run(
    config: RouterConfig,
    stop: asyncio.Event,
    on_ready: Callable[["Router"], None] = lambda router: None,
) -> None:
    """Serve until `stop` is set, then drain.

    Raises BusUnreachable, PortTaken or RecordingRefused at start, NameTaken there or later, and
    BusUnreachable when the server has closed the connection for good: a router that can only refuse
    must end, to be restarted.
    """
    router = Router(config)
    try:
        await router.open()
        on_ready(router)
        await first_of(stop.wait(), router.until_broken())
        await router.drain()
    finally:
        await router.close()


def _recorder(config: RouterConfig, core: RouterCore) -> Recorder | None:
    if config.record is None:
        return None
    header = RecordingHeader(
        version=package_version(),
        region=config.region,
        router=config.router,
        epoch=config.epoch,
        seed=config.seed,
        settings=config.settings,
        peers=config.peers,
    )
    return Recorder(config.record, header, core.handle)


def _access_log(config: RouterConfig) -> AccessLog | None:
    if config.access_log is AccessLogFormat.OFF:
        return None
    return AccessLog(f"{config.region}/{config.router}", config.access_log)


async def _listen(
    server: HttpServer, key: str, config: RouterConfig, where: Address, **how: Any
) -> HttpServer:
    try:
        await server.listen(*where, **how)
    except OSError as error:
        raise PortTaken.at(where, key, config, error) from error
    return server


class Router:
    """One router: `open`, then `drain` and `close`."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._clock = asyncio.get_running_loop().time
        self._bus = RouterBus(
            config.region,
            config.router,
            config.peers,
            config.bus,
            keeps_lease=config.settings.lease_s > 0.0,
            ground=config.settings.ground,
            servers=config.bus_servers,
        )
        self.core = RouterCore(
            RouterState(
                region=config.region,
                router=config.router,
                epoch=config.epoch,
                settings=config.settings,
                dice=random.Random(config.seed),
                peers=config.peers,
            )
        )
        self._metrics = RouterMetrics(self.core, CollectorRegistry(), self._clock, config.peers)
        self._metrics.router.labels(config.router).set(1)
        self._access_log = _access_log(config)
        self._recorder = _recorder(config, self.core)
        decide = self.core.handle if self._recorder is None else self._recorder.handle
        self.requests = RequestManager(
            config,
            self.core,
            self._bus,
            self._metrics,
            self._clock,
            decide,
            self._access_log,
        )
        self._questions = RequestQuestions(self.requests, self._bus, self._clock)
        self._name = NameClaim(
            config.region,
            config.router,
            config.epoch,
            self._bus,
            NameTaken.router(config.region, config.router),
        )
        self._pings = Pings(config, self._bus, self._clock, self.requests.feed, self.requests.guard)
        self.requests.messages.takers.append(self._on_control)
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._page: HttpServer | None = None  # metrics and the like on a port of their own
        self._apis: list[HttpApi] = []
        self._batch: BatchStoreDoor | None = None
        if config.batch is not None:
            self._batch = BatchStoreDoor(
                config.batch, config, self.requests, BatchMetrics(self._metrics.registry)
            )

    async def open(self) -> None:
        """Connect to the bus, then listen for HTTP."""
        if self._recorder is not None:
            self._recorder.open()  # before the first event, or nothing could be replayed
        if self._access_log is not None:
            self._access_log.open()
        await self._bus.open(
            Listeners(
                heartbeat=self.requests.messages.receive_heartbeat,
                digest=self.requests.messages.receive_digest,
                trie=self.requests.trie.receive_delta,
                siblings=self.requests.trie.receive_sibling,
                trie_ask=self.requests.trie.receive_ask,
                lease=self.requests.leases.receive,
                control=self.requests.leases.orders.receive,
                keys=self.requests.keys.receive,
                limits=self.requests.limits.receive,
                answer=self.requests.messages.receive_answer,
                ingress=self.requests.from_peers.receive,
                ping=self._pings.answer,
                requests=self._questions.receive,
                held=self.requests.messages.receive_held,
                lost=self._bus_is_lost,
                back=self._bus_is_back,
            ),
            self._name,
        )
        self._metrics.bus_connected.set(1)
        for work in self._work():
            self._tasks.append(asyncio.create_task(work))
        await self._open_http()

    def _work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The tasks that run until the router is closed."""
        yield from (self._ticks(), self._keep_alive(), self._pings.run(), self._stream())
        yield from (self.requests.signers.keep(), self.requests.usage.run())
        yield from (self.requests.limits.run(), self._name.keep())
        if self._config.peers and self._config.settings.lease_s:
            yield self.requests.beats.keep()
        if self._batch is not None:
            yield self._batch.keep_open()

    @property
    def http_port(self) -> int:
        """The port that is served: the configured one, or the free one that port 0 became."""
        assert self._http is not None, "not open"
        return self._http.port

    def reconfigure(self, config: RouterConfig) -> None:
        """Go on with this; it differs in what `mesh.runtime.reload` takes over, if at all."""
        self._config = config
        self.requests.reconfigure(config)
        for api in self._apis:
            api.allow_origins(config.cors_origins)
        if self._http is not None and config.tls is not None:
            self._http.renew(config.tls)

    def status(self) -> str:
        """What it does, in one line for people."""
        states = [replica.heartbeat.state for replica in self.core.replicas]
        problem = self.requests.not_ready_because()
        return (
            f"{'' if problem is None else problem[1] + '; '}"
            f"{states.count(ReplicaState.READY)} of {len(states)} replicas ready, "
            f"{self.requests.open_requests} requests open"
        )

    async def until_broken(self) -> None:
        """Raise what ended one of the tasks that never end by themselves."""
        tasks = (*self._tasks, self._bus.sending)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self) -> None:
        """Take nothing new; wait for what is under way, at most `drain_s`.

        New connections are for others at once. Open ones may bring a last request each, for a
        second: their clients can't know yet."""
        self.requests.is_leaving = True
        if self._http is not None:
            await self._http.retire(min(LAST_REQUESTS_S, self._config.drain_s))
        self.requests.feed(ev.Drain())
        self.requests.copies.end()
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._until_all_are_gone()
        except TimeoutError:
            log.warning("%d requests cut off by the drain limit", self._open_requests)
            self.requests.feed(ev.DrainOver())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ERRORS_SENT_S):
                    await self._until_all_are_gone()

    @property
    def _open_requests(self) -> int:
        """Clients that have not been answered to the end, uploads and downloads included."""
        transfers = 0 if self._batch is None else self._batch.api.open
        return self.requests.open_requests + transfers

    async def _until_all_are_gone(self) -> None:
        while self._open_requests:  # noqa: ASYNC110 - counts down in many places
            await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        for door in (self._http, self._page):
            if door is not None:
                await door.close(CUT_S)
        for api in self._apis:
            await api.close()
        await end_all(self._tasks)
        if self._batch is not None:
            await self._batch.close()
        await self.requests.usage.close()
        await self._bus.close()
        if self._recorder is not None:
            await self._recorder.close()
        if self._access_log is not None:
            await self._access_log.close()

    async def _open_http(self) -> None:
        config, metrics = self._config, self._metrics
        connections = ConnectionLimit(config.connections_max)
        metrics.connections.set_function(lambda: connections.open)
        metrics.connections_max.set(connections.most)
        served = Served(
            routes=config.routes,
            cors_origins=config.cors_origins,
            callers=self.requests.callers,
        )
        if config.shares_port:  # a scrape would meet one of the workers at random
            elsewhere = f"; each worker has a page of its own, this one's is {config.metrics}"
            served = replace(served, paths=EVERY_PATH - {http.METRICS}, elsewhere=elsewhere)
        batch = None if self._batch is None else self._batch.api
        api = self._api(served, connections, batch)
        server = HttpServer(
            api.handle,
            region=config.region,
            times=config.http_times,
            connections=connections,
            probes=OF_ONE_PROCESS & set(served.paths),
            count=self._turned_away,
            completions=api.completions,
        )
        where = Address(config.http_host, config.http_port)
        self._http = await _listen(
            server, "http", config, where, shared=config.shares_port, tls=config.tls
        )
        if config.metrics is not None:  # last: its /ready speaks for the endpoint too
            page = self._api(Served(OF_ONE_PROCESS, cors_origins=config.cors_origins), connections)
            server = HttpServer(
                page.handle, region=config.region, connections=ConnectionLimit(PAGE_CONNECTIONS)
            )
            self._page = await _listen(server, "metrics", config, config.metrics)
        log.info("region %s serves %s", config.region, config.url)

    def _api(
        self, served: Served, connections: ConnectionLimit, batch: BatchApi | None = None
    ) -> HttpApi:
        region, registry = self._config.region, self._metrics.registry
        api = HttpApi(
            region, self.requests, registry, served, connections, self._turned_away, batch
        )
        self._apis.append(api)
        return api

    def _turned_away(self, why: str) -> None:
        self._metrics.turned_away.labels(why).inc()

    # The bus.

    def _bus_is_lost(self) -> None:
        self._metrics.bus_connected.set(0)
        self.requests.feed(ev.BusLost())

    def _bus_is_back(self) -> None:
        self._metrics.bus_connected.set(1)
        self.requests.session.bus_returned()

    def _on_control(self, token: str, msg: Msg) -> bool:
        """Messages to this router's inboxes of pings and of routers of its name."""
        if token.startswith(PING_PREFIX):
            self._pings.receive(token, msg.data)
        else:
            return self._name.receive(token, msg.data)
        return True

    async def _stream(self) -> None:
        requests = self.requests
        await self._bus.watch_streams(
            requests.messages.read_last_heartbeat,
            self._stream_found,
            requests.leases.orders.reading,
            requests.keys.read,
        )

    def _stream_found(self, name: str, differs: list[str]) -> None:
        self._metrics.stream_altered.labels(name).set(bool(differs))
        if differs:
            log.error(
                "stream %s of %s is not as it was made: %s; put it right: mesh infra streams "
                "--region %s --config MESH.TOML --credentials RENDERED",
                name,
                self._config.region,
                ", ".join(differs),
                self._config.region,
            )

    # The clock.

    async def _ticks(self) -> None:
        session, late = self.requests.session, self._metrics.loop_late.observe
        await keep_ticking(session, late, lambda: self.core.is_at_rest)

    async def _keep_alive(self) -> None:
        leases, core = self.requests.leases, self.core

        def publish(next_within_s: float) -> None:
            leases.next_within_s = next_within_s
            leases.publish_alive()

        def rests() -> bool:
            return core.is_at_rest and self._clock() - core.state.digest.busy_at >= IDLE_S

        await keep_alive(publish, rests)
