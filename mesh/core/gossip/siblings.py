"""Routers of one region, which place on the same replicas: each receives what the others placed.

A sibling's placements are entered as if they had been made here, so all routers of a region keep
one index (`SharedIndex`), of what all of them placed, evicted in one order. A sibling may name a
replica before this router receives its heartbeat, or after it was handed back, so any name is
entered, and dropped if its replica stays unknown. Times are those of arrival; no clocks are
compared.

The stream is numbered and repaired like the one to peers. It stays on the region's own bus, so it
names the replica, and is sent with the router's next event. There is no leader: every router
publishes what it placed itself, and a router that starts gets everything from a sibling that is
*warm*: one that has the whole index, or that found no sibling to ask when it started (`StateSync`).
Until then a router serves as well as it can.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mesh.core.gossip.publisher import SiblingPublisher
from mesh.core.gossip.remote_prefixes import Origin, SetOutcome
from mesh.core.gossip.stream_receiver import Repairs, StreamReceiver
from mesh.core.model import effects as fx
from mesh.core.model.settings import RouterSettings
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.gossip import (
    DELTA_BLOCKS_MAX,
    SIBLING_PARTS_MAX,
    SIBLINGS,
    TrieAsk,
    TrieDelta,
    TriePart,
    size_bytes,
)
from schemas.ids import RouterId

REPLICAS_MAX = 4096
SKEW_S = 0.1  # a placement reaches a sibling so much later
UNKNOWN_S = 30.0  # a replica without heartbeats for so long is dropped
SWEEP_S = 1.0
SPAN_S = 1.0  # placements within this time have one age in a snapshot


class SharedIndex:
    """The prefix indexes that a region's routers keep in common; all siblings' `PrefixSet`."""

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        """`is_known`: whether that is a replica of this region, or was until a while ago."""
        self.indexes: list[PrefixIndex[str]] = []  # the first is the one that is published
        self._is_known = is_known
        self._unknown: dict[str, float] = {}  # replicas, since when
        self._swept_at = float("-inf")

    def expire(self, now: float) -> None:
        """Drop unknown replicas: they were handed back, or a sibling invents them."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        owners = {owner for index in self.indexes for owner in index.owners}
        unknown = (owner for owner in owners if not self._is_known(owner))
        self._unknown = {owner: self._unknown.get(owner, now) for owner in unknown}
        for owner, since in self._unknown.items():
            if now - since >= UNKNOWN_S:
                for index in self.indexes:
                    index.forget(owner)

    def take(self, delta: TrieDelta, now: float) -> bool:
        for index in self.indexes:
            if not self._has_room(index, delta.replica):
                continue
            if delta.missed_ms >= 0:
                index.leave_until(delta.replica, now - delta.missed_ms / 1000 + SKEW_S)
            index.remove(delta.replica, delta.lost)
            if delta.gained:
                index.enter(delta.replica, delta.gained, now)
        return True

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        """A sibling's whole index: what is younger here stays.

        A replica that was restarted since the request is left out: the sibling may have sent its
        blocks before it knew.
        """
        put = SetOutcome.TAKEN
        for index in self.indexes:
            for replica, replica_parts in groupby(parts, lambda part: part.replica):
                missed_at = index.missed_at(replica)
                if missed_at is not None and missed_at >= asked_at - SKEW_S:
                    put = SetOutcome.IN_PART
                elif self._has_room(index, replica):
                    _merge(index, replica, tuple(replica_parts), now)
        return put

    def trust(self, whole: bool) -> None:
        """A gap changes nothing: what was placed there is held there."""

    def forget(self) -> None:
        """A sibling that starts anew removes nothing."""

    def parts(
        self, about: Collection[str] | None, now: float
    ) -> list[tuple[str, float, tuple[int, ...], float | None]]:
        """Replica, time, blocks, and up to when all was evicted: in as many parts as allowed.

        `about`: these replicas; None: all.
        """
        if not self.indexes:
            return []
        index, span_s = self.indexes[0], SPAN_S
        while True:
            parts = [
                (replica, at, blocks, index.missed_at(replica))
                for replica in index.owners
                if about is None or replica in about
                for at, blocks in _runs(index.held(replica), span_s)
            ]
            if len(parts) <= SIBLING_PARTS_MAX or span_s > now:
                return parts[-SIBLING_PARTS_MAX:]
            span_s *= 4.0

    @staticmethod
    def _has_room(index: PrefixIndex[str], replica: str) -> bool:
        known = index.owners
        return bool(replica) and (replica in known or len(known) < REPLICAS_MAX)


