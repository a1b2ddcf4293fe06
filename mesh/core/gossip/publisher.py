"""The stream of deltas that one router tells of its set, and what it says to those who ask.

A delta every `trie_s` while there is news, as large as the budget allows; with nothing to tell, a
sign every SIGN_S that repeats the last number. Who asks gets the missing deltas, as far as they
are kept and take less than the whole set would, and else the set.

Rejected: a Merkle tree over the set, as replicated stores have it. Streams are in order and whole
nearly always, so the number of the last delta finds every difference at no cost; what a tree would
save of a rare snapshot of 150 kB it would spend on hashing every change.

The last deltas that a router told, to be said again to those who missed some.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from mesh.core.gossip.outgoing_prefixes import OutgoingPrefixes
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model.rates import ByteBudget
from schemas.gossip import (
    BLOCK_BYTES,
    DELTA_BLOCKS_MAX,
    MESSAGE_BYTES,
    PART_BLOCKS_MAX,
    TrieAnswer,
    TrieAsk,
    TrieDelta,
    TriePart,
    size_bytes,
)


class DeltaLog:
    """The newest so many, of so many blocks together."""

    def __init__(self, deltas_max: int, blocks_max: int) -> None:
        self._deltas_max = deltas_max
        self._blocks_max = blocks_max
        self._deltas: deque[TrieDelta] = deque()
        self._blocks = 0

    def keep(self, delta: TrieDelta) -> None:
        """The next one, in order."""
        self._deltas.append(delta)
        self._blocks += _blocks(delta)
        while len(self._deltas) > self._deltas_max or self._blocks > self._blocks_max:
            self._blocks -= _blocks(self._deltas.popleft())

    def since(self, after: int, seq: int) -> Sequence[TrieDelta] | None:
        """Those after number `after` up to the last one, `seq`; None if one is kept no more."""
        if not 0 <= after <= seq:
            return None
        missing = [delta for delta in self._deltas if delta.seq > after]
        return missing if len(missing) == seq - after else None


def _blocks(delta: TrieDelta) -> int:
    return len(delta.gained) + len(delta.lost)


SIGN_S = 0.5
BURST_S = 4.0  # of the budget, after quiet times
LOG_DELTAS_MAX = 256  # at four a second, a minute
LOG_BLOCKS_MAX = 32_768
DELTAS_AT_ONCE_MAX = 16


class DeltaPublisher:
    """One router's stream. `due` is asked at every tick."""

    def __init__(
        self,
        origin: Origin,
        epoch: int,
        news: OutgoingPrefixes,
        *,
        trie_s: float,
        bytes_per_s: float,
    ) -> None:
        self._origin = origin
        self._epoch = epoch
        self._news = news
        self._trie_s = trie_s
        self._bytes_per_s, self._burst_s = bytes_per_s, max(BURST_S, 2.0 * trie_s)
        self._budget = ByteBudget(bytes_per_s, bytes_per_s * self._burst_s)
        self._seq = 0
        self._log = DeltaLog(LOG_DELTAS_MAX, LOG_BLOCKS_MAX)
        self._told_at = self._announced_at = float("-inf")

    def share(self, routers: int) -> None:
        """The budget is the link's: so many routers of this region tell over it."""
        self._budget.share(routers, self._bytes_per_s, self._burst_s)

    def due(self, now: float) -> list[TrieDelta]:
        """What to publish now, in this order."""
        deltas = self._deltas(now) if now - self._told_at >= self._trie_s else []
        if not deltas and now - self._announced_at >= SIGN_S:
            sign = self._delta((), ())
            self._budget.spend(size_bytes(sign), now)
            deltas = [sign]
        if deltas:
            self._announced_at = now
        return deltas

    def answer(self, ask: TrieAsk) -> list[TrieAnswer]:
        """What closes the hole that a listener asks about."""
        if ask.epoch == self._epoch:
            missing = self._log.since(ask.after, self._seq)
            whole_bytes = MESSAGE_BYTES + BLOCK_BYTES * len(self._news)
            if missing is not None and sum(map(size_bytes, missing)) <= whole_bytes:
                return [*missing] or [self._delta((), ())]
        return [*self._snapshot()]

    def _deltas(self, now: float) -> list[TrieDelta]:
        deltas: list[TrieDelta] = []
        while not self._news.is_quiet and len(deltas) < DELTAS_AT_ONCE_MAX:
            affordable = int((self._budget.left(now) - MESSAGE_BYTES) / BLOCK_BYTES)
            gained, lost = self._news.take(min(affordable, DELTA_BLOCKS_MAX))
            if not gained and not lost:
                break
            self._seq += 1
            delta = self._delta(gained, lost)
            self._budget.spend(size_bytes(delta), now)
            self._log.keep(delta)
            deltas.append(delta)
        if deltas:
            self._told_at = now
        return deltas

    def _delta(self, gained: tuple[int, ...], lost: tuple[int, ...]) -> TrieDelta:
        region, router = self._origin
        return TrieDelta(region, router, self._epoch, self._seq, gained, lost)

    def _snapshot(self) -> list[TriePart]:
        blocks = self._news.told
        cuts = range(0, max(1, len(blocks)), PART_BLOCKS_MAX)
        region, router = self._origin
        return [
            TriePart(
                region,
                router,
                self._epoch,
                self._seq,
                part,
                len(cuts),
                blocks[start : start + PART_BLOCKS_MAX],
            )
            for part, start in enumerate(cuts)
        ]


