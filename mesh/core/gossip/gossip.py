"""Prefix gossip for the router core: receive deltas, publish them, request and answer repairs.

Of the bytes that a link may carry, half are for deltas, which go to all peers alike and so at the
pace of the slowest link, and half for answers to the region at its other end; the routers of a
region share both. With a budget of 0 nothing is published, but others' deltas are received. An
origin that sends more than its limit is ignored for a while; what is missing then is requested
later.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mesh.core.gossip.publisher import DeltaPublisher, OutgoingPrefixes
from mesh.core.gossip.remote_prefixes import (
    Origin,
    RemotePrefixes,
    RemotePrefixSet,
    SetOutcome,
)
from mesh.core.gossip.replica_names import named_in
from mesh.core.gossip.siblings import Siblings
from mesh.core.gossip.stream_receiver import Repairs, StreamReceiver
from mesh.core.model import effects as fx
from mesh.core.model.rates import ByteBudget
from mesh.core.model.settings import RouterSettings
from schemas.gossip import SIBLINGS, TrieAnswer, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import REGION_ROUTERS_MAX, RegionId, RouterId

ORIGINS_MAX = 256
LINK_SHARE = 1 / 16  # of what a link carries, at most
RECEIVED_BURST_S = 4.0
RECEIVED_LEFT_MIN = 0.25  # of the burst: an origin that has spent more gets no request yet


@dataclass(slots=True)
class GossipCounts:
    """Since the start. Bytes as `schemas.gossip.size_bytes` counts them."""

    sent_bytes: int = 0  # deltas, to each peer
    repair_bytes: Counter[RegionId] = field(default_factory=Counter)  # answers, to each
    received_bytes: Counter[RegionId] = field(default_factory=Counter)  # from each
    limited: int = 0  # messages of origins above their limit
    holes: int = 0  # repairs requested
    snapshots: int = 0  # begun to be sent


@dataclass(slots=True)
class OriginStream:
    """One origin's stream, and how much of it may be received."""

    receiver: StreamReceiver
    budget: ByteBudget


class SiblingPrefixSet(RemotePrefixSet):
    """A sibling's set, as published to peers. What it published need not be published here too.

    When a sibling is forgotten, the others publish what it had published, each a part of it. While
    it is only silent, what is used is published by the router that places it. Nothing else is
    published for it: prompts that it placed and did not publish may be secret.
    """

    def __init__(
        self,
        remote: RemotePrefixes,
        origin: Origin,
        outgoing: OutgoingPrefixes,
        heirs: Callable[[RouterId], tuple[int, int]],
        is_held: Callable[[int], bool],
    ) -> None:
        """`heirs`: of a router that is gone, how many there are and our place among them.
        `is_held`: whether a block is held here."""
        super().__init__(remote, origin)
        self._outgoing = outgoing
        self._heirs = heirs
        self._is_held = is_held

    def take(self, delta: TrieDelta, now: float) -> bool:
        self._published(delta.gained, delta)
        return super().take(delta, now)

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        for part in parts:
            self._published(part.blocks, part)
        return super().put(parts, asked_at, now)

    def _published(self, blocks: Sequence[int], message: TrieAnswer) -> None:
        self._outgoing.published_by_sibling(
            blocks, named_in(message.replicas, message.holders, len(blocks))
        )

    def forget(self) -> None:
        left = [*self._remote.blocks(self._origin)]
        super().forget()
        if left:
            count, place = self._heirs(self._origin.router)
            ours = [block for block in left if block % count == place and self._is_held(block)]
            self._outgoing.inherit(ours)


