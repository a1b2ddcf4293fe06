"""Watches the buses of regions for `mesh top` and the console, as their observer or operator."""

import asyncio
import time
from collections.abc import Callable, Mapping

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from infra.bus import BusAddress, BusUnreachable
from infra.process import run_all
from infra.topology import Topology
from mesh.adapters.operator_orders import ORDERS
from mesh.adapters.region_records import RecordsUnavailable
from mesh.doctor.logins import Logins
from mesh.explain.question import ask_all
from mesh.explain.story import Story, stories
from mesh.explain.text import story_lines
from mesh.top.fleet import REPLICAS_MAX, Fleet
from mesh.top.rows import Frame
from schemas import state, subjects
from schemas.control import decode_control
from schemas.explain import RECENT_MAX, RequestQuestion, decode_answer, encode_question
from schemas.ids import RegionId
from schemas.wire import WireError

ASK_S = 1.0  # between two questions to routers, which answer twenty a second
RETRY_S = 2.0  # until the next attempt to connect, each of which lasts up to 10 s
ORDERS_RETRY_S = 30.0
EXPLAIN_S = 3.0
RECENT = encode_question(RequestQuestion(recent=RECENT_MAX))
H_STREAM, H_SEQUENCE = "Nats-Stream", "Nats-Sequence"  # of what a stream republishes


class FleetWatch:
    """The fleet by its buses. `run` watches until it is cancelled."""

    def __init__(
        self,
        topology: Topology,
        logins: Mapping[RegionId, Logins],
        clock: Callable[[], float] = time.monotonic,
        name: str = "mesh top",
    ) -> None:
        """`name`: of the connections, in `nats server report connections`."""
        self.clock = clock
        self._topology, self._logins = topology, logins
        addresses = {name: one.observer or one.operator for name, one in logins.items()}
        known = {name: address for name, address in addresses.items() if address is not None}
        regions = {name: table.replicas for name, table in topology.regions.items()}
        self.fleet = Fleet(regions, known)
        self._buses = [
            _RegionBus(region, address, self.fleet, clock, name)
            for region, address in known.items()
        ]

    async def run(self) -> None:
        await run_all(each.run() for each in self._buses)

    def frame(self) -> Frame:
        for each in self._buses:
            each.read_heartbeats()
        return self.fleet.frame(self.clock())

    def connected_s(self) -> list[float | None]:
        """For how long each watched bus has been connected, in seconds; None: it is away."""
        now = self.clock()
        since = [one.connected_at for one in self._buses]
        return [None if at is None else now - at for at in since]

    async def explain(self, request: str) -> list[str]:
        """What `mesh explain` prints of a request."""
        found, problems = await self.stories(request)
        if found:
            return [*story_lines(found[-1]), *problems]
        return [f"no router keeps {request} any more", *problems]

    async def stories(self, request: str) -> tuple[list[Story], list[str]]:
        """What the routers keep of a request, the newest last, and who did not answer and why."""
        question = RequestQuestion(request=request)
        answers = await ask_all(self._topology, self._logins, question, EXPLAIN_S)
        lives = [life for region in answers for one in region.answers for life in one.requests]
        problems = [f"{one.region}: {one.problem}" for one in answers if one.problem is not None]
        return stories(lives), problems