def _merge(index: PrefixIndex[str], replica: str, parts: Sequence[TriePart], now: float) -> None:
    oldest = parts[0]
    if oldest.missed_ms >= 0:  # before the oldest block, however often both were passed on
        index.leave_until(replica, now - max(oldest.missed_ms, oldest.age_ms + 1) / 1000)
    held = [(block, now - part.age_ms / 1000) for part in parts for block in part.blocks]
    index.merge(replica, held)


def _runs(
    held: Sequence[tuple[int, float]], span_s: float
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Blocks of about one age together, the oldest first; each with the age of its oldest."""
    start = 0
    for end in range(1, len(held) + 1):
        is_last = end == len(held)
        if is_last or held[end][1] - held[start][1] > span_s or end - start == DELTA_BLOCKS_MAX:
            yield held[start][1], tuple(block for block, _ in held[start:end])
            start = end


ALONE_S = 1.5  # three keepalives of a sibling would have arrived
ASK_S = 0.5
GIVE_UP_S = 10.0


class StateSync:
    """How a router that starts gets its siblings' index; `tick` until `warm_at` is set."""

    def __init__(self) -> None:
        self.warm_at: float | None = None
        self.source: RouterId | None = None  # the sibling that sent all
        self._began_at: float | None = None
        self._asked_at = float("-inf")
        self._asked: list[RouterId] = []

    def synced_from(self, router: RouterId, now: float) -> None:
        """This sibling has sent all."""
        if self.warm_at is None:
            self.warm_at, self.source = now, router

    def end(self, now: float) -> None:
        if self.warm_at is None:
            self.warm_at = now

    def tick(self, siblings: Mapping[RouterId, bool], now: float) -> RouterId | None:
        """The sibling to ask for all now. `siblings`: live ones, and whether each is warm."""
        if self._began_at is None:
            self._began_at = now
        since_s = now - self._began_at
        warm = [router for router, is_warm in siblings.items() if is_warm]
        if since_s >= (GIVE_UP_S if warm else ALONE_S):
            self.end(now)
            return None
        if not warm or now - self._asked_at < ASK_S:
            return None
        self._asked_at = now
        choice = min(warm, key=lambda router: (self._asked.count(router), router))
        self._asked.append(choice)
        return choice


SIBLINGS_MAX = 64
ALIVE_S = 0.5
BACK_S = 1.0  # after the bus returns, until every sibling has sent a keepalive


@dataclass(slots=True)
class Sibling:
    """Another router of the region."""

    receiver: StreamReceiver
    epoch: int
    is_warm: bool
    was_away: bool = False  # from the bus, or this router was


class Siblings:
    """One router's view of its siblings."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        settings: RouterSettings,
        emit: Callable[[fx.Effect], None],
        is_known: Callable[[str], bool],
    ) -> None:
        """`is_known`: whether that is a replica of this region, or was until a while ago."""
        self.sync = StateSync()
        self.sent_bytes = self.received_bytes = self.snapshots = self.holes = 0
        self._origin = origin
        self._epoch = epoch
        self._is_silent = settings.siblings_bytes_per_s == 0
        self._emit = emit
        self._common = SharedIndex(is_known)
        self._placed = SiblingPublisher(origin, epoch, self._publish)
        self._repairs = Repairs(settings.siblings_bytes_per_s)
        self._siblings: dict[RouterId, Sibling] = {}
        self._keepalive_at = self._now = self._back_at = float("-inf")

    def join(self, index: PrefixIndex[str]) -> None:
        """Keep this index in common; the first one's changes are published."""
        if self._is_silent:
            return
        if not self._common.indexes:
            index.listener = self._placed
        self._common.indexes.append(index)

    def leave_all(self) -> None:
        """Keep no index in common: others will join."""
        for index in self._common.indexes:
            index.listener = None
        self._common.indexes.clear()

    @property
    def indexes(self) -> Sequence[PrefixIndex[str]]:
        return self._common.indexes

    @property
    def with_gaps(self) -> int:
        """Siblings whose stream has a gap."""
        return sum(not sibling.receiver.is_whole for sibling in self._siblings.values())

    def is_held(self, block: int) -> bool:
        """Whether some replica is estimated to hold it."""
        return any(block in index for index in self._common.indexes[:1])

    def receive(self, delta: TrieDelta, now: float) -> None:
        router = RouterId(delta.router)
        if router == self._origin.router:
            return
        self.received_bytes += size_bytes(delta)
        known = self._siblings.get(router)
        if known is None:
            if len(self._siblings) < SIBLINGS_MAX:
                self._meet(router, delta, now)
            return
        starts_anew = delta.epoch > known.epoch
        misses_some = known.was_away or not known.receiver.is_whole
        known.epoch, known.was_away = max(delta.epoch, known.epoch), False
        known.is_warm = not delta.is_cold
        known.receiver.receive(delta, now)
        if starts_anew and misses_some:
            known.receiver.request_all(now)  # it learns again what it had published

    def receive_part(self, part: TriePart, now: float) -> None:
        known = self._siblings.get(RouterId(part.router))
        if known is not None:
            self.received_bytes += size_bytes(part)
            is_all = known.receiver.receive_part(part, now)
            if is_all and self.sync.warm_at is None:
                self.sync.synced_from(RouterId(part.router), now)
                self._request_from_cold(now)

    def asked(self, ask: TrieAsk, inbox: str, now: float) -> None:
        """A sibling has a gap in this router's stream, or starts."""
        is_ours = ask.router == self._origin.router and not self._is_silent
        if not is_ours or not self._repairs.has_room(inbox, self._origin.region):
            return
        about = self._placed.since(ask.after) if ask.epoch == self._epoch else None
        if about is None and not self._has_all(ask.asker, now):
            return  # the asker tries another, or again
        self.snapshots += about is None
        self._repairs.put(inbox, self._origin.region, self._snapshot(about, now))

    def bus_returned(self) -> None:
        """Nothing was received meanwhile: siblings that start anew now may have published."""
        self._back_at = self._now
        for sibling in self._siblings.values():
            sibling.was_away = True

    def _has_all(self, asker: str, now: float) -> bool:
        """Whether to send all: warm routers ask every sibling, cold ones take it as complete."""
        known = self._siblings.get(RouterId(asker))
        if known is not None and known.is_warm and self.sync.warm_at is not None:
            return True
        return self._is_warm(now) and not any(
            not sibling.receiver.is_whole and not sibling.receiver.is_silent(now)
            for router, sibling in self._siblings.items()
            if router != asker
        )

    def _is_warm(self, now: float) -> bool:
        return self.sync.warm_at is not None and now - self._back_at >= BACK_S

    def tick(self, now: float) -> None:
        """Publish a keepalive, answer requests, and request what is missing."""
        self._now = now
        self._placed.now = now
        self._common.expire(now)
        if self._is_silent:
            self.sync.end(now)
            return
        if now - self._keepalive_at >= ALIVE_S:
            self._publish(self._placed.sign(self._is_warm(now)))
            self._keepalive_at = now
        for _, inbox, answer in self._repairs.due(now):
            self.sent_bytes += size_bytes(answer)
            self._emit(fx.AnswerTrie(inbox, answer))
        for router, sibling in list(self._siblings.items()):
            if sibling.receiver.is_gone(now):
                del self._siblings[router]
            elif self.sync.warm_at is not None:
                self._ask(sibling.receiver.repair_request(now))
        if self.sync.warm_at is None:
            self._warm(now)

    def _warm(self, now: float) -> None:
        warm = {
            router: sibling.is_warm
            for router, sibling in self._siblings.items()
            if not sibling.receiver.is_silent(now)
        }
        router = self.sync.tick(warm, now)
        if router is not None:
            receiver = self._siblings[router].receiver
            receiver.request_all(now)
            self._ask(receiver.request(now))
        elif self.sync.warm_at is not None:
            self._request_from_cold(now)

    def _request_from_cold(self, now: float) -> None:
        """A sibling that has just started, or returned, may have placed prompts unknown here."""
        for sibling in self._siblings.values():
            if not sibling.is_warm:
                sibling.receiver.request_all(now)

    def _meet(self, router: RouterId, delta: TrieDelta, now: float) -> None:
        receiver = StreamReceiver(Origin(self._origin.region, router), self._common, SIBLINGS)
        self._siblings[router] = Sibling(receiver, delta.epoch, not delta.is_cold)
        is_warm = self.sync.warm_at is not None
        if is_warm and delta.is_cold:
            receiver.receive(delta, now)
            return
        # A cold router takes everything from one sibling, not from each what it has published.
        receiver.join(delta, now)
        if is_warm:
            receiver.request_all(now)  # this router thought that it was alone

    def _ask(self, ask: TrieAsk | None) -> None:
        if ask is not None:
            self.holes += 1
            ask = replace(ask, asker=self._origin.router)
            self._emit(fx.AskTrie(self._origin.region, ask))

    def _snapshot(self, about: Collection[str] | None, now: float) -> list[TriePart]:
        parts = self._common.parts(about, now) or [("", now, (), None)]
        return [
            TriePart(
                *self._origin,
                self._epoch,
                self._placed.seq,
                number,
                len(parts),
                blocks,
                replica,
                round((now - at) * 1000),
                -1 if missed_at is None else round((now - missed_at) * 1000),
                is_all=int(about is None),
            )
            for number, (replica, at, blocks, missed_at) in enumerate(parts)
        ]

    def _publish(self, delta: TrieDelta) -> None:
        if not self._siblings and not delta.is_sign:
            return  # a sibling that comes later requests everything
        self.sent_bytes += size_bytes(delta)
        self._emit(fx.PublishToSiblings(delta))
