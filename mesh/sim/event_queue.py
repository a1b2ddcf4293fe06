"""What will happen, in order of virtual time: the twin's only clock.

Things due at one moment happen in the order in which they were asked for, so a run depends on
its seed and on nothing else. Rejected: coroutines on a virtual event loop, which read better
and cost ten times as much for each of the millions of heartbeats.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class EventQueue:
    """`now` is in seconds and never goes back."""

    __slots__ = ("_heap", "_number", "_stopped", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Entry] = []
        self._number = 0
        self._stopped = False

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call it then. A time that has passed means at once, after what is due already."""
        self._number += 1
        heappush(self._heap, (when if when > self.now else self.now, self._number, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call it in so many seconds."""
        self.at(self.now + delay_s, call, *args)

    def stop(self) -> None:
        """Let `run` return when what happens now has happened."""
        self._stopped = True

    def run(self) -> None:
        """Let everything happen, until `stop` or until nothing is left."""
        heap = self._heap
        while heap and not self._stopped:
            self.now, _, call, args = heappop(heap)
            call(*args)
