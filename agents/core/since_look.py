"""How the requests handed to the engine stand to the last look at it, counted as they change.

Every event asks for these counts, and a full agent owes hundreds of answers.
"""

from collections import deque
from collections.abc import Iterable
from math import inf

SETTLED_MAX = 4096  # remembered between two looks


class SinceLook:
    """A look began at one moment and was here at a later one; work is handed over all the while."""

    __slots__ = ("_began_at", "_ended_settled", "_seen_at", "settled", "since", "still", "unbegun")

    def __init__(self) -> None:
        self._began_at = self._seen_at = -inf
        # When those were handed over that no longer wait, and when they ceased to.
        self._ended_settled: deque[tuple[float, float]] = deque(maxlen=SETTLED_MAX)
        self.unbegun = 0  # handed over, no first byte
        self.still = 0  # of them, before the look's end
        self.since = 0  # of them, after it began
        self.settled = 0  # handed over before its end; first byte or end since it began

    def look(self, began_at: float, seen_at: float, waiting: Iterable[float]) -> None:
        """A new look. `waiting`: when those were handed over that have no first byte."""
        self._began_at, self._seen_at = began_at, seen_at
        self.unbegun = self.still = self.since = 0
        for handed_at in waiting:
            self._count(handed_at, 1)
        ended = self._ended_settled
        while ended and ended[0][1] <= began_at:
            ended.popleft()
        self.settled = sum(handed_at <= seen_at for handed_at, _ in ended)

    def hand(self, at: float) -> None:
        """One was handed over."""
        self._count(at, 1)

    def settle(self, handed_at: float, at: float) -> None:
        """One of them waits no more: it has its first byte, or has ended."""
        self._count(handed_at, -1)
        self._ended_settled.append((handed_at, at))
        self.settled += handed_at <= self._seen_at and at > self._began_at

    def drop(self, handed_at: float) -> None:
        """One of them is forgotten as if it had never been there."""
        self._count(handed_at, -1)

    def _count(self, handed_at: float, by: int) -> None:
        self.unbegun += by
        if handed_at <= self._seen_at:
            self.still += by
        if handed_at > self._began_at:
            self.since += by
