"""The indexes of this router's replicas, as its siblings have them too.

What a sibling placed is entered as if it had been placed here, so all routers of a region keep one
index: of what all of them placed, evicted in one order. Rejected: a set for each sibling beside
our own. Each would be bounded by the memory of the whole replica, and together they would claim
several times what it holds.

A sibling may speak of a replica before this router hears its heartbeat, or after it was handed back
to its region. So any name is entered, and dropped if its replica stays unknown for a while.

Times are those of hearing: milliseconds late, and no clocks are compared.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from mesh.core.gossip.remote_prefixes import SetOutcome
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.gossip import DELTA_BLOCKS_MAX, SIBLING_PARTS_MAX, TrieDelta, TriePart

REPLICAS_MAX = 4096
SKEW_S = 0.1  # a sibling heard of a placement so much later than it was made
STRANGER_S = 30.0  # a replica of which no heartbeat is heard for so long is not ours
SWEEP_S = 1.0
SPAN_S = 1.0  # what a replica was given within this time is of one age in a snapshot


class SharedIndex:
    """The shelf of all siblings' mirrors, and what a snapshot is made of."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        """`knows`: whether that is a replica of ours, be it lost for a while."""
        self.indexes: list[PrefixIndex[str]] = []  # the first is the one that is spoken of
        self._knows = knows
        self._strangers: dict[str, float] = {}  # since when nobody has known them
        self._swept_at = float("-inf")

    def expire(self, now: float) -> None:
        """Forget replicas that nobody has: one was handed back, or a sibling invents them."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        owners = {owner for index in self.indexes for owner in index.owners}
        strangers = (owner for owner in owners if not self._knows(owner))
        self._strangers = {owner: self._strangers.get(owner, now) for owner in strangers}
        for owner, since in self._strangers.items():
            if now - since >= STRANGER_S:
                for index in self.indexes:
                    index.forget(owner)

    def take(self, delta: TrieDelta, now: float) -> bool:
        """A sibling placed a prompt, or found one missing."""
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
        """All that a sibling knows of: what is younger here stays.

        A replica that has lost its memory since the question is left out: the sibling may have
        told of it before it heard.
        """
        put = SetOutcome.TAKEN
        for index in self.indexes:
            for replica, told in groupby(parts, lambda part: part.replica):
                missed_at = index.missed_at(replica)
                if missed_at is not None and missed_at >= asked_at - SKEW_S:
                    put = SetOutcome.IN_PART
                elif self._has_room(index, replica):
                    _merge(index, replica, tuple(told), now)
        return put

    def trust(self, whole: bool) -> None:
        """With a hole or without: what was placed there is there."""

    def forget(self) -> None:
        """A sibling that starts anew takes nothing out of the replicas."""

    def parts(
        self, about: Collection[str] | None, now: float
    ) -> list[tuple[str, float, tuple[int, ...], float | None]]:
        """Replica, time, blocks, and up to when all was missed: in as many parts as may be.

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
