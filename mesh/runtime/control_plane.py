"""Prefix gossip, leases, orders and pings on the bus, each checked for who may have sent it.

Gossip: the answers of each origin come to an inbox of their own, whose last token is random and
sent to that origin's region only, so no other region can answer in its name.

Leases: a claim is published to the lease's subject with the number of the last known write; the
stream's answer comes to an inbox with a random token, so no agent can forge it. The stream
republishes accepted writes (`schemas.catalog`: leased) with their number in a header; besides the
stream, only that region's own routers can publish there.

Operators' orders (which replicas are drained) come from a stream too, in the same way; the router
passes them on to its region's agents in its keepalives, and decides nothing by them.

Pings travel as work does, so the round trip includes the bus and its links. A ping without an
answer when the next one leaves counts as lost; a later answer is ignored.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from typing import NamedTuple, Protocol

import orjson
from nats.aio.msg import Msg
from prometheus_client import Counter

from infra.bus import H_EXPECTED, WRONG_LAST_SEQUENCE
from infra.process import LimitedLog
from mesh.adapters.access_log import quoted_once
from mesh.adapters.adopted_heartbeats import AdoptedHeartbeats
from mesh.adapters.bus import RouterBus, has_headers, is_no_responders
from mesh.adapters.metrics import RouterMetrics
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.membership.adoption import Ownership
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.runtime.config import RouterConfig
from schemas import exchange, state, subjects, wire
from schemas.control import RegionControl, decode_control, nothing_ordered
from schemas.gossip import PEERS, SIBLINGS, TrieAsk, TrieDelta, TriePart
from schemas.ids import RegionId, RouterId
from schemas.replies import LEASE_PREFIX, PING_BYTES, PING_PREFIX, TRIE_PREFIX, reply_inbox
from schemas.subjects import InboxAddress

log = logging.getLogger(__name__)


class CountsReplies(Protocol):
    """Metrics with a count of requests that are not answered, by channel."""

    replies_dropped: Counter


class ReplyGuard:
    """Checks reply subjects: every answer goes to an inbox that this returns."""

    def __init__(
        self,
        home: RegionId,
        peers: tuple[RegionId, ...],
        metrics: CountsReplies,
        clock: Callable[[], float],
    ) -> None:
        self._home, self._peers = home, frozenset(peers)
        self._metrics = metrics
        self._log = LimitedLog(log, clock)

    def inbox(self, channel: str, msg: Msg) -> InboxAddress | None:
        """Where to answer a request that came on that channel; None after it was counted."""
        address = reply_inbox(channel, msg.subject, msg.reply, self._home, self._peers)
        if address is None:
            self.drop(channel, msg)
        return address

    def drop(self, channel: str, msg: Msg) -> None:
        """Count and log a message that is not answered."""
        self._metrics.replies_dropped.labels(channel).inc()
        text = "%s: dropped a request of %d bytes: its reply subject %.200r is not allowed"
        self._log.warning(channel, "reply", text, msg.subject, len(msg.data), msg.reply)


TOKEN_BYTES = 12
ASKED_MAX = 256  # origins whose answer is awaited

PART_SEEN: dict[int, Callable[[TriePart], ev.Event]] = {
    PEERS: ev.TriePartSeen,
    SIBLINGS: ev.SiblingPartSeen,
}
DELTA_SEEN: dict[int, Callable[[TrieDelta], ev.Event]] = {
    PEERS: ev.TrieSeen,
    SIBLINGS: ev.SiblingSeen,
}


class AskedStream(NamedTuple):
    """The origin that answers to an inbox, and which of its streams."""

    origin: Origin
    stream: int


class PrefixGossip:
    """One router's. `receive…` is called by the bus, the rest performs effects."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        metrics: RouterMetrics,
        feed: Callable[[ev.Event], None],
        guard: ReplyGuard,
    ) -> None:
        self._guard = guard
        self._log = LimitedLog(log)
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._feed = feed
        self._tokens: dict[AskedStream, str] = {}  # of the inbox that it answers to
        self._sources: dict[str, AskedStream] = {}  # the same the other way round

    def receive_delta(self, msg: Msg) -> None:
        """Prefixes that a peer region, or our own, gained and lost."""
        delta = self._read(msg)
        if not isinstance(delta, TrieDelta):
            self._drop(msg, "no delta")
        elif delta.region != subjects.owner(msg.subject):
            self._drop(msg, "it names another region")
        elif delta.region in self._config.peers or self._is_sibling(delta):
            self._feed(ev.TrieSeen(delta))

    def receive_sibling(self, msg: Msg) -> None:
        """What another router of our region placed where."""
        delta = self._read(msg)
        if not isinstance(delta, TrieDelta):
            self._drop(msg, "no delta")
        elif self._is_sibling(delta):
            self._feed(ev.SiblingSeen(delta))

    def receive_ask(self, msg: Msg) -> None:
        """A router of a peer region, or of our own, requests what it missed."""
        address = self._guard.inbox("snapshot", msg)
        if address is None:
            return
        ask = self._read(msg)
        if not isinstance(ask, TrieAsk):
            self._drop(msg, "no request")
        else:
            self._feed(ev.TrieAsked(ask, address.region, msg.reply))

    def receive_answer(self, msg: Msg) -> None:
        """What this router had missed: deltas, or a part of the whole set."""
        source = self._sources.get(msg.subject.rpartition(".")[2])
        answer = self._read(msg)
        if not isinstance(answer, TrieDelta | TriePart):
            self._drop(msg, "no answer")
        elif source is None or source.origin != (answer.region, answer.router):
            self._drop(msg, "no answer to a request of ours")
        elif isinstance(answer, TriePart):
            self._feed(PART_SEEN[source.stream](answer))
        else:
            self._feed(DELTA_SEEN[source.stream](answer))

    def publish(self, effect: fx.PublishTrie) -> None:
        self._bus.publish(subjects.trie(self._config.region), wire.encode(effect.delta))

    def publish_to_siblings(self, effect: fx.PublishToSiblings) -> None:
        self._bus.publish(subjects.siblings(self._config.region), wire.encode(effect.delta))

    def answer(self, effect: fx.AnswerTrie) -> None:
        self._bus.publish(effect.inbox, wire.encode(effect.answer))

    def ask(self, effect: fx.AskTrie) -> None:
        origin = Origin(effect.region, RouterId(effect.ask.router))
        token = self._token(AskedStream(origin, effect.ask.stream))
        inbox = subjects.inbox(self._config.region, self._config.router, token)
        subject = subjects.snapshot(effect.region, self._config.region)
        self._bus.publish(subject, wire.encode(effect.ask), reply=inbox)

    def _token(self, source: AskedStream) -> str:
        token = self._tokens.get(source)
        if token is None:
            if len(self._tokens) >= ASKED_MAX:
                oldest = next(iter(self._tokens))
                del self._sources[self._tokens.pop(oldest)]
            token = self._tokens[source] = TRIE_PREFIX + secrets.token_hex(TOKEN_BYTES)
            self._sources[token] = source
        return token

    def _is_sibling(self, delta: TrieDelta) -> bool:
        """Not this router itself, whose own messages the bus brings too."""
        return delta.region == self._config.region and delta.router != self._config.router

    @staticmethod
    def _read(msg: Msg) -> object:
        if has_headers(msg):
            return None
        try:
            return wire.decode(msg.data)
        except wire.WireError as error:
            return error

    def _drop(self, msg: Msg, why: str) -> None:
        self._metrics.gossip_dropped.inc()
        self._log.warning("gossip", why, "gossip on %s dropped: %s", msg.subject, why)


