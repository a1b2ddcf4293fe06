"""What the router core has to do with gossip: hear, tell, ask, answer.

Of the bytes that a link may carry, half are for deltas, which go to all peers alike, and half for
answers to the region at its other end. With a budget of 0 nothing is told, but others are heard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.gossip.mirror import Mirror
from mesh.core.gossip.news import News
from mesh.core.gossip.repairs import Repairs
from mesh.core.gossip.teller import Teller
from mesh.core.gossip.told import Origin, ToldPrefixes
from mesh.core.settings import RouterSettings
from schemas.gossip import TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RegionId, RouterId

ORIGINS_MAX = 256
REGION_ORIGINS_MAX = 8  # routers of one region: whoever invents names takes no place of others


@dataclass(slots=True)
class Counts:
    """Since the start. Bytes as `schemas.gossip.size_bytes` counts them."""

    told_bytes: int = 0  # deltas, to each peer
    repair_bytes: int = 0  # answers, to all peers together
    heard_bytes: int = 0
    holes: int = 0  # questions asked
    snapshots: int = 0  # begun to be sent


class Gossip:
    """One router's. `tick` at every tick; the rest as it comes."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        settings: RouterSettings,
        effects: list[fx.Effect],
    ) -> None:
        self.told = ToldPrefixes()
        news = News(settings.trie_blocks_max)
        self.news = news if settings.trie_bytes_per_s else None  # None: nothing is told
        self.counts = Counts()
        self._origin = origin
        self._effects = effects
        half_bytes_per_s = settings.trie_bytes_per_s / 2
        self._repairs = Repairs(half_bytes_per_s)
        self._teller = Teller(
            origin, epoch, news, trie_s=settings.trie_s, bytes_per_s=half_bytes_per_s
        )
        self._mirrors: dict[Origin, Mirror] = {}

    def hear(self, delta: TrieDelta, now: float) -> None:
        """An origin's delta."""
        mirror = self._mirror(delta.region, delta.router)
        if mirror is not None:
            self.counts.heard_bytes += size_bytes(delta)
            mirror.hear(delta, now)

    def hear_part(self, part: TriePart, now: float) -> None:
        """A part of an origin's whole set."""
        mirror = self._mirror(part.region, part.router)
        if mirror is not None:
            self.counts.heard_bytes += size_bytes(part)
            mirror.hear_part(part, now)

    def asked(self, ask: TrieAsk, region: RegionId, inbox: str) -> None:
        """Somebody in that region has a hole in what he heard."""
        is_ours = ask.router == self._origin.router and self.news is not None
        if not is_ours or not self._repairs.has_room(inbox, region):
            return
        answers = self._teller.answer(ask)
        self.counts.snapshots += isinstance(answers[0], TriePart)
        self._repairs.put(inbox, region, answers)

    def handlers(self) -> dict[type, Callable[[Any, float], None]]:
        """Who hears which event, for the router's table."""
        return {
            ev.TrieSeen: lambda event, now: self.hear(event.delta, now),
            ev.TriePartSeen: lambda event, now: self.hear_part(event.part, now),
            ev.TrieAsked: lambda event, now: self.asked(event.ask, event.region, event.inbox),
        }

    def tick(self, now: float) -> None:
        """Tell what is due, and ask."""
        if self.news is not None:
            for delta in self._teller.due(now):
                self.counts.told_bytes += size_bytes(delta)
                self._effects.append(fx.PublishTrie(delta))
            for inbox, answer in self._repairs.due(now):
                self.counts.repair_bytes += size_bytes(answer)
                self._effects.append(fx.AnswerTrie(inbox, answer))
        for origin, mirror in list(self._mirrors.items()):
            if mirror.is_gone(now):
                self.told.forget(origin)
                del self._mirrors[origin]
            elif (ask := mirror.wants(now)) is not None:
                self.counts.holes += 1
                self._effects.append(fx.AskTrie(origin.region, ask))

    def _mirror(self, region: str, router: str) -> Mirror | None:
        origin = Origin(RegionId(region), RouterId(router))
        known = self._mirrors.get(origin)
        if known is None and origin != self._origin and self._has_room(origin.region):
            known = self._mirrors[origin] = Mirror(origin, self.told)
        return known

    def _has_room(self, region: RegionId) -> bool:
        if len(self._mirrors) >= ORIGINS_MAX:
            return False
        return sum(origin.region == region for origin in self._mirrors) < REGION_ORIGINS_MAX