class _RegionBus:
    """One region's bus."""

    def __init__(
        self,
        region: RegionId,
        address: BusAddress,
        fleet: Fleet,
        clock: Callable[[], float],
        name: str,
    ) -> None:
        self._name = name
        self._region, self._address, self._fleet, self._clock = region, address, fleet, clock
        # Ten come a second, and one is shown: decoded when it is.
        self._heartbeats: dict[str, tuple[bytes, float]] = {}
        self._orders_due_at: float | None = None
        self._orders_received = 0  # that the stream sent by itself
        self.connected_at: float | None = None

    async def run(self) -> None:
        while True:
            try:
                client = await bus.connect(
                    self._address,
                    name=self._name,
                    inbox_prefix=subjects.INBOX_ROOT,
                    on_lost=self._lost,
                    on_back=self._connected,
                )
            except BusUnreachable as error:
                self._fleet.disconnected(self._region, str(error))
                await asyncio.sleep(RETRY_S)
                continue
            try:
                self._connected()
                await self._watch(client)
            except nats.errors.Error as error:
                self._lost(str(error) or type(error).__name__)
            finally:
                await bus.close(client)
            await asyncio.sleep(RETRY_S)

    async def _watch(self, client: bus.BusClient) -> None:
        region, inbox = self._region, client.new_inbox()
        await client.listen(subjects.heartbeat(region, subjects.ANY), self._heartbeat)
        await client.listen(subjects.digest(subjects.ANY), self._read(self._digest))
        await client.listen(subjects.offline_state(region), self._read(self._offline))
        await client.listen(subjects.leased(region), self._read(self._lease))
        await client.listen(subjects.controlled(region), self._read(self._orders))
        await client.listen(inbox, self._read(self._answer))
        while not client.is_closed:
            if client.is_connected:
                await client.publish(subjects.requests(region), RECENT, reply=inbox)
                await self._read_orders(client)
            await asyncio.sleep(ASK_S)

    def _connected(self) -> None:
        self.connected_at = self._orders_due_at = self._clock()
        self._fleet.connected(self._region, self.connected_at)

    def _lost(self, why: str = "connection lost, reconnecting") -> None:
        self.connected_at = None
        self._fleet.disconnected(self._region, why)

    async def _read_orders(self, client: Client) -> None:
        """After each connect: they may have changed meanwhile."""
        if self._orders_due_at is None or self._clock() < self._orders_due_at:
            return
        received = self._orders_received
        try:
            known = await ORDERS.read(client, self._region)
        except RecordsUnavailable:
            self._orders_due_at = self._clock() + ORDERS_RETRY_S
            return
        self._orders_due_at = None
        if self._orders_received == received:  # else what was read may be what held before
            self._fleet.orders(known.record)

    def read_heartbeats(self) -> None:
        """Decode those that came since the last time."""
        received, self._heartbeats = self._heartbeats, {}
        for subject, (data, at) in received.items():
            try:
                beat = state.decode_heartbeat(data)
            except WireError:
                continue
            if subjects.heartbeat(beat.region, beat.replica) == subject:
                self._fleet.heartbeat(beat, at)

    def _heartbeat(self, msg: Msg) -> None:
        # Agents send no headers: with some it was read out of a stream.
        is_known = msg.subject in self._heartbeats or len(self._heartbeats) < REPLICAS_MAX
        if not msg.headers and is_known:
            self._heartbeats[msg.subject] = msg.data, self._clock()

    def _read(self, receive: Callable[[Msg], None]) -> Callable[[Msg], None]:
        """Messages that can't be decoded are dropped: `mesh doctor` counts them."""

        def received(msg: Msg) -> None:
            try:
                receive(msg)
            except WireError:
                return

        return received

    def _digest(self, msg: Msg) -> None:
        digest = None if msg.headers else state.decode_digest(msg.data)
        if digest is not None and digest.region == subjects.owner(msg.subject):
            self._fleet.digest(digest, self._clock())

    def _offline(self, msg: Msg) -> None:
        offline = None if msg.headers else state.decode_offline(msg.data)
        if offline is not None and offline.region == self._region:
            self._fleet.offline(offline, self._clock())

    def _lease(self, msg: Msg) -> None:
        if (msg.headers or {}).get(H_STREAM) == subjects.STREAM_LEASES:
            lease = state.decode_lease(msg.data)
            if lease.region == self._region:
                self._fleet.lease(lease, self._clock())

    def _orders(self, msg: Msg) -> None:
        headers = msg.headers or {}
        seq = headers.get(H_SEQUENCE, "")
        if headers.get(H_STREAM) != subjects.STREAM_CONTROL or not seq.isdecimal():
            return
        orders = decode_control(msg.data)
        if orders.region == self._region:  # the last one holds; a stream made anew numbers anew
            self._orders_received += 1
            self._fleet.orders(orders)

    def _answer(self, msg: Msg) -> None:
        if (msg.headers or {}).get("Status"):  # no router is there
            return
        answer = decode_answer(msg.data)
        if answer.region == self._region:
            self._fleet.answer(answer, self._clock())
