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

from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.gossip.budget import Budget
from mesh.core.gossip.mirror import Mirror
from mesh.core.gossip.news import News
from mesh.core.gossip.repairs import Repairs
from mesh.core.gossip.siblings import Siblings
from mesh.core.gossip.teller import Teller
from mesh.core.gossip.told import Origin, ToldPrefixes, ToldShelf
from mesh.core.gossip.told_by_siblings import ToldBySibling
from mesh.core.settings import RouterSettings
from schemas.gossip import SIBLINGS, TrieAnswer, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import REGION_ROUTERS_MAX, RegionId, RouterId

ORIGINS_MAX = 256
HEARD_BURST_S = 4.0
HEARD_LEFT_MIN = 0.25  # of the burst: an origin that has spent more is not asked yet


@dataclass(slots=True)
class Counts:
    """Since the start. Bytes as `schemas.gossip.size_bytes` counts them."""

    told_bytes: int = 0  # deltas, to each peer
    repair_bytes: Counter[RegionId] = field(default_factory=Counter)  # answers, to each
    heard_bytes: Counter[RegionId] = field(default_factory=Counter)  # from each
    limited: int = 0  # messages of those who told too much
    holes: int = 0  # questions asked
    snapshots: int = 0  # begun to be sent


@dataclass(slots=True)
class Ear:
    """One origin's stream, and what may still be heard of it."""

    mirror: Mirror
    budget: Budget


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
        self.told = ToldPrefixes()
        news = News(
            settings.trie_blocks_max, lambda blocks: self.told.untold(origin.region, blocks)
        )
        self.news = news if settings.trie_bytes_per_s else None  # None: nothing is told
        self.siblings = Siblings(origin, epoch, settings, effects, knows)
        self.counts = Counts()
        self._origin = origin
        self._ground = settings.ground
        self._effects = effects
        self._heard_bytes_per_s = float(settings.trie_heard_bytes_per_s)
        half_bytes_per_s = settings.trie_bytes_per_s / 2
        self._repairs = Repairs(half_bytes_per_s)
        self._teller = Teller(
            origin, epoch, news, trie_s=settings.trie_s, bytes_per_s=half_bytes_per_s
        )
        self._ears: dict[Origin, Ear] = {}
        self._routers: tuple[RouterId, ...] = (origin.router,)  # of this region, that live

    @property
    def routers(self) -> int:
        """Routers of this region that live, this one included."""
        return len(self._routers)

    def hear(self, delta: TrieDelta, now: float) -> None:
        """An origin's delta."""
        ear = self._ear(delta.region, delta.router)
        if ear is not None:
            listen = ear.mirror.hear if self._may_hear(ear, delta, now) else ear.mirror.miss
            listen(delta, now)

    def hear_part(self, part: TriePart, now: float) -> None:
        """A part of an origin's whole set."""
        ear = self._ear(part.region, part.router)
        if ear is not None and self._may_hear(ear, part, now):
            ear.mirror.hear_part(part, now)

    def asked(self, ask: TrieAsk, region: RegionId, inbox: str, now: float) -> None:
        """Somebody in that region has a hole in what he heard."""
        if ask.stream == SIBLINGS:
            if region == self._origin.region:
                self.siblings.asked(ask, inbox, now)
            return
        is_ours = ask.router == self._origin.router and self.news is not None
        if not is_ours or not self._may_know(region) or not self._repairs.has_room(inbox, region):
            return
        answers = self._teller.answer(ask)
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
            ev.TriePartSeen: lambda event, now: self.hear_part(event.part, now),
            ev.TrieAsked: lambda event, now: self.asked(event.ask, event.region, event.inbox, now),
            ev.SiblingSeen: lambda event, now: siblings.hear(event.delta, now),
            ev.SiblingPartSeen: lambda event, now: siblings.hear_part(event.part, now),
        }

    def tick(self, now: float) -> None:
        """Tell what is due, and ask."""
        self.siblings.tick(now)
        self._share(now)
        if self.news is not None:
            for delta in self._teller.due(now):
                self.counts.told_bytes += size_bytes(delta)
                self._effects.append(fx.PublishTrie(delta))
            for region, inbox, answer in self._repairs.due(now):
                self.counts.repair_bytes[region] += size_bytes(answer)
                self._effects.append(fx.AnswerTrie(inbox, answer))
        for origin, ear in list(self._ears.items()):
            if ear.mirror.is_gone(now):
                ear.mirror.forget()
                del self._ears[origin]
            elif ear.budget.left(now) >= self._heard_burst_bytes * HEARD_LEFT_MIN:
                self._ask(origin, ear.mirror.wants(now))

    @property
    def _heard_burst_bytes(self) -> float:
        return self._heard_bytes_per_s * HEARD_BURST_S

    def _ask(self, origin: Origin, ask: TrieAsk | None) -> None:
        if ask is not None:
            self.counts.holes += 1
            self._effects.append(fx.AskTrie(origin.region, ask))

    def _may_hear(self, ear: Ear, message: TrieAnswer, now: float) -> bool:
        size = size_bytes(message)
        self.counts.heard_bytes[RegionId(message.region)] += size
        if ear.budget.spend(size, now):
            return True
        self.counts.limited += 1
        return False

    def _share(self, now: float) -> None:
        """Who lives in this region tells, and each a part."""
        region, router = self._origin
        others = (
            origin.router
            for origin, ear in self._ears.items()
            if origin.region == region and not ear.mirror.is_silent(now)
        )
        routers = tuple(sorted((router, *others)))
        if routers != self._routers:
            self._routers = routers
            self._teller.share(len(routers))
            self._repairs.share(len(routers))

    def _heirs(self, gone: RouterId) -> tuple[int, int]:
        left = [router for router in self._routers if router != gone]
        return len(left), left.index(self._origin.router)

    def _ear(self, region: str, router: str) -> Ear | None:
        origin = Origin(RegionId(region), RouterId(router))
        known = self._ears.get(origin)
        if known is None and origin != self._origin and self._has_room(origin.region):
            mirror = Mirror(origin, self._shelf(origin))
            budget = Budget(self._heard_bytes_per_s, self._heard_burst_bytes)
            known = self._ears[origin] = Ear(mirror, budget)
        return known

    def _shelf(self, origin: Origin) -> ToldShelf:
        if origin.region != self._origin.region or self.news is None:
            return ToldShelf(self.told, origin)
        return ToldBySibling(self.told, origin, self.news, self._heirs, self.siblings.knows)

    def _has_room(self, region: RegionId) -> bool:
        if len(self._ears) >= ORIGINS_MAX:
            return False
        return sum(origin.region == region for origin in self._ears) < REGION_ROUTERS_MAX
