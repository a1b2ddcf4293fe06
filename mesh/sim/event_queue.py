"""The twin's only clock: calls in order of virtual time.

Calls due at one moment happen in the order in which they were scheduled, so a run depends on its
seed alone. Coroutines on a virtual event loop would cost ten times as much for each of the
millions of heartbeats.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

ScheduledCall = tuple[float, int, Callable[..., object], tuple[Any, ...]]
Message = TypeVar("Message")


class EventQueue:
    """`now` is in seconds and never goes back."""

    __slots__ = ("_heap", "_number", "_stopped", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[ScheduledCall] = []
        self._number = 0
        self._stopped = False

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Call it then. A time that has passed means at once, after what is due already."""
        self._number += 1
        heappush(self._heap, (when if when > self.now else self.now, self._number, call, args))

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    def stop(self) -> None:
        """Make `run` return after the present call."""
        self._stopped = True

    def run(self) -> None:
        """Make all calls, until `stop` or until none is left."""
        heap = self._heap
        while heap and not self._stopped:
            self.now, _, call, args = heappop(heap)
            call(*args)


class CoalescingSender(Generic[Message]):
    """Sends at most one message in `gap_s`, the latest; 0 lets everything through.

    Live, a replica that turns full and a region that turns free publish at once. With a gap, runs
    show the cost of stale state.
    """

    __slots__ = ("_gap_s", "_latest", "_queue", "_send", "_sent_at")

    def __init__(self, queue: EventQueue, gap_s: float, send: Callable[[Message], None]) -> None:
        self._queue = queue
        self._gap_s = gap_s
        self._send = send
        self._sent_at = float("-inf")
        self._latest: Message | None = None

    def offer(self, message: Message) -> None:
        """Send it now, or at the end of the gap unless a newer one comes before that."""
        if self._queue.now >= self._sent_at + self._gap_s:
            self._latest = None
            self._sent_at = self._queue.now
            self._send(message)
            return
        if self._latest is None:
            self._queue.at(self._sent_at + self._gap_s, self._flush)
        self._latest = message

    def _flush(self) -> None:
        if self._latest is not None:
            self.offer(self._latest)
