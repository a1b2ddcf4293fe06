"""The router's connection to the bus: subscriptions, the outbox, and what sessions send.

`publish` never waits: effects of the core are performed in order and at once, so messages go
into a bounded outbox that one task empties into nats-py. After a reconnect nats-py restores the
subscriptions by itself; what was published meanwhile is read from the heartbeat stream.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import StreamConfig

from infra.bus import (
    BusAddress,
    BusClient,
    BusUnreachable,
    close,
    closed_for_good,
    connect,
    plain_headers,
)
from infra.process import end_all
from infra.services import ProcessService
from mesh.adapters import streams
from mesh.adapters.paced_links import PacedLinks
from mesh.core.model.request import Request
from mesh.session.answer import Held
from mesh.session.record import OpenRequest
from schemas import exchange, held, subjects, wire
from schemas.exchange import LARGE_BYTES, Frame
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.residency import OPEN_GROUND, Ground, Label, Labels, labels_text

log = logging.getLogger(__name__)

SKETCH_BLOCKS_MAX = 2048  # 512 KiB of prompt text; enough to find its prefix
OUTBOX_MAX = 65_536
OUTBOX_BYTES_MAX = 256 * 1024 * 1024
STREAM_RETRY_S = 1.0
KEYS_AGAIN_S = 5.0  # where there is no stream of API keys: a router may serve nobody until then
CLOSE_S = 2.0  # for what is still in the outbox
# Of max_payload, which counts headers too: more than `schemas.headers` lets all of a request's
# have together.
HEADER_BYTES_RESERVE = 16 * 1024
HEADERS_BYTES_MAX = HEADER_BYTES_RESERVE // 2  # of a peer's request: this router adds its own
_HEADER_FRAME_BYTES = len(b"NATS/1.0\r\n\r\n")
_HEADER_LINE_BYTES = len(b": \r\n")


def header_bytes(headers: Mapping[str, str]) -> int:
    """What the headers add to a message, in bytes, if they are ASCII."""
    size = _HEADER_FRAME_BYTES + _HEADER_LINE_BYTES * len(headers)
    return size + len("".join(headers)) + len("".join(headers.values()))


class _Outgoing(NamedTuple):
    subject: str
    payload: bytes
    reply: str
    headers: dict[str, str] | None
    block: bytes | None  # the same headers as they travel, if they are plain text


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks by kind of message. Called on the event loop, one message after another."""

    heartbeat: Callable[[Msg], None]
    digest: Callable[[Msg], None]
    trie: Callable[[Msg], None]
    siblings: Callable[[Msg], None]
    trie_ask: Callable[[Msg], None]
    lease: Callable[[Msg], None]
    control: Callable[[Msg], None]
    answer: Callable[[Msg], None]
    ingress: Callable[[Msg], None]
    ping: Callable[[Msg], None]
    lost: Callable[[], None]
    back: Callable[[], None]
    requests: Callable[[Msg], None] = lambda msg: None
    held: Callable[[Msg], None] = lambda msg: None
    keys: Callable[[Msg], None] = lambda msg: None
    limits: Callable[[Msg], None] = lambda msg: None


class NameCheck(Protocol):
    """Finds out whether another process of the name runs, by some of the name's inboxes."""

    tokens: Collection[str]
    """The last tokens of these inboxes."""

    def receive(self, token: str, data: bytes) -> bool:
        """A message to the inbox with that last token."""

    async def settle(self) -> None:
        """Return when the name is this process's own. Raises where another has it."""


