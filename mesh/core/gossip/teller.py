"""The stream of deltas that one router tells of its set, and what it says to those who ask.

A delta every `trie_s` while there is news, as large as the budget allows; with nothing to tell, a
sign every SIGN_S that repeats the last number. Who asks gets the missing deltas, as far as they
are kept and take less than the whole set would, and else the set.

Rejected: a Merkle tree over the set, as replicated stores have it. Streams are in order and whole
nearly always, so the number of the last delta finds every difference at no cost; what a tree would
save of a rare snapshot of 150 kB it would spend on hashing every change.
"""

from mesh.core.gossip.budget import Budget
from mesh.core.gossip.delta_log import DeltaLog
from mesh.core.gossip.news import News
from mesh.core.gossip.told import Origin
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

SIGN_S = 0.5
BURST_S = 4.0  # of the budget, after quiet times
LOG_DELTAS_MAX = 256  # at four a second, a minute
LOG_BLOCKS_MAX = 32_768
DELTAS_AT_ONCE_MAX = 16


class Teller:
    """One router's stream. `due` is asked at every tick."""

    def __init__(
        self, origin: Origin, epoch: int, news: News, *, trie_s: float, bytes_per_s: float
    ) -> None:
        self._origin = origin
        self._epoch = epoch
        self._news = news
        self._trie_s = trie_s
        self._bytes_per_s, self._burst_s = bytes_per_s, max(BURST_S, 2.0 * trie_s)
        self._budget = Budget(bytes_per_s, bytes_per_s * self._burst_s)
        self._seq = 0
        self._log = DeltaLog(LOG_DELTAS_MAX, LOG_BLOCKS_MAX)
        self._told_at = self._said_at = float("-inf")

    def share(self, routers: int) -> None:
        """The budget is the link's: so many routers of this region tell over it."""
        self._budget.share(routers, self._bytes_per_s, self._burst_s)

    def due(self, now: float) -> list[TrieDelta]:
        """What to publish now, in this order."""
        deltas = self._deltas(now) if now - self._told_at >= self._trie_s else []
        if not deltas and now - self._said_at >= SIGN_S:
            sign = self._delta((), ())
            self._budget.spend(size_bytes(sign), now)
            deltas = [sign]
        if deltas:
            self._said_at = now
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
