"""Routers of one region, which place on the same replicas: each hears what the others placed.

The stream is numbered like the one to peers, and its holes are mended in the same way. It stays on
the region's own bus, so it may say more: which replica, and at once. There is no leader: every
router tells what it placed itself, and whoever starts takes everything from one that is warm.

Whether a router that has started knows what its region's replicas hold.

It does when a sibling has told it all, or when there is nobody to ask: it is alone, or all routers
of the region have just started. Until then it serves as well as it can.

Rejected: taking a lone router's own set back from a peer. Peers were told what the region holds,
not which replica holds it, and a placement here needs the replica; nor do they hear that one was
restarted meanwhile. Its engines say by their answers soon enough what they have.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mesh.core.gossip.common_index import SharedIndex
from mesh.core.gossip.publisher import SiblingPublisher
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.gossip.stream_receiver import Repairs, StreamReceiver
from mesh.core.model import effects as fx
from mesh.core.model.settings import RouterSettings
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.gossip import SIBLINGS, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RouterId

ALONE_S = 1.5  # three signs of life of somebody else's would have come
ASK_S = 0.5
GIVE_UP_S = 10.0


class StateSync:
    """`tick` until `warm_at` is set."""

    def __init__(self) -> None:
        self.warm_at: float | None = None
        self.source: RouterId | None = None  # the sibling that told it all
        self._began_at: float | None = None
        self._asked_at = float("-inf")
        self._asked: list[RouterId] = []

    def synced_from(self, router: RouterId, now: float) -> None:
        """This sibling has."""
        if self.warm_at is None:
            self.warm_at, self.source = now, router

    def end(self, now: float) -> None:
        """There is nobody to ask."""
        if self.warm_at is None:
            self.warm_at = now

    def tick(self, siblings: Mapping[RouterId, bool], now: float) -> RouterId | None:
        """Whom to ask for everything now. `siblings`: those that live, and whether each is warm."""
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
BACK_S = 1.0  # on the bus again, until every sibling has said what may be missing


@dataclass(slots=True)
class Sibling:
    """Another router of the region."""

    receiver: StreamReceiver
    epoch: int
    is_warm: bool
    was_away: bool = False  # or we were


class Siblings:
    """One router's part in it. `join` at the start, `tick` at every tick, the rest as it comes."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        settings: RouterSettings,
        effects: list[fx.Effect],
        knows: Callable[[str], bool],
    ) -> None:
        """`knows`: whether that is a replica of ours."""
        self.sync = StateSync()
        self.sent_bytes = self.received_bytes = self.snapshots = self.holes = 0
        self._origin = origin
        self._epoch = epoch
        self._is_silent = settings.siblings_bytes_per_s == 0
        self._effects = effects
        self._common = SharedIndex(knows)
        self._placed = SiblingPublisher(origin, epoch, self._publish)
        self._repairs = Repairs(settings.siblings_bytes_per_s)
        self._siblings: dict[RouterId, Sibling] = {}
        self._announced_at = self._now = self._back_at = float("-inf")

    def join(self, index: PrefixIndex[str]) -> None:
        """This index is kept in common. Of the first one it is said what comes to be there."""
        if self._is_silent:
            return
        if not self._common.indexes:
            index.listener = self._placed
        self._common.indexes.append(index)

    @property
    def indexes(self) -> Sequence[PrefixIndex[str]]:
        """Those that are kept in common, of the policy that speaks first."""
        return self._common.indexes

    @property
    def doubted(self) -> int:
        """Those whose stream has a hole."""
        return sum(not sibling.receiver.is_whole for sibling in self._siblings.values())

    def knows(self, block: int) -> bool:
        """Whether some replica is believed to hold it."""
        return any(block in index for index in self._common.indexes[:1])

    def hear(self, delta: TrieDelta, now: float) -> None:
        """A sibling's delta."""
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
        known.receiver.hear(delta, now)
        if starts_anew and misses_some:
            known.receiver.want_all(now)  # it learns again what it had said, and so do we

    def receive_part(self, part: TriePart, now: float) -> None:
        """A part of all that a sibling knows."""
        known = self._siblings.get(RouterId(part.router))
        if known is not None:
            self.received_bytes += size_bytes(part)
            is_all = known.receiver.receive_part(part, now)
            if is_all and self.sync.warm_at is None:
                self.sync.synced_from(RouterId(part.router), now)
                self._doubt_the_cold(now)

    def asked(self, ask: TrieAsk, inbox: str, now: float) -> None:
        """A sibling has a hole in what it heard, or starts."""
        is_ours = ask.router == self._origin.router and not self._is_silent
        if not is_ours or not self._repairs.has_room(inbox, self._origin.region):
            return
        about = self._placed.since(ask.after) if ask.epoch == self._epoch else None
        if about is None and not self._can_tell_all(ask.asker, now):
            return  # the asker tries another, or again
        self.snapshots += about is None
        self._repairs.put(inbox, self._origin.region, self._snapshot(about, now))

    def bus_returned(self) -> None:
        """Nothing was heard meanwhile: siblings that start anew now may have said something."""
        self._back_at = self._now
        for sibling in self._siblings.values():
            sibling.was_away = True

    def _can_tell_all(self, asker: str, now: float) -> bool:
        """Whether that helps: who is warm asks everybody, who is cold believes that it was all."""
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
        """Say that we live, answer, and ask."""
        self._now = now
        self._placed.tick(now)
        self._common.expire(now)
        if self._is_silent:
            self.sync.end(now)
            return
        if now - self._announced_at >= ALIVE_S:
            self._publish(self._placed.sign(self._is_warm(now)))
            self._announced_at = now
        for _, inbox, answer in self._repairs.due(now):
            self.sent_bytes += size_bytes(answer)
            self._effects.append(fx.AnswerTrie(inbox, answer))
        for router, sibling in list(self._siblings.items()):
            if sibling.receiver.is_gone(now):
                del self._siblings[router]
            elif self.sync.warm_at is not None:
                self._ask(sibling.receiver.wants(now))
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
            mirror = self._siblings[router].receiver
            mirror.want_all(now)
            self._ask(mirror.question(now))
        elif self.sync.warm_at is not None:
            self._doubt_the_cold(now)

    def _doubt_the_cold(self, now: float) -> None:
        """Who has just started, or come back, may have placed what nobody else knows of."""
        for sibling in self._siblings.values():
            if not sibling.is_warm:
                sibling.receiver.want_all(now)

    def _meet(self, router: RouterId, delta: TrieDelta, now: float) -> None:
        mirror = StreamReceiver(Origin(self._origin.region, router), self._common, SIBLINGS)
        self._siblings[router] = Sibling(mirror, delta.epoch, not delta.is_cold)
        is_warm = self.sync.warm_at is not None
        if is_warm and delta.is_cold:
            mirror.hear(delta, now)
            return
        # Who is cold takes everything from one sibling, not from each what it has said so far.
        mirror.join(delta, now)
        if is_warm:
            mirror.want_all(now)  # we thought that we were alone

    def _ask(self, ask: TrieAsk | None) -> None:
        if ask is not None:
            self.holes += 1
            ask = replace(ask, asker=self._origin.router)
            self._effects.append(fx.AskTrie(self._origin.region, ask))

    def _snapshot(self, about: Collection[str] | None, now: float) -> list[TriePart]:
        region, router = self._origin
        parts = self._common.parts(about, now) or [("", now, (), None)]
        return [
            TriePart(
                region,
                router,
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
            return  # nobody to tell: who comes later asks for everything
        self.sent_bytes += size_bytes(delta)
        self._effects.append(fx.PublishToSiblings(delta))
