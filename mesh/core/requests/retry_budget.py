"""How many requests may be computed again after an engine's server error.

When engines fail by overload, or a client sends what no engine can compute, every request tried a
second time doubles the load. So these second attempts are a share of all attempts (Finagle's retry
budget and Envoy's have 20 %), and a few each second whatever the traffic. What was lost (a
connection, a replica, a region) is always tried again: its work is no longer under way.
"""

SHARE = 0.2  # of the attempts that begin
PER_S_MIN = 1.0
SAVED_S = 10.0  # what was not spent in these last seconds may be spent at once


class RetryBudget:
    """One router's."""

    def __init__(self) -> None:
        self._left, self._counted_at = 0.0, float("-inf")

    def spend(self, attempts_per_s: float, now: float) -> bool:
        """Whether one more attempt may be made, which is then counted."""
        per_s = PER_S_MIN + SHARE * attempts_per_s
        self._left = min(SAVED_S, self._left / per_s + now - self._counted_at) * per_s
        self._counted_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