class Gossip:
    """One router's gossip with peers; with its siblings: `siblings`."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        settings: RouterSettings,
        emit: Callable[[fx.Effect], None],
        is_known: Callable[[str], bool] = lambda replica: True,
    ) -> None:
        """`is_known`: whether that is a replica of this region, or was until a while ago."""
        self.remote = RemotePrefixes()
        outgoing = OutgoingPrefixes(settings.trie_blocks_max)
        self.outgoing = outgoing if settings.trie_bytes_per_s else None  # None: not published
        self.siblings = Siblings(origin, epoch, settings, emit, is_known)
        self.counts = GossipCounts()
        self._origin = origin
        self._ground = settings.ground
        self._emit = emit
        self._received_bytes_per_s = float(settings.trie_heard_bytes_per_s)
        self._received_burst_bytes = self._received_bytes_per_s * RECEIVED_BURST_S
        most = settings.trie_bytes_per_s / 2
        half_shares = {peer: rate * LINK_SHARE / 2 for peer, rate in settings.links}
        self._repairs = Repairs(most, half_shares)
        half_bytes_per_s = min([most, *half_shares.values()])
        self._publisher = DeltaPublisher(
            origin, epoch, outgoing, trie_s=settings.trie_s, bytes_per_s=half_bytes_per_s
        )
        self._streams: dict[Origin, OriginStream] = {}
        self._routers: tuple[RouterId, ...] = (origin.router,)  # of this region, live ones

    @property
    def routers(self) -> int:
        """Live routers of this region, this one included."""
        return len(self._routers)

    def receive(self, delta: TrieDelta, now: float) -> None:
        stream = self._stream_of(delta.region, delta.router)
        if stream is not None:
            receiver = stream.receiver
            take = receiver.receive if self._may_receive(stream, delta, now) else receiver.miss
            take(delta, now)

    def receive_part(self, part: TriePart, now: float) -> None:
        stream = self._stream_of(part.region, part.router)
        if stream is not None and self._may_receive(stream, part, now):
            stream.receiver.receive_part(part, now)

    def asked(self, ask: TrieAsk, region: RegionId, inbox: str, now: float) -> None:
        """A router in that region has a gap in a stream of this one."""
        if ask.stream == SIBLINGS:
            if region == self._origin.region:
                self.siblings.asked(ask, inbox, now)
            return
        is_ours = ask.router == self._origin.router and self.outgoing is not None
        if not is_ours or not self._may_know(region) or not self._repairs.has_room(inbox, region):
            return
        answers = self._publisher.answer(ask)
        self.counts.snapshots += isinstance(answers[0], TriePart)
        self._repairs.put(inbox, region, answers)

    def _may_know(self, region: RegionId) -> bool:
        """Links let only these regions ask; this holds without a link's rules, too."""
        home = self._origin.region
        return region == home or self._ground.may_send(home, region)

    def tick(self, now: float, *, rests: bool = False) -> None:
        self.siblings.tick(now)
        self._share(now)
        if self.outgoing is not None:
            for delta in self._publisher.due(now, rests=rests):
                self.counts.sent_bytes += size_bytes(delta)
                self._emit(fx.PublishTrie(delta))
            for region, inbox, answer in self._repairs.due(now):
                self.counts.repair_bytes[region] += size_bytes(answer)
                self._emit(fx.AnswerTrie(inbox, answer))
        for origin, stream in list(self._streams.items()):
            if stream.receiver.is_gone(now):
                stream.receiver.forget()
                del self._streams[origin]
                continue
            has_budget = stream.budget.left(now) >= self._received_burst_bytes * RECEIVED_LEFT_MIN
            ask = stream.receiver.repair_request(now) if has_budget else None
            if ask is not None:
                self.counts.holes += 1
                self._emit(fx.AskTrie(origin.region, ask))

    def _may_receive(self, stream: OriginStream, message: TrieAnswer, now: float) -> bool:
        size = size_bytes(message)
        self.counts.received_bytes[RegionId(message.region)] += size
        if stream.budget.spend(size, now):
            return True
        self.counts.limited += 1
        return False

    def _share(self, now: float) -> None:
        """Divide the budgets among the live routers of this region."""
        region, router = self._origin
        others = (
            origin.router
            for origin, stream in self._streams.items()
            if origin.region == region and not stream.receiver.is_silent(now)
        )
        routers = tuple(sorted((router, *others)))
        if routers != self._routers:
            self._routers = routers
            self._publisher.share(len(routers))
            self._repairs.share(len(routers))

    def _heirs(self, gone: RouterId) -> tuple[int, int]:
        left = [router for router in self._routers if router != gone]
        return len(left), left.index(self._origin.router)

    def _stream_of(self, region: str, router: str) -> OriginStream | None:
        origin = Origin(RegionId(region), RouterId(router))
        known = self._streams.get(origin)
        if known is None and origin != self._origin and self._has_room(origin.region):
            receiver = StreamReceiver(origin, self._prefix_set(origin))
            budget = ByteBudget(self._received_bytes_per_s, self._received_burst_bytes)
            known = self._streams[origin] = OriginStream(receiver, budget)
        return known

    def _prefix_set(self, origin: Origin) -> RemotePrefixSet:
        home, outgoing = self._origin.region, self.outgoing
        if origin.region != home or outgoing is None:
            return RemotePrefixSet(self.remote, origin)
        outgoing.unpublished = partial(self.remote.not_announced, home)
        return SiblingPrefixSet(self.remote, origin, outgoing, self._heirs, self.siblings.is_held)

    def _has_room(self, region: RegionId) -> bool:
        if len(self._streams) >= ORIGINS_MAX:
            return False
        return sum(origin.region == region for origin in self._streams) < REGION_ROUTERS_MAX
