"""What may be spent on warming up: a share of the prefill seconds that replicas stand idle.

Seconds are put by while replicas are idle and taken out before they are spent, so over any time
no more is spent than the share of what was idle in it, but for what was saved before; and no more
than SAVED_S_MAX is ever saved. What was taken out for something that came to nothing is not put
back: it may have been computed in part.
"""

SAVED_S_MAX = 30.0  # the longest documents take about so long on small GPUs
STEP_S_MAX = 1.0  # between two looks: a process that stood still did not see who was idle


class IdleBudget:
    """One router's part. All in seconds of one replica's prefill."""

    def __init__(self, share: float) -> None:
        """`share`: of idle time, 0 to 1."""
        self._share = share
        self._looked_at: float | None = None
        self.idle_s = 0.0  # since the start, this router's part of it
        self.spent_s = 0.0
        self.saved_s = 0.0

    def look(self, idle: int, routers: int, now: float) -> None:
        """So many replicas are idle, and so many routers share what they could do."""
        if self._looked_at is not None:
            idle_s = idle * min(STEP_S_MAX, now - self._looked_at) / routers
            self.idle_s += idle_s
            self.saved_s = min(SAVED_S_MAX, self.saved_s + self._share * idle_s)
        self._looked_at = now

    def spend(self, seconds: float) -> bool:
        """Take so much out, if it is there."""
        if seconds > self.saved_s:
            return False
        self.saved_s -= seconds
        self.spent_s += seconds
        return True
