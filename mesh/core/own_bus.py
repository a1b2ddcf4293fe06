"""Whether this router's own bus is there. While it is not, silence says nothing of anybody.

A nats-server that restarts takes seconds, for which nobody is heard though all are well: agents go
on with their answers and keep what they have to say. So time without the bus is not counted as
anybody's silence, up to `heartbeat_blind_s`; after it everyone has their whole time to be heard.

The same holds for time in which this process itself stood still (stopped, swapped out, its host
paused): what others sent meanwhile is still to be read. A tick that comes late shows it.
"""

from math import inf

from mesh.core.settings import RouterSettings

AWAY = "the bus is away"
STOOD_STILL_S = 1.0  # between two ticks, of which there are ten a second
UNREACHABLE = "the bus can't be reached"


class OwnBus:
    """Told of each loss and return of the connection."""

    def __init__(self, settings: RouterSettings) -> None:
        self._away_s_max = settings.heartbeat_blind_s
        self._lost_at: float | None = None
        self.returned_at = -inf  # what came until then may not have been all
        self._ticked_at = inf
        self._moved_on_at = -inf  # when this process last went on after it had stood still

    def stood_still(self, now: float) -> bool:
        """At every tick: whether this process stood still since the one before."""
        stood_still = now - self._ticked_at > STOOD_STILL_S
        self._ticked_at = now
        if stood_still:
            self._moved_on_at = now
        return stood_still

    def lost(self, now: float) -> None:
        """Nobody is heard from now on."""
        if self._lost_at is None:
            self._lost_at = now

    def returned(self, now: float) -> None:
        """Whoever is there can be heard again."""
        self._lost_at, self.returned_at = None, now

    @property
    def is_there(self) -> bool:
        """Whether anybody can be heard."""
        return self._lost_at is None

    def is_away(self, now: float) -> bool:
        """Whether it is, and not for so long that those behind it are as lost as they look."""
        return self._lost_at is not None and now - self._lost_at <= self._away_s_max

    def silent_s(self, heard_at: float, now: float) -> float:
        """How long somebody last heard at that time has said nothing that could be heard."""
        until = self._lost_at if self._lost_at is not None and self.is_away(now) else now
        return max(0.0, until - max(heard_at, self.returned_at, self._moved_on_at))
