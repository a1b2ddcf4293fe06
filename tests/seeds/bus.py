"""The regions' nats-servers and the links between them, at the face that nats-py's client has.

What it promises is what nats-server does: messages of one publisher to one subscriber keep their
order; a member of a queue group in the region of the publisher is preferred; a request without a
subscriber is answered by the server; streams keep the last messages and number all. A link that
is cut loses what crosses it, silently at first; one that stalls delivers it later.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import nats.errors
import nats.js.errors
from nats.js.api import StreamConfig

from infra.bus import (
    H_EXPECTED,
    PING_AGAIN_S,
    WRONG_LAST_SEQUENCE,
    BusAddress,
    BusUnreachable,
)
from mesh.adapters.streams import kept
from schemas import subjects
from schemas.ids import RegionId
from tests.seeds.jetstream import Account, fits
from tests.seeds.loop import Process, VirtualLoop, this_process

BUS_S = 0.0002  # from a publisher to its server and on to a subscriber
NOTICED_S = 4.0  # until the servers of a cut link know it, and answer for those behind it
BATCH_USER = "batch"
START_S, TRY_S = 10.0, 0.25
PAYLOAD_MAX = 8 * 1024 * 1024
INFO = "$JS.API.STREAM.INFO."


class Message(NamedTuple):
    """As nats-py's `Msg`, as far as it is read."""

    subject: str
    reply: str
    headers: Mapping[str, str] | None
    data: bytes


@dataclass(eq=False)
class Subscription:
    client: "Client"
    pattern: str
    queue: str
    take: Callable[[Message], object]
    _id: int = 0

    async def unsubscribe(self, limit: int = 0) -> None:
        self.client.forget(self)

    async def drain(self) -> None:
        self.client.forget(self)


