"""Whether this router's own bus is there. While it is not, silence says nothing of anybody.

A nats-server that restarts takes seconds, for which nobody is heard though all are well: agents go
on with their answers and keep what they have to say. So time without the bus is not counted as
anybody's silence, up to `heartbeat_blind_s`; after it everyone has their whole time to be heard.

The same holds for time in which this process itself stood still (stopped, swapped out, its host
paused): what others sent meanwhile is still to be read. A tick that comes late shows it. The
length of each such time is forgiven, the last one's in whole and of those before it up to
`heartbeat_blind_s`: a process all of whose ticks are late goes on losing those who are gone.
"""

from collections import deque
from math import inf

from mesh.core.model.settings import RouterSettings

AWAY = "the bus is away"
STOOD_STILL_S = 1.0  # between two ticks, of which there are ten a second
UNREACHABLE = "the bus can't be reached"


class BusStatus:
    """Told of each loss and return of the connection."""

    def __init__(self, settings: RouterSettings) -> None:
        self._away_s_max = settings.heartbeat_blind_s
        self.lost_at: float | None = None
        self.returned_at = -inf  # what came until then may not have been all
        self._ticked_at = inf
        # When this process went on after it had stood still, and for how long it had: as many as
        # can be forgiven at most.
        self._stood: deque[tuple[float, float]] = deque(
            maxlen=2 + int(settings.heartbeat_blind_s / STOOD_STILL_S)
        )

    def tick(self, now: float) -> None:
        """See whether this process stood still since the tick before."""
        paused_s = now - self._ticked_at
        self._ticked_at = now
        if paused_s > STOOD_STILL_S:
            self._stood.append((now, paused_s))

    def lost(self, now: float) -> None:
        """Nobody is heard from now on."""
        if self.lost_at is None:
            self.lost_at = now

    def returned(self, now: float) -> None:
        """Whoever is there can be heard again."""
        self.lost_at, self.returned_at = None, now

    @property
    def is_there(self) -> bool:
        """Whether anybody can be heard."""
        return self.lost_at is None

    def is_away(self, now: float) -> bool:
        """Whether it is, and not for so long that those behind it are as lost as they look."""
        return self.lost_at is not None and now - self.lost_at <= self._away_s_max

    def silent_s(self, heard_at: float, now: float) -> float:
        """How long somebody last heard at that time has said nothing that could be heard."""
        until = self.lost_at if self.lost_at is not None and self.is_away(now) else now
        since = max(heard_at, self.returned_at)
        return max(0.0, until - since - self.paused_s(since))

    def paused_s(self, since: float) -> float:
        """How much of the time since then is forgiven, because this process stood still."""
        last_s = before_s = 0.0
        for moved_on_at, paused_s in reversed(self._stood):
            if moved_on_at <= since:
                break
            if last_s:
                before_s += min(paused_s, moved_on_at - since)
            else:
                last_s = min(paused_s, moved_on_at - since)
        return last_s + min(before_s, self._away_s_max)