GIVE_AGAIN = "the next order (mesh drain, undrain, routing) writes them again with what it changes"
NAMED_MAX = 16  # replicas, in a log line
FollowOrders = Callable[[int, RegionControl], None]


class OperatorOrders:
    """The last orders that operators gave for this region.

    A stream that was emptied, or put back to an older state, undoes no order: what holds is kept,
    and `is_lost`, until an operator gives the next one.
    """

    def __init__(self, region: RegionId, changed: Callable[[], None], follow: FollowOrders) -> None:
        """`changed` is called after new ones, `follow` with each record and its number."""
        self._region = region
        self._changed = changed
        self._follow = follow
        self._log = LimitedLog(log)
        self.seq = -1  # the number of the record; 0: there is none, -1: not read yet
        self._received = 0  # records that the stream sent by itself
        self._data = b""  # the record: a stream that was made anew gives its number again
        self.drained: tuple[str, ...] = ()
        self._given_at_unix_s = 0.0
        self.is_lost = False  # whether the stream has them no longer

    def receive(self, msg: Msg) -> None:
        """The stream has taken a record."""
        headers = msg.headers or {}
        number = headers.get(H_SEQUENCE, "")
        place = (subjects.STREAM_CONTROL, subjects.control(self._region))
        if (headers.get(H_STREAM), headers.get(H_SUBJECT)) != place or not _NUMBER.fullmatch(
            number
        ):
            self._log.warning("control", "sender", "%s: dropped, no stream's", msg.subject)
            return
        self._received += 1
        self.read(int(number), msg.data, is_given=True)

    def reading(self) -> Callable[[int, bytes], None]:
        """To be called before the stream's last record is requested: what takes it.

        If the stream sent a record meanwhile, the answer may be the one before: it is ignored.
        Their numbers would not tell: a stream that was made anew begins again.
        """
        received = self._received

        def take(seq: int, data: bytes) -> None:
            if self._received == received:
                self.read(seq, data)

        return take

    def read(self, seq: int, data: bytes, *, is_given: bool = False) -> None:
        """The last record of the stream; `seq` 0: it has none. `is_given`: it was written now."""
        if seq == self.seq and data == self._data:
            self.is_lost = False  # a backup was restored
            return
        try:
            orders = decode_control(data) if seq else nothing_ordered(self._region)
        except wire.WireError as error:
            text = "orders %d can't be read, those before hold: %.300s"
            self._log.warning("control", "unreadable", text, seq, error)
            return
        is_older = not seq or orders.at_unix_s < self._given_at_unix_s
        if self.seq > seq and is_older and not is_given:
            text = "the store of orders was lost: the stream has %s, those of number %d hold; %s"
            has = f"those of number {seq}, which are older" if seq else "none any more"
            if not self.is_lost:
                log.error(text, has, self.seq, GIVE_AGAIN)
            self.is_lost = True
            return
        drained = (exchange.ALL_REPLICAS,) if orders.all_drained else orders.drained
        if drained != self.drained:
            who = quoted_once(f"{orders.by}: {orders.reason}" if orders.reason else orders.by)
            named = ", ".join(drained[:NAMED_MAX]) or "nothing"
            more = f" and {len(drained) - NAMED_MAX} more" if len(drained) > NAMED_MAX else ""
            log.warning("drained by operators: %s%s (%s)", named, more, who)
        self.seq, self.drained, self._data = seq, drained, data
        self._given_at_unix_s, self.is_lost = orders.at_unix_s, False
        self._follow(seq, orders)
        self._changed()


