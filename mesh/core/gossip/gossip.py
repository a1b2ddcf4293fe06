"""What the router core has to do with gossip: hear, tell, ask, answer.

Of the bytes that a link may carry, half are for deltas, which go to all peers alike, and half for
answers to the region at its other end; the routers of a region share both. With a budget of 0
nothing is told, but others are heard. Whoever tells more than may be heard of one origin is not
listened to for a while: what it says then is missing, so it is doubted, and asked later.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mesh.core.gossip.outgoing_prefixes import OutgoingPrefixes
from mesh.core.gossip.publisher import DeltaPublisher
from mesh.core.gossip.remote_prefixes import (
    Origin,
    RemotePrefixes,
    RemotePrefixSet,
    SiblingPrefixSet,
)
from mesh.core.gossip.siblings import Siblings
from mesh.core.gossip.stream_receiver import Repairs, StreamReceiver
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.rates import ByteBudget
from mesh.core.model.settings import RouterSettings
from schemas.gossip import SIBLINGS, TrieAnswer, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import REGION_ROUTERS_MAX, RegionId, RouterId

ORIGINS_MAX = 256
HEARD_BURST_S = 4.0
HEARD_LEFT_MIN = 0.25  # of the burst: an origin that has spent more is not asked yet


@dataclass(slots=True)
class GossipCounts:
    """Since the start. Bytes as `schemas.gossip.size_bytes` counts them."""

    sent_bytes: int = 0  # deltas, to each peer
    repair_bytes: Counter[RegionId] = field(default_factory=Counter)  # answers, to each
    received_bytes: Counter[RegionId] = field(default_factory=Counter)  # from each
    limited: int = 0  # messages of those who told too much
    holes: int = 0  # questions asked
    snapshots: int = 0  # begun to be sent


@dataclass(slots=True)
class OriginStream:
    """One origin's stream, and what may still be heard of it."""

    receiver: StreamReceiver
    budget: ByteBudget


class Gossip:
    """One router's. `tick` at every tick; the rest as it comes."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        settings: RouterSettings,
        effects: list[fx.Effect],
        knows: Callable[[str], bool] = lambda replica: True,
    ) -> None:
        """`knows`: whether that is a replica of ours, be it lost for a while."""
        self.remote = RemotePrefixes()
        news = OutgoingPrefixes(
            settings.trie_blocks_max,
            lambda blocks: self.remote.not_announced(origin.region, blocks),
        )
        self.outgoing = news if settings.trie_bytes_per_s else None  # None: nothing is told
        self.siblings = Siblings(origin, epoch, settings, effects, knows)
        self.counts = GossipCounts()
        self._origin = origin
        self._ground = settings.ground
        self._effects = effects
        self._heard_bytes_per_s = float(settings.trie_heard_bytes_per_s)
        half_bytes_per_s = settings.trie_bytes_per_s / 2
        self._repairs = Repairs(half_bytes_per_s)
        self._publisher = DeltaPublisher(
            origin, epoch, news, trie_s=settings.trie_s, bytes_per_s=half_bytes_per_s
        )
        self._streams: dict[Origin, OriginStream] = {}
        self._routers: tuple[RouterId, ...] = (origin.router,)  # of this region, that live

    @property
    def routers(self) -> int:
        """Routers of this region that live, this one included."""
        return len(self._routers)

    def hear(self, delta: TrieDelta, now: float) -> None:
        """An origin's delta."""
        ear = self._stream_of(delta.region, delta.router)
        if ear is not None:
            listen = ear.receiver.hear if self._may_receive(ear, delta, now) else ear.receiver.miss
            listen(delta, now)

    def receive_part(self, part: TriePart, now: float) -> None:
        """A part of an origin's whole set."""
        ear = self._stream_of(part.region, part.router)
        if ear is not None and self._may_receive(ear, part, now):
            ear.receiver.receive_part(part, now)

    def asked(self, ask: TrieAsk, region: RegionId, inbox: str, now: float) -> None:
        """Somebody in that region has a hole in what he heard."""
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
        """Its link would not let the others ask; this holds without a link's rules, too."""
        home = self._origin.region
        return region == home or self._ground.may_send(home, region)

    def handlers(self) -> dict[type, Callable[[Any, float], None]]:
        """Who hears which event, for the router's table."""
        siblings = self.siblings
        return {
            ev.TrieSeen: lambda event, now: self.hear(event.delta, now),
            ev.TriePartSeen: lambda event, now: self.receive_part(event.part, now),
            ev.TrieAsked: lambda event, now: self.asked(event.ask, event.region, event.inbox, now),
            ev.SiblingSeen: lambda event, now: siblings.hear(event.delta, now),
            ev.SiblingPartSeen: lambda event, now: siblings.receive_part(event.part, now),
        }

    def tick(self, now: float) -> None:
        """Tell what is due, and ask."""
        self.siblings.tick(now)
        self._share(now)
        if self.outgoing is not None:
            for delta in self._publisher.due(now):
                self.counts.sent_bytes += size_bytes(delta)
                self._effects.append(fx.PublishTrie(delta))
            for region, inbox, answer in self._repairs.due(now):
                self.counts.repair_bytes[region] += size_bytes(answer)
                self._effects.append(fx.AnswerTrie(inbox, answer))
        for origin, ear in list(self._streams.items()):
            if ear.receiver.is_gone(now):
                ear.receiver.forget()
                del self._streams[origin]
            elif ear.budget.left(now) >= self._received_burst_bytes * HEARD_LEFT_MIN:
                self._ask(origin, ear.receiver.wants(now))

    @property
    def _received_burst_bytes(self) -> float:
        return self._heard_bytes_per_s * HEARD_BURST_S

    def _ask(self, origin: Origin, ask: TrieAsk | None) -> None:
        if ask is not None:
            self.counts.holes += 1
            self._effects.append(fx.AskTrie(origin.region, ask))

    def _may_receive(self, ear: OriginStream, message: TrieAnswer, now: float) -> bool:
        size = size_bytes(message)
        self.counts.received_bytes[RegionId(message.region)] += size
        if ear.budget.spend(size, now):
            return True
        self.counts.limited += 1
        return False

    def _share(self, now: float) -> None:
        """Who lives in this region tells, and each a part."""
        region, router = self._origin
        others = (
            origin.router
            for origin, ear in self._streams.items()
            if origin.region == region and not ear.receiver.is_silent(now)
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
            mirror = StreamReceiver(origin, self._shelf(origin))
            budget = ByteBudget(self._heard_bytes_per_s, self._received_burst_bytes)
            known = self._streams[origin] = OriginStream(mirror, budget)
        return known

    def _shelf(self, origin: Origin) -> RemotePrefixSet:
        if origin.region != self._origin.region or self.outgoing is None:
            return RemotePrefixSet(self.remote, origin)
        return SiblingPrefixSet(
            self.remote, origin, self.outgoing, self._heirs, self.siblings.knows
        )

    def _has_room(self, region: RegionId) -> bool:
        if len(self._streams) >= ORIGINS_MAX:
            return False
        return sum(origin.region == region for origin in self._streams) < REGION_ROUTERS_MAX