# What a router says to its siblings: each prompt that it placed, and on which replica.
#
# Said at once and whole, from a prompt's first block to its last, because every listener keeps an
# index that evicts by age like the engine does: a prompt that is used again makes all of its path
# young, at the listener as here. A prompt that was said a moment ago is not said again, so what a
# burst of one prompt costs does not grow with the burst.
#
# Who missed something is told all of the replicas that it was about, as it is by then. Rejected:
# saying the deltas again. They would make old prompts young, and bring back what a replica has lost
# since.
#
# Rejected: saying only what is new to a replica, as peers are told. Listeners would believe that a
# system prompt which everybody uses is the oldest thing there.


AGAIN_S = 5.0
RECENT_MAX = 4096  # prompts of one replica
REMEMBERED_MAX = 4096  # deltas, by what they were about


class SiblingPublisher:
    """One router's stream to its siblings; hears the index that its own policy keeps."""

    def __init__(self, origin: Origin, epoch: int, say: Callable[[TrieDelta], None]) -> None:
        self.seq = 0
        self._about: deque[str] = deque(maxlen=REMEMBERED_MAX)  # the replicas of the last deltas
        self._origin = origin
        self._epoch = epoch
        self._say = say
        self._announced_at: dict[str, dict[int, float]] = {}  # by replica, by a prompt's last block
        self._now = 0.0

    def used(self, owner: str, hashes: Sequence[int], now: float) -> None:
        """A prompt was placed there."""
        self._now = now
        if not hashes:
            return
        said_at = self._announced_at.setdefault(owner, {})
        if now - said_at.pop(hashes[-1], float("-inf")) < AGAIN_S:
            said_at[hashes[-1]] = now
            return
        said_at[hashes[-1]] = now
        if len(said_at) > RECENT_MAX:
            del said_at[next(iter(said_at))]
        # The end first: what is entered last is the youngest, and a path's beginning must be.
        for start in reversed(range(0, len(hashes), DELTA_BLOCKS_MAX)):
            self._tell(owner, gained=tuple(hashes[start : start + DELTA_BLOCKS_MAX]))

    def lost(self, owner: str, blocks: Sequence[int]) -> None:
        """These were never computed there."""
        self._announced_at.pop(owner, None)
        for start in range(0, len(blocks), DELTA_BLOCKS_MAX):
            self._tell(owner, lost=tuple(blocks[start : start + DELTA_BLOCKS_MAX]))

    def missed(self, owner: str, at: float) -> None:
        """What was used last at that time or before has been evicted there."""
        self._announced_at.pop(owner, None)
        self._tell(owner, missed_ms=max(0, round((self._now - at) * 1000)))

    def gone(self, owner: str) -> None:
        """Siblings see it themselves."""
        self._announced_at.pop(owner, None)

    def tick(self, now: float) -> None:
        """Time has passed: ages are counted from here."""
        self._now = now

    def since(self, after: int) -> Collection[str] | None:
        """Replicas that deltas after that number were about; None if it is not known any more."""
        missing = self.seq - after
        if not 0 <= missing <= len(self._about):
            return None
        return {self._about[-number] for number in range(1, missing + 1)}

    def sign(self, is_warm: bool) -> TrieDelta:
        """Repeats the last number."""
        region, router = self._origin
        return TrieDelta(region, router, self._epoch, self.seq, (), (), is_cold=int(not is_warm))

    def _tell(
        self,
        replica: str,
        gained: tuple[int, ...] = (),
        lost: tuple[int, ...] = (),
        missed_ms: int = -1,
    ) -> None:
        self.seq += 1
        region, router = self._origin
        delta = TrieDelta(region, router, self._epoch, self.seq, gained, lost, replica, missed_ms)
        self._about.append(replica)
        self._say(delta)