class RouterBus:
    """One router's connection. Use `open`, then `publish` freely, then `close`."""

    def __init__(
        self,
        region: RegionId,
        router: RouterId,
        peers: tuple[RegionId, ...],
        address: BusAddress,
        *,
        keeps_lease: bool = True,
        ground: Ground = OPEN_GROUND,
        servers: int = 1,
    ) -> None:
        """`keeps_lease`: whether the region has a lease, if it has peers. `servers`: that it has;
        `address` may name fewer."""
        self._ground = ground
        self.region, self.router = region, router
        self._keeps_lease = keeps_lease and bool(peers)
        self._peers = peers
        self._address, self._servers = address, servers
        self._client: BusClient | None = None
        self._service: ProcessService | None = None
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue(OUTBOX_MAX)
        self._outbox_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._returned = asyncio.Event()
        self.paced_links = PacedLinks(region, router, peers, self.publish)

    @property
    def client(self) -> BusClient:
        assert self._client is not None, "the bus is not open"
        return self._client

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def sending(self) -> asyncio.Task[None]:
        """Ends, with BusUnreachable, when the server has closed the connection for good."""
        assert self._sender is not None, "the bus is not open"
        return self._sender

    @property
    def payload_bytes_max(self) -> int:
        """The largest body that fits one message beside its headers."""
        return self.client.max_payload - HEADER_BYTES_RESERVE

    async def open(self, listeners: Listeners, name: NameCheck | None = None) -> None:
        """Connect, start emptying the outbox, settle the name, and subscribe. Before the name is
        settled nothing is received of the rest: whatever followed from it would be done, and taken
        by others, in the name of the process that has it.

        Raises infra.bus.BusUnreachable, and what `name` raises.
        """

        async def subscribe() -> None:
            await self._subscribe(listeners)
            await self._register()

        await self._open("router", subscribe, listeners.lost, listeners.back, name)

    async def _open(
        self,
        what: str,
        subscribe: Callable[[], Coroutine[Any, Any, None]],
        on_lost: Callable[[], None],
        on_back: Callable[[], None],
        name: NameCheck | None = None,
    ) -> None:
        def back() -> None:
            self._returned.set()
            self.paced_links.returned()
            on_back()

        self._client = await connect(
            self._address,
            name=f"{what} {self.region}/{self.router}",
            inbox_prefix=subjects.inbox_prefix(self.region, self.router),
            on_lost=on_lost,
            on_back=back,
        )
        self._sender = asyncio.create_task(self._send(), name="bus outbox")
        try:
            asking = [] if name is None else await self._settle(name)
            await subscribe()
            for subscription in asking:
                await subscription.unsubscribe()
        except nats.errors.Error as error:  # it was lost again, or is too busy
            why = str(error) or type(error).__name__
            raise BusUnreachable(f"the bus did not confirm the subscriptions: {why}") from error

    async def _settle(self, name: NameCheck) -> list[Subscription]:
        """The subscriptions that it took."""

        async def receive(msg: Msg) -> None:
            name.receive(msg.subject.rpartition(".")[2], msg.data)

        inboxes = [subjects.inbox(self.region, self.router, token) for token in name.tokens]
        asking = [await self.client.subscribe(inbox, cb=receive) for inbox in inboxes]
        await self.client.flush()
        await name.settle()
        return asking

    async def close(self) -> None:
        """Send what is in the outbox, then disconnect; don't wait for a bus that is gone."""
        self.paced_links.close()
        await _soon(self._send_the_rest())
        if self._sender is not None:
            await end_all([self._sender])
        if self._client is not None:  # also when not all could be sent
            await _soon(close(self._client))

    async def _send_the_rest(self) -> None:
        if self._client is not None and self.is_connected:
            await self._outbox.join()
            if self._service is not None:
                await self._service.stop()
            await self._client.flush()

    def publish(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> bool:
        """Send soon, in order. False if it is not sent: the outbox is full, as the bus has been
        gone for long, or the server would not take the message and close the connection."""
        if self._outbox_bytes + len(payload) > OUTBOX_BYTES_MAX or self._outbox.full():
            return False
        block = None if headers is None else plain_headers(headers)
        if headers is not None and not self._takes(payload, headers, block):
            log.warning("not sent to %s: its headers are too large or not ASCII", subject)
            return False
        self._outbox_bytes += len(payload)
        self._outbox.put_nowait(_Outgoing(subject, payload, reply, headers, block))
        return True

    def _takes(self, payload: bytes, headers: dict[str, str], block: bytes | None) -> bool:
        """Whether a server accepts such a message; nats-py checks the payload alone."""
        if block is not None:
            return len(payload) + len(block) <= self.client.max_payload
        if len(payload) + header_bytes(headers) > self.client.max_payload:
            return False
        return "".join(headers.values()).isascii()

    # What sessions send: mesh.session.record.Bus.

    def send_work(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        headers: dict[str, str],
    ) -> bool:
        """The request to an agent, which requests a body too large for one message in parts."""
        body, room = record.body, self.payload_bytes_max
        if region != self.region:  # one that this router has adopted
            room = min(room, LARGE_BYTES)
            self.paced_links.expect_answer(record, region, headers)
        if exchange.H_KV_PARAMS in headers:
            room -= len(headers[exchange.H_KV_PARAMS])
        if len(body) > room:
            headers[exchange.H_BODY_BYTES], body = str(len(body)), b""
        return self.publish(subjects.work(region, replica), body, reply=inbox, headers=headers)

    def send_ingress(
        self, record: OpenRequest, peer: RegionId, inbox: str, headers: dict[str, str]
    ) -> bool:
        """The request to a peer. A peer's loop is not to read large bodies, so they go in parts."""
        body, request = record.body, record.request
        self.paced_links.expect_answer(record, peer, headers)
        if len(body) > LARGE_BYTES:
            headers[exchange.H_BODY_BYTES] = str(len(body))
            prompt = request.prompt
            sketch = exchange.Sketch(prompt.tokens, prompt.hashes[:SKETCH_BLOCKS_MAX])
            body = wire.encode(sketch)
        return self.publish(self._peer_subject(peer, request), body, reply=inbox, headers=headers)

    def _peer_subject(self, peer: RegionId, request: Request) -> str:
        """Where a peer takes such a request."""
        return ingress_subject(self._ground, self.region, peer, request.residency)

    def send_body(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Its body in parts, to the agent that requested them; over a link at the link's pace."""
        subject = subjects.body(region, replica)
        if region != self.region:
            return self.paced_links.send_body(record, region, subject, inbox, is_wanted)
        for payload, headers in body_parts(record.body, inbox, self.payload_bytes_max):
            self.publish(subject, payload, headers=headers)
        return True

    def send_blocks(self, region: RegionId, replica: ReplicaId, blocks: held.PromptBlocks) -> None:
        self.publish(subjects.prompt_blocks(region, replica), wire.encode(blocks))

    def link_returned(self, region: RegionId) -> None:
        self.paced_links.returned(region)

    def send_cancel(self, region: RegionId, replica: ReplicaId, inbox: str) -> None:
        self.publish(subjects.cancel(region, replica), wire.encode(exchange.Cancel(inbox)))

    def send_credit(self, region: RegionId, replica: ReplicaId, credit: exchange.Credit) -> None:
        self.publish(subjects.credit(region, replica), wire.encode(credit))

    def answer_peer(
        self, inbox: str, message: exchange.Placed | exchange.Lost | exchange.Refused | Held
    ) -> None:
        if isinstance(message, Held):
            frame = exchange.pack_frame(Frame.HELD, message.hops)
        else:
            frame = exchange.pack_frame(_KINDS[type(message)], 0, wire.encode(message))
        self.publish(inbox, frame)

    async def _send(self) -> None:
        client = self.client
        while True:
            message = await self._outbox.get()
            try:
                subject, payload, reply, headers, block = message
                if headers is None or block is None:
                    await client.publish(subject, payload, reply, headers)
                else:
                    await client.publish_described(subject, payload, reply, headers, block)
            except nats.errors.ConnectionClosedError as error:
                raise closed_for_good(client) from error
            except (nats.errors.Error, OSError) as error:
                log.warning("not sent to %s: %s", message.subject, error or type(error).__name__)
            finally:
                self._outbox_bytes -= len(message.payload)
                self._outbox.task_done()

    async def _subscribe(self, listeners: Listeners) -> None:
        region = self.region
        routers = subjects.QUEUE_ROUTERS
        listen = self.client.listen
        await listen(subjects.heartbeat(region, subjects.ANY), listeners.heartbeat)
        await listen(subjects.held(region, subjects.ANY), listeners.held)
        for peer in self._peers:
            await listen(subjects.digest(peer), listeners.digest)
            await listen(subjects.leased(peer), listeners.lease)
        if self._peers:
            await listen(subjects.leased(region), listeners.lease)
        await listen(subjects.controlled(region), listeners.control)
        await listen(subjects.keyed(region), listeners.keys)
        for origin in (region, *self._peers):
            await listen(subjects.trie(origin), listeners.trie)
            await listen(subjects.limits(origin), listeners.limits)
        await listen(subjects.siblings(region), listeners.siblings)
        await listen(subjects.snapshot(region, subjects.ANY), listeners.trie_ask)
        await listen(subjects.inbox(region, self.router, subjects.ANY), listeners.answer)
        await listen(subjects.ingress(region), listeners.ingress, routers)
        within = subjects.ingress_within(region, subjects.ANY)
        await listen(within, listeners.ingress, routers)
        await listen(subjects.ping(region), listeners.ping, routers)
        await listen(subjects.requests(region), listeners.requests)
        await self.client.flush()

    async def _register(self) -> None:
        """Show this router in `nats micro ls|info`; it has no endpoint: requests come over HTTP."""
        self._service = ProcessService(
            self.client,
            subjects.SERVICE_ROUTER,
            self.router,
            "Serves a region's HTTP and places its requests",
            {"region": self.region, "router": self.router},
        )
        await self._service.start()

    async def watch_streams(
        self,
        take: Callable[[str, bytes], None],
        found: Callable[[str, list[str]], None],
        reading_control: Callable[[], Callable[[int, bytes], None]] | None = None,
        take_keys: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """Pass the last heartbeats to `take`, at the start and at every return of the bus, and
        check the streams every CHECK_S: `found` gets each one's name and its differences.
        `reading_control` is called before the operators' last record is requested, and what it
        returns gets that record with its number, 0 and nothing if there is none. `take_keys` gets
        the last record of API keys likewise.

        Runs until cancelled. Without JetStream the router works on: only its start is slower,
        until each replica's next heartbeat, and no peer can adopt its region.
        """
        wanted = streams.kept(self.region, has_peers=self._keeps_lease, servers=self._servers)
        while True:
            self._returned.clear()
            try:
                for subject, beat in await self._last_heartbeats():
                    take(subject, beat)
                while not self._returned.is_set():
                    if reading_control is not None:
                        take_control = reading_control()
                        if last := await self._last(subjects.STREAM_CONTROL, subjects.control):
                            take_control(*last)
                    last = await self._last(subjects.STREAM_KEYS, subjects.keys)
                    if take_keys is not None and last is not None:
                        take_keys(*last)
                    again_s = streams.CHECK_S if last is not None else KEYS_AGAIN_S
                    for config in wanted:
                        found(str(config.name), await self._altered(config))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(again_s):
                            await self._returned.wait()
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                log.warning("streams: %s", error or type(error).__name__)
                await asyncio.sleep(STREAM_RETRY_S)

    async def _altered(self, config: StreamConfig) -> list[str]:
        try:
            return await streams.altered(self.client, config)
        except (nats.errors.NoRespondersError, TimeoutError):
            if config.name != subjects.STREAM_KEYS:
                raise
            return ["not for this login: nats-server is configured as before an upgrade"]

    async def _last(
        self, stream: str, subject: Callable[[RegionId], str]
    ) -> tuple[int, bytes] | None:
        """The last record. None: the stream was never made, or may not be read; `streams.altered`
        reports it."""
        try:
            last = await self.client.jsm().get_last_msg(stream, subject(self.region), direct=True)
        except nats.js.errors.NotFoundError:  # nothing was written yet
            return 0, b""
        except (nats.errors.NoRespondersError, TimeoutError):
            return None
        return last.seq or 0, last.data or b""

    async def _last_heartbeats(self) -> list[tuple[str, bytes]]:
        manager = self.client.jsm()
        try:
            info = await manager.stream_info(
                subjects.STREAM_HEARTBEATS, subjects_filter=subjects.heartbeat(self.region, ">")
            )
        except nats.js.errors.NotFoundError:  # it was never made: `streams.altered` reports it
            return []
        beats = []
        for subject in info.state.subjects or {}:
            last = await manager.get_last_msg(subjects.STREAM_HEARTBEATS, subject, direct=True)
            if last.data is not None:
                beats.append((subject, last.data))
        return beats


_KINDS: Mapping[type, Frame] = {
    exchange.Placed: Frame.PLACED,
    exchange.Lost: Frame.LOST,
    exchange.Refused: Frame.REFUSED,
}


def ingress_subject(ground: Ground, home: RegionId, peer: RegionId, labels: Labels) -> str:
    """The subject of a request to a peer: under a label that the peer carries, if any is required.

    Raises ValueError as `label_sent` does.
    """
    if not labels:
        return subjects.ingress(peer)
    return subjects.ingress_within(peer, label_sent(ground, home, peer, labels))


def label_sent(ground: Ground, home: RegionId, peer: RegionId, labels: Labels) -> Label:
    """The one of these labels under which a request of `home` goes to the peer.

    Raises ValueError if there is none: the core chose a peer that it may not.
    """
    carried = sorted(set(ground.sent(home, peer)).intersection(labels))
    if not carried:
        raise ValueError(f"region {peer} carries none of {labels_text(labels)}")
    return carried[0]


def body_parts(body: bytes, inbox: str, part_bytes: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    """The body cut into messages of at most `part_bytes`, each with its headers."""
    for offset in range(0, len(body), part_bytes):
        headers = {exchange.H_BODY_INBOX: inbox, exchange.H_BODY_OFFSET: str(offset)}
        yield body[offset : offset + part_bytes], headers


def has_headers(msg: Msg) -> bool:
    """Whether this is no state or gossip of a router or agent: theirs comes without headers.

    Messages that JetStream sends have headers, and a JetStream request may name any reply subject.
    The subject alone proves the sender, so a stored message could pass for another region's.
    """
    return bool(msg.headers)


def is_no_responders(headers: Mapping[str, str] | None) -> bool:
    """Whether the server itself answers that the subject has no subscriber."""
    return headers is not None and headers.get("Status") == "503"


async def _soon(leaving: Coroutine[Any, Any, None]) -> None:
    """Within CLOSE_S, or not at all."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await leaving
    except (nats.errors.Error, OSError, TimeoutError) as error:
        log.info("left a bus that was gone: %s", error or type(error).__name__)