AWAITED_MAX = 256
FAILED_WRITES_TOLD = 2  # in a row; one without an answer is awaited as long as a lease lasts
# nats-server 2.14 and later answer no write to a stream whose disk was full once, until they are
# started again; 2.12 refuses it, until there is room [tried: 2.12.7, 2.14.0, 2.15.1].
STREAM_SILENT = (
    "the region's streams take no writes; if the disk of its nats-server is full, make room there, "
    "then restart that nats-server; of three nats-servers two must run and reach each other"
)
ORDERS_LOST = f"the stream of operators' orders was lost, and they are kept here; {GIVE_AGAIN}"
# What the server adds to the stream's own messages, and to all others that it reads out of one.
H_SEQUENCE, H_STREAM, H_SUBJECT = "Nats-Sequence", "Nats-Stream", "Nats-Subject"
_NUMBER = re.compile(r"\d{1,18}$")


class LeaseClaims:
    """One router's. `receive…` is called by the bus, the rest performs effects."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        metrics: RouterMetrics,
        feed: Callable[[ev.Event], None],
        ownership: Ownership,
        beats: AdoptedHeartbeats,
        follow: FollowOrders,
    ) -> None:
        """`follow` takes operators' orders."""
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._feed = feed
        self._ownership = ownership
        self.next_within_s = exchange.ALIVE_S  # that keepalives say of the next one
        self.orders = OperatorOrders(config.region, self.publish_alive, follow)
        metrics.orders_lost.set_function(lambda: self.orders.is_lost)
        self._beats = beats
        self._log = LimitedLog(log)
        self._awaited: dict[str, int] = {}  # last token of an inbox → number of the claim
        self._home_claim = ""  # the token of the last one of this region
        self._failed_writes = 0  # of these in a row

    def receive(self, msg: Msg) -> None:
        """A stream has taken a write: perhaps a sibling's, after which this router writes none."""
        try:
            heard = read_lease(msg)
        except wire.WireError as error:
            self._drop(msg, "unreadable", error)
            return
        if heard.lease.region == self._config.region:
            self._failed_writes = 0
        self._feed(heard)

    def receive_answer(self, msg: Msg) -> None:
        """A stream's answer to a claim."""
        token = msg.subject.rpartition(".")[2]
        number = self._awaited.pop(token, None)
        if number is None:
            return
        event = ev.LeaseAnswered(number, granted=False, seq=None)
        if not is_no_responders(msg.headers):
            try:
                event = _answered(number, msg.data)
            except ValueError as error:
                self._drop(msg, "the answer can't be read", error)
        if token == self._home_claim:
            self._is_written(is_written=event.seq is not None)
        self._feed(event)

    def claim(self, effect: fx.ClaimLease) -> None:
        """Publish this write to the stream."""
        token = f"{LEASE_PREFIX}{effect.number}-{secrets.token_hex(TOKEN_BYTES)}"
        while len(self._awaited) >= AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]
        self._awaited[token] = effect.number
        if effect.lease.region == self._config.region:
            if self._home_claim in self._awaited and self._bus.is_connected:
                self._is_written(is_written=False)
            self._home_claim = token
        inbox = subjects.inbox(self._config.region, self._config.router, token)
        headers = {H_EXPECTED: str(effect.expected)}
        data = state.encode_state(effect.lease)
        self._bus.publish(subjects.lease(effect.lease.region), data, reply=inbox, headers=headers)

    def _is_written(self, *, is_written: bool) -> None:
        """Whether this region's stream took, or properly refused, the last write of its lease."""
        if is_written:
            self._failed_writes = 0
            return
        self._metrics.lease_writes_failed.inc()
        self._failed_writes += 1
        if (problem := self.problem) is not None:
            self._log.warning("lease", "not written", "%s", problem)

    @property
    def problem(self) -> str | None:
        """What is wrong with this region's streams, as far as a router sees it."""
        if self._failed_writes >= FAILED_WRITES_TOLD:
            return STREAM_SILENT
        return ORDERS_LOST if self.orders.is_lost else None

    def changed(self, effect: fx.OwnershipChanged) -> None:
        """Agents are informed at once."""
        if effect.region != self._config.region:
            verb = "adopted" if effect.owned else "handed back"
            log.warning("the replicas of region %s are %s", effect.region, verb)
        self.publish_alive()

    def subscribe_heartbeats(self, effect: fx.HearReplicas) -> None:
        """A region that is adopted, or was a moment ago, is listened to."""
        self._beats.want(effect.region, wanted=effect.wanted)

    def publish_alive(self) -> None:
        """The keepalive, with the regions that this router owns, and operators' orders."""
        owned = self._ownership.owned
        orders = self.orders
        keepalive = exchange.Alive(
            self._config.epoch,
            tuple(owned),
            tuple(owned.values()),
            orders.seq,
            orders.drained,
            self.next_within_s,
        )
        subject = subjects.alive(self._config.region, self._config.router)
        self._bus.publish(subject, wire.encode(keepalive))

    def _drop(self, msg: Msg, why: str, error: object = "") -> None:
        self._metrics.leases_dropped.inc()
        text = "lease on %s dropped: %s %.300s"
        self._log.warning("lease", why, text, msg.subject, why, error)