class Client:
    """One process's connection."""

    last_error = None
    is_closed = False

    def __init__(
        self, bus: "Bus", server: "Server", process: Process, on_lost: Any, on_back: Any
    ) -> None:
        self.bus, self.server, self.process = bus, server, process
        self.max_payload = server.payload_bytes_max
        self._on_lost, self._on_back = on_lost, on_back
        self._inboxes = count(1)
        self.is_connected = True
        self.subscriptions: list[Subscription] = []
        self._unsent: list[Message] = []

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._inboxes)}"

    async def listen(
        self, subject: str, listener: Callable[[Message], object], queue: str = ""
    ) -> None:
        self._add(Subscription(self, subject, queue, listener))

    async def subscribe(
        self, subject: str, queue: str = "", cb: Any = None, **limits: Any
    ) -> Subscription:
        """Its messages are passed to `cb` one after another, as nats-py does, by a task."""
        waiting: asyncio.Queue[Message] = asyncio.Queue()
        task: list[asyncio.Task[None]] = []

        async def run() -> None:
            while True:
                await cb(await waiting.get())

        def take(message: Message) -> None:
            waiting.put_nowait(message)
            if not task:
                task.append(self.bus.loop.create_task(run()))

        subscription = Subscription(self, subject, queue, take)
        self._add(subscription)
        return subscription

    def _add(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)
        self.bus.entered(subscription)

    def forget(self, subscription: Subscription) -> None:
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
            self.bus.left(subscription)

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        message = Message(subject, reply, headers, bytes(payload))
        if self.is_connected:
            self.bus.carry(self, message)
        else:
            self._unsent.append(message)

    async def publish_described(
        self, subject: str, payload: bytes, reply: str, headers: dict[str, str], block: bytes
    ) -> None:
        await self.publish(subject, payload, reply, headers)

    async def flush(self, timeout: float = 10.0) -> None:
        if not self.is_connected:  # as nats-py
            return
        until = self.bus.loop.time() + timeout
        await asyncio.sleep(BUS_S)
        while not self.is_connected:
            if self.bus.loop.time() >= until:
                raise nats.errors.TimeoutError
            await asyncio.sleep(PING_AGAIN_S)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 5.0,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Of JetStream only what routers ask for: an acknowledged write, what a stream is."""
        await self._answered(timeout)
        if not subject.startswith(INFO):
            stream = self.server.stream_of(subject)
            assert stream is not None, subject
            ack, _ = stream.take(Message(subject, "", headers, payload))
            return SimpleNamespace(data=json.dumps(ack).encode())
        stream = self.server.stream_named(subject.removeprefix(INFO))
        config = {"compression": "none"} | stream.config.as_dict()  # as the server fills it in
        config["duplicate_window"] = 120_000_000_000
        return SimpleNamespace(data=json.dumps({"config": config}).encode())

    def jsm(self, timeout: float = 5.0) -> "Client":
        return self

    async def get_last_msg(self, stream: str, subject: str, direct: bool = False) -> Any:
        await self._answered(5.0)
        last = self.server.stream_named(stream).last.get(subject)
        if last is None:
            raise nats.js.errors.NotFoundError
        return SimpleNamespace(seq=last[0], data=last[1])

    async def get_msg(self, stream: str, seq: int, subject: str, **_: Any) -> Any:
        """The next one from `seq` on."""
        await self._answered(5.0)
        kept = self.server.stream_named(stream).last.items()
        found = [(at, name, data) for name, (at, data) in kept if at >= seq and fits(subject, name)]
        if not found:
            raise nats.js.errors.NotFoundError
        at, name, data = min(found)
        return SimpleNamespace(seq=at, subject=name, data=data)

    async def stream_info(self, stream: str, subjects_filter: str = "") -> Any:
        await self._answered(5.0)
        counts = dict.fromkeys(self.server.stream_named(stream).last, 1)
        return SimpleNamespace(state=SimpleNamespace(subjects=counts))

    async def _answered(self, timeout: float) -> None:
        await asyncio.sleep(2 * BUS_S)
        if not self.is_connected or not self.server.has_streams:
            await asyncio.sleep(timeout)
            raise nats.errors.TimeoutError

    async def close(self) -> None:
        self.gone()

    def gone(self) -> None:
        """The process closed it, or died."""
        self.is_closed, self.is_connected = True, False
        if self in self.server.clients:
            self.server.clients.remove(self)
            for subscription in self.subscriptions:
                self.bus.left(subscription)
            self.subscriptions.clear()

    def lost(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.process.do(self._on_lost)

    def back(self) -> None:
        if not self.is_connected and not self.is_closed:
            self.is_connected = True
            unsent, self._unsent = self._unsent, []
            for message in unsent:
                self.bus.carry(self, message)
            self.process.do(self._on_back)


@dataclass
class Stream:
    """The last message of each subject; all are numbered."""

    config: StreamConfig
    seq: int = 0
    last: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def take(self, message: Message) -> tuple[dict[str, Any], Message | None]:
        """The acknowledgement, and what is republished."""
        headers, name, subject = message.headers or {}, str(self.config.name), message.subject
        has, expected = self.last.get(subject, (0, b""))[0], headers.get(H_EXPECTED)
        if expected is not None and int(expected) != has:
            text = f"wrong last sequence: {has}"
            return {"error": {"err_code": WRONG_LAST_SEQUENCE, "description": text}}, None
        self.seq += 1
        self.last[subject] = self.seq, message.data
        again = None
        if self.config.republish is not None:
            numbered = {
                "Nats-Sequence": str(self.seq),
                "Nats-Stream": name,
                "Nats-Subject": subject,
            }
            again = Message(str(self.config.republish.dest), "", numbered, message.data)
        return {"stream": name, "seq": self.seq}, again


class Server:
    """One region's nats-server, and its streams."""

    def __init__(self, region: RegionId, has_peers: bool) -> None:
        self.region, self._has_peers = region, has_peers
        self.clients: list[Client] = []
        self.is_up, self.has_streams = True, True
        self.hangs_until = 0.0
        self.payload_bytes_max = PAYLOAD_MAX
        self.batch: Account
        self.empty()

    def empty(self) -> None:
        """Its store is made anew."""
        made = kept(self.region, has_peers=self._has_peers)
        self.streams = {
            str(config.subjects[0]): Stream(config) for config in made if config.subjects
        }
        self._of: dict[str, Stream | None] = {}

    def stream_named(self, name: str) -> Stream:
        for stream in self.streams.values():
            if stream.config.name == name:
                return stream
        raise nats.js.errors.NotFoundError

    def stream_of(self, subject: str) -> Stream | None:
        if subject not in self._of:
            found = (one for pattern, one in self.streams.items() if fits(pattern, subject))
            self._of[subject] = next(found, None)
        return self._of[subject]


@dataclass
class Link:
    """One direction between two regions."""

    delay_s: float
    jitter_s: float = 0.0
    lost: float = 0.0  # a share, as a server drops for a slow reader
    cut_at: float | None = None
    stalls_until: float = 0.0
    last_at: float = 0.0


