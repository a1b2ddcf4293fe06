"""How soon a heartbeat comes after the last one.

As usual while the replica has something to do. After STILL heartbeats in a row that tell the same,
each comes later than the one before, up to REST_S. Each says within which time the next one comes
(`Heartbeat.next_within_s`), and routers count a replica's silence from there: twice the time after
which it leaves, so that one may be lost. What changes is told at once, and work that comes; then
the pace begins anew.

A router or batch runner of 0.1.0 doesn't read that: a replica would be late for it after 0.3 s. All
who may receive heartbeats say in their keep-alives whether they do: those of other regions too, as
they may adopt the replica. While one that doesn't is alive, the pace stays as usual.
"""

from math import inf

from agents.core.routers import SILENCE_ABROAD_S

STILL = 10
REST_S = 0.5
ALIVE_WITHIN_S = SILENCE_ABROAD_S  # a process whose last keep-alive is older is gone


class HeartbeatPace:
    """Of one agent."""

    def __init__(self, usual_s: float) -> None:
        self.told: object = None  # what the last one told, of a replica at rest
        self.gap_s = self._usual_s = usual_s  # from the last one to the next one
        self._same = 0  # in a row
        self._read_at = self._unread_at = -inf  # the last keep-alive of one that reads it, and not

    @property
    def is_slow(self) -> bool:
        """Whether the next one comes later than usual."""
        return self.gap_s > self._usual_s

    @property
    def next_within_s(self) -> float | None:
        """As the last one says it."""
        return 2.0 * self.gap_s if self.is_slow else None

    def sent(self, told: object, now: float) -> None:
        """A heartbeat is being sent. `told`: where this is as it was, the heartbeat tells nothing
        new; None while something is under way."""
        self._same = self._same + 1 if told is not None and told == self.told else 0
        self.told = told
        self.gap_s = self._usual_s
        if self._same >= STILL and self._is_read(now):
            later_s = self._usual_s * 2.0 ** min(self._same - STILL + 1, STILL)
            self.gap_s = max(self._usual_s, min(REST_S, later_s))

    def hasten(self) -> None:
        """Something has changed, or somebody may not know what was told."""
        self._same, self.gap_s = 0, self._usual_s

    def alive(self, now: float, *, reads: bool) -> None:
        """A keep-alive of a process that reads within which time the next one comes, or doesn't."""
        if reads:
            self._read_at = now
        else:
            self._unread_at = now

    def _is_read(self, now: float) -> bool:
        return now - self._read_at <= ALIVE_WITHIN_S < now - self._unread_at
