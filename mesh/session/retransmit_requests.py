"""Frames that answers miss: when each is asked for again, and when it is given up.

Asked for at once, then after 0.5 and 1.5 s, for the asking may be lost as well; 2 s after that the
frame counts as lost. An answer waits for one frame, the next in its order.
"""

from dataclasses import dataclass

ASK_S = 0.5  # after the first asking; each wait is twice as long as the one before
ASKS_MAX = 3


@dataclass(slots=True)
class RetransmitRequest:
    """Frame `number` of the answer of that inbox."""

    inbox: str
    number: int
    due_s: float
    asks: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether it was asked for in vain often enough; of use when it is due."""
        return self.asks >= ASKS_MAX

    def was_asked_for(self, now: float) -> None:
        """From now on it has some time to come."""
        self.due_s = now + ASK_S * 2**self.asks
        self.asks += 1


class RetransmitRequests:
    """One for each answer at most; who drops an answer need not say so."""

    def __init__(self) -> None:
        self._frames: dict[str, RetransmitRequest] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def enter(self, inbox: str, number: int, now: float) -> RetransmitRequest:
        """It is missed from now on, instead of any other of this answer; due at once."""
        missing = self._frames[inbox] = RetransmitRequest(inbox, number, now)
        return missing

    def drop(self, missing: RetransmitRequest) -> None:
        """It has come, or nobody waits for it any more."""
        if self._frames.get(missing.inbox) is missing:
            del self._frames[missing.inbox]

    def due(self, now: float, *, bus_is_there: bool) -> list[RetransmitRequest]:
        """What is to be asked for, or given up. Without the bus nobody can be, and nothing is."""
        if not bus_is_there:
            return []
        return [missing for missing in self._frames.values() if missing.due_s <= now]

    def asked_anew(self, inbox: str, now: float) -> None:
        """What that answer misses was asked for after a time without the bus: that counts as the
        first asking."""
        missing = self._frames.get(inbox)
        if missing is not None:
            missing.asks = 0
            missing.was_asked_for(now)