class Bus:
    """All servers of a world. `delivered` is called with each message and its receiver."""

    def __init__(self, loop: VirtualLoop, dice: Random, regions: Mapping[str, float]) -> None:
        """`regions`: and the seconds from each to the middle of the network."""
        self.loop, self.dice = loop, dice
        self.servers = {name: Server(RegionId(name), len(regions) > 1) for name in regions}
        for server in self.servers.values():
            server.batch = Account(loop, server, BUS_S)
        self.links = {
            (one, other): Link(regions[one] + regions[other])
            for one in regions
            for other in regions
            if one != other
        }
        self.delivered: Callable[[Message, Client], None] = lambda message, client: None
        self._exact: dict[str, list[Subscription]] = {}
        self._wild: list[Subscription] = []
        self._fitting: dict[str, list[Subscription]] = {}  # of `_wild`, by subject
        self._last_at: dict[tuple[int, int], float] = {}

    async def connect(
        self, address: BusAddress, *, name: str, inbox_prefix: str, on_lost: Any = lambda: None,
        on_back: Any = lambda: None, on_error: Any = None,
    ) -> Client:  # fmt: skip
        """In place of `infra.bus.connect`."""
        server, process = self.servers[address.url.removeprefix("nats://")], this_process()
        assert process is not None
        tries = round(START_S / TRY_S)
        while not server.is_up or self.loop.time() < server.hangs_until:
            tries -= 1
            if tries < 0:
                raise BusUnreachable(f"no bus at {address.url}")
            await asyncio.sleep(TRY_S)
        await asyncio.sleep(BUS_S)
        bus: Any = self if address.user != BATCH_USER else server.batch
        client = Client(bus, server, process, on_lost, on_back)
        server.clients.append(client)
        process.at_kill.append(client.gone)
        return client

    def entered(self, subscription: Subscription) -> None:
        if is_wild(subscription.pattern):
            self._wild.append(subscription)
            self._fitting.clear()
        else:
            self._exact.setdefault(subscription.pattern, []).append(subscription)

    def left(self, subscription: Subscription) -> None:
        if is_wild(subscription.pattern):
            self._wild.remove(subscription)
            self._fitting.clear()
        else:
            self._exact[subscription.pattern].remove(subscription)

    def carry(self, sender: Client | None, message: Message, home: str = "") -> None:
        """`home`: the region of its server, if the server itself sends it."""
        at = sender.server.region if sender is not None else home
        subject = message.subject
        owner = subjects.owner(subject)
        stored = owner in self.servers and self.servers[owner].stream_of(subject) is not None
        if stored and owner is not None:
            self._store(at, owner, message)
        wild = self._fitting.get(subject)
        if wild is None:
            wild = [one for one in self._wild if fits(one.pattern, subject)]
            self._fitting[subject] = wild
        takers = (*self._exact.get(subject, ()), *wild)
        groups: dict[str, list[Subscription]] = {}
        is_heard = stored
        for subscription in takers:
            client = subscription.client
            if not client.is_connected or not self._is_known(at, client.server.region):
                continue
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
                continue
            is_heard = True
            self._send(sender, at, subscription, message)
        for members in groups.values():
            is_heard = True
            near = [one for one in members if one.client.server.region == at] or members
            self._send(sender, at, near[self.dice.randrange(len(near))], message)
        if not is_heard and message.reply and sender is not None:
            self._answer(at, message.reply, b"", {"Status": "503"}, sender)

    def _is_known(self, here: str, there: str) -> bool:
        """Whether a server knows of subscriptions at another one."""
        if here == there:
            return True
        ways = self.links[here, there], self.links[there, here]
        return all(
            link.cut_at is None or self.loop.time() < link.cut_at + NOTICED_S for link in ways
        )

    def _arrival(self, here: str, there: str) -> float | None:
        """When a message that is sent now is at the other server."""
        now = max(self.loop.time(), self.servers[here].hangs_until)
        if here == there:
            return now
        link = self.links[here, there]
        if link.cut_at is not None or (link.lost and self.dice.random() < link.lost):
            return None
        at = max(now, link.stalls_until) + link.delay_s
        if link.jitter_s:
            at += self.dice.expovariate(1.0 / link.jitter_s)
        link.last_at = at = max(at, link.last_at)
        return max(at, self.servers[there].hangs_until)

    def _send(self, sender: object, at: str, to: Subscription, message: Message) -> None:
        client = to.client
        arrives_at = self._arrival(at, client.server.region)
        if arrives_at is None:
            return
        edge = id(sender), id(client)
        when = max(arrives_at + BUS_S, self._last_at.get(edge, 0.0) + 1e-9)
        self._last_at[edge] = when
        self.loop.call_at(when, self._deliver, to, message, context=client.process.context)

    def _deliver(self, to: Subscription, message: Message) -> None:
        if to.client.is_connected:
            self.delivered(message, to.client)
            to.take(message)

    def _answer(
        self, at: str, inbox: str, data: bytes, headers: Mapping[str, str] | None, to: Client | None
    ) -> None:
        """The server itself answers, to one client or whoever has the inbox."""
        message = Message(inbox, "", headers, data)
        if to is None:
            self.carry(None, message, at)
            return
        for subscription in to.subscriptions:
            if fits(subscription.pattern, inbox):
                self._send(None, at, subscription, message)

    def _store(self, here: str, there: str, message: Message) -> None:
        arrives_at = self._arrival(here, there)
        if arrives_at is not None:
            self.loop.call_at(arrives_at, self.write, there, message)

    def write(self, region: str, message: Message) -> bool:
        """A message arrives at a stream; whether it took it."""
        server = self.servers[region]
        stream = server.stream_of(message.subject)
        if not server.is_up or not server.has_streams or stream is None:
            return False
        ack, again = stream.take(message)
        if message.reply and not stream.config.no_ack:
            self._answer(region, message.reply, json.dumps(ack).encode(), None, None)
        if again is not None:
            self.carry(None, again, region)
        return "seq" in ack

    # What may go wrong.

    def down(self, region: str) -> None:
        server = self.servers[region]
        server.is_up = False
        server.batch.down()
        for client in server.clients:
            client.lost()

    def up(self, region: str) -> None:
        server = self.servers[region]
        server.is_up = True
        for client in list(server.clients):
            client.back()

    def cut(self, one: str, other: str, *, is_cut: bool) -> None:
        """One direction."""
        self.links[one, other].cut_at = self.loop.time() if is_cut else None


def is_wild(pattern: str) -> bool:
    return "*" in pattern or ">" in pattern
