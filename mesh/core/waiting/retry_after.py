"""When a refused client should come back: Retry-After, from the backlog and the pace of the line.

    wait_s     until the line is short enough to be joined, at the present pace
  + told / pace: those who were told to come back, and are before it

Whoever is refused is expected to return, or a crowd that was refused within a second would be back
within a second too, each second anew. So each refusal books one place at the pace of the line, and
the next one is told a later time. Bookings lapse at the same pace, whether anybody returns or not.
Up to a fifth is added by chance, to part those who were refused at one moment by several routers.

Rejected: the wait alone (a line that newcomers keep at its limit is always about to be joined, so
everyone is told one second), and an exponential back-off (it knows neither backlog nor pace).
"""

from math import ceil
from random import Random

RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
JITTER_RATIO = 0.2  # added at most
LATEST_S = RETRY_AFTER_S_MAX / (1.0 + JITTER_RATIO)


class RetryAfter:
    """Of one line; time and chance are arguments."""

    def __init__(self) -> None:
        self._told = 0.0  # refused, and not due back yet
        self._counted_at = 0.0

    def after_s(self, wait_s: float | None, pace_per_s: float, now: float, dice: Random) -> float:
        """Whole seconds until one more should come back, who is counted from now on.

        `wait_s`: until the line may be joined; None if that is not known.
        """
        self._told = max(0.0, self._told - pace_per_s * (now - self._counted_at))
        self._counted_at = now
        after_s = LATEST_S if wait_s is None else wait_s
        if pace_per_s > 0.0:
            after_s += self._told / pace_per_s
            self._told = min(self._told + 1.0, RETRY_AFTER_S_MAX * pace_per_s)
        after_s = ceil(min(LATEST_S, max(RETRY_AFTER_S_MIN, after_s)))
        return float(after_s + dice.randint(0, ceil(JITTER_RATIO * after_s)))
