"""Slower news than the cores send: what if nothing were told but on the beat?

Live, a replica that turns full and a region that turns free say so at once. With a gap the latest
of what was said meanwhile goes out when the gap is over, which isolates what staleness costs.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from mesh.sim.event_queue import EventQueue

Message = TypeVar("Message")


class Pace(Generic[Message]):
    """At most one message a gap; 0 lets everything through."""

    __slots__ = ("_gap_s", "_latest", "_queue", "_send", "_sent_at")

    def __init__(self, queue: EventQueue, gap_s: float, send: Callable[[Message], None]) -> None:
        self._queue = queue
        self._gap_s = gap_s
        self._send = send
        self._sent_at = float("-inf")
        self._latest: Message | None = None

    def offer(self, message: Message) -> None:
        """Send it now, or when its time has come, if nothing newer has come by then."""
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