def read_lease(msg: Msg) -> ev.LeaseHeard:
    """A write that a stream has taken. Raises WireError for anything else."""
    headers = msg.headers or {}
    number = headers.get(H_SEQUENCE, "")
    lease = state.decode_lease(msg.data)
    place = (subjects.STREAM_LEASES, subjects.lease(lease.region))
    is_its_own = (headers.get(H_STREAM), headers.get(H_SUBJECT)) == place
    is_its_own = is_its_own and lease.region == subjects.owner(msg.subject)
    if not is_its_own or not _NUMBER.fullmatch(number):
        raise wire.WireError("no write of that region's stream")
    return ev.LeaseHeard(lease, int(number))


def _answered(number: int, data: bytes) -> ev.LeaseAnswered:
    """JetStream's acknowledgement. Raises ValueError for one that is neither yes nor no."""
    reply = orjson.loads(data)
    error = reply.get("error") if isinstance(reply, dict) else None
    if isinstance(error, dict) and error.get("err_code") == WRONG_LAST_SEQUENCE:
        last = _NUMBER.search(str(error.get("description")))
        if last is None:
            raise ValueError(f"no last sequence in {str(error)[:200]}")
        return ev.LeaseAnswered(number, granted=False, seq=int(last[0]))
    if error is not None or not isinstance(reply, dict) or type(reply.get("seq")) is not int:
        raise ValueError(f"not taken: {str(reply)[:200]}")
    return ev.LeaseAnswered(number, granted=True, seq=reply["seq"])


