"""Frames that answers miss: when each is requested again, and when it counts as lost.

Requested at once, then after 0.5 and 1.5 s, because the request may be lost as well; 2 s after that
the frame counts as lost. An answer waits for one frame, the next in its order.
"""

from dataclasses import dataclass

REQUEST_S = 0.5  # after the first request; each wait is twice as long as the one before
REQUESTS_MAX = 3


@dataclass(slots=True)
class RetransmitRequest:
    """Frame `number` of the answer of that inbox."""

    inbox: str
    number: int
    due_s: float
    requests: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether the last request was in vain; of use when it is due."""
        return self.requests >= REQUESTS_MAX

    def was_requested(self, now: float) -> None:
        """Sets when it is due again."""
        self.due_s = now + REQUEST_S * 2**self.requests
        self.requests += 1


class RetransmitRequests:
    """One for each answer at most."""

    def __init__(self) -> None:
        self._frames: dict[str, RetransmitRequest] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def enter(self, inbox: str, number: int, now: float) -> RetransmitRequest:
        """It is missing from now on, in the place of any other of this answer; due at once."""
        missing = self._frames[inbox] = RetransmitRequest(inbox, number, now)
        return missing

    def drop(self, missing: RetransmitRequest) -> None:
        """It has come, or is not wanted any more."""
        if self._frames.get(missing.inbox) is missing:
            del self._frames[missing.inbox]

    def due(self, now: float, *, bus_is_there: bool) -> list[RetransmitRequest]:
        """What is to be requested, or counts as lost; nothing while the bus is away."""
        if not bus_is_there:
            return []
        return [missing for missing in self._frames.values() if missing.due_s <= now]

    def requested_after_outage(self, inbox: str, now: float) -> None:
        """The bus was away, and what that answer misses was requested: that counts as the first
        request."""
        missing = self._frames.get(inbox)
        if missing is not None:
            missing.requests = 0
            missing.was_requested(now)
