"""When the next heartbeat is due: on the beat, or at once when the verdict changed.

"At once" still keeps a smallest gap: a replica that flips between full and not full with every
request must not turn the bus into a strobe light.
"""

GAP_MIN_S = 0.01


class Cadence:
    """One replica's heartbeat times."""

    __slots__ = ("_interval_s", "_sent_at", "due_at")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sent_at = float("-inf")
        self.due_at = float("-inf")  # an attribute, because every event asks for it

    def hurry(self) -> None:
        """What readers were told last is no longer true."""
        self.due_at = self._sent_at + GAP_MIN_S

    def sent(self, now: float) -> None:
        self._sent_at = now
        self.due_at = now + self._interval_s