PING_S = 1.0


class Pings:
    """One router's. `run` until cancelled; `receive` what comes back."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        clock: Callable[[], float],
        feed: Callable[[ev.Event], None],
        guard: ReplyGuard,
    ) -> None:
        self._config = config
        self._bus = bus
        self._clock = clock
        self._feed = feed
        self._guard = guard
        self._open: dict[RegionId, tuple[bytes, float]] = {}  # its body, and when it left

    async def run(self) -> None:
        """One ping to each peer, and again."""
        while True:
            for peer in self._config.peers:
                self._send(peer)
            await asyncio.sleep(PING_S)

    def answer(self, msg: Msg) -> None:
        """A peer's ping: its few bytes go back to its ping inbox."""
        if len(msg.data) > PING_BYTES:
            self._guard.drop("ping", msg)
        elif self._guard.inbox("ping", msg) is not None:
            self._bus.publish(msg.reply, msg.data)

    def receive(self, token: str, data: bytes) -> None:
        """An answer; anything else is dropped. `token`: the last one of the inbox it came to."""
        peer = RegionId(token.removeprefix(PING_PREFIX))
        body, sent_at = self._open.get(peer, (b"", 0.0))
        if body and data == body:
            del self._open[peer]
            self._feed(ev.RttMeasured(peer, self._clock() - sent_at))

    def _send(self, peer: RegionId) -> None:
        if self._open.pop(peer, None) is not None:
            self._feed(ev.RttMeasured(peer, None))
        body = secrets.token_bytes(PING_BYTES)  # that nobody else can answer
        self._open[peer] = body, self._clock()
        inbox = subjects.inbox(self._config.region, self._config.router, PING_PREFIX + peer)
        self._bus.publish(subjects.ping(peer), body, reply=inbox)
