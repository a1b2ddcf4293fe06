"""When a client that was refused may try again.

Retry-After is the wait until the queue may be joined, plus the clients refused before and not due
yet, at the queue's pace: each refusal books one place, or a refused crowd would return together.
Bookings lapse at the same pace. Up to a fifth is added at random.
"""

from math import ceil
from random import Random

RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
JITTER_RATIO = 0.2  # added at most
LATEST_S = RETRY_AFTER_S_MAX / (1.0 + JITTER_RATIO)


class RetryAfter:
    """Of one model's queue."""

    def __init__(self) -> None:
        self._booked = 0.0  # clients refused, and not due back yet
        self._counted_at = 0.0

    def after_s(self, wait_s: float | None, pace_per_s: float, now: float, dice: Random) -> float:
        """Book one more client; whole seconds until it should retry.

        `wait_s`: until the queue may be joined; None if unknown.
        """
        self._booked = max(0.0, self._booked - pace_per_s * (now - self._counted_at))
        self._counted_at = now
        after_s = LATEST_S if wait_s is None else wait_s
        if pace_per_s > 0.0:
            after_s += self._booked / pace_per_s
            self._booked = min(self._booked + 1.0, RETRY_AFTER_S_MAX * pace_per_s)
        whole_s = ceil(min(LATEST_S, max(RETRY_AFTER_S_MIN, after_s)))
        return float(whole_s + dice.randint(0, ceil(JITTER_RATIO * whole_s)))
