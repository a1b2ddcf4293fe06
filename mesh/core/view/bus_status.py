"""When silence is no loss: the bus is away, this process was suspended, or heartbeats are lost.

A nats-server that restarts takes seconds, in which no message arrives though all senders are well:
agents go on with their answers and buffer what they send. So time without the bus counts as
nobody's silence, up to `heartbeat_blind_s`. The same holds for time in which this process was
suspended (stopped, swapped out, its host paused), which a late tick shows: messages sent meanwhile
are still to be read. The last such time is forgiven in whole, those before it up to
`heartbeat_blind_s`: a process all of whose ticks are late still detects losses.

One replica that falls silent is dead; two or more at once are not. If two or more are known and
none has sent a heartbeat for a while, the heartbeats are lost, and the router is *blind*: it goes
on with its last view. What it handed off and has not seen end takes room, agents refuse what they
can't take, and a replica that refused rests for REST_S. Blindness ends with the first heartbeat,
after which the others have as long to send one as before they count as dead, or after
`heartbeat_blind_s`. Each region's heartbeats arrive by another way, so each region has a detector.
"""

from collections import deque
from math import inf

from mesh.core.model.settings import RouterSettings

AWAY = "the bus is away"
STOOD_STILL_S = 1.0  # between two ticks, of which there are five a second or more
CATCH_UP_S = 0.2  # to receive what came meanwhile, before anything counts as late
UNREACHABLE = "the bus can't be reached"
BLIND_FROM = 2  # replicas; the silence of a single one says nothing about others
REST_S = 1.0


class BusStatus:
    """This router's connection to its bus, and its own suspensions."""

    def __init__(self, settings: RouterSettings) -> None:
        self._away_s_max = settings.heartbeat_blind_s
        self.lost_at: float | None = None  # None while it is connected
        self.returned_at = -inf  # messages until then may have been lost
        self._ticked_at = inf
        # When this process resumed, and for how long it had been suspended: as many as count.
        self._suspended: deque[tuple[float, float]] = deque(
            maxlen=2 + int(settings.heartbeat_blind_s / STOOD_STILL_S)
        )

    def tick(self, now: float) -> None:
        """Note whether this process was suspended since the tick before."""
        paused_s = now - self._ticked_at
        self._ticked_at = now
        if paused_s > STOOD_STILL_S:
            self._suspended.append((now, paused_s))

    def lost(self, now: float) -> None:
        if self.lost_at is None:
            self.lost_at = now

    def returned(self, now: float) -> None:
        self.lost_at, self.returned_at = None, now

    def is_away(self, now: float) -> bool:
        """Whether it is lost, and not for so long that silent replicas count as lost."""
        return self.lost_at is not None and now - self.lost_at <= self._away_s_max

    def silent_s(self, seen_at: float, now: float) -> float:
        """How long a sender last seen at that time has been silent while it could be received."""
        until = self.lost_at if self.lost_at is not None and self.is_away(now) else now
        since = max(seen_at, self.returned_at)
        return max(0.0, until - since - self.paused_s(since))

    def paused_s(self, since: float) -> float:
        """How much of the time since then doesn't count, as this process was suspended."""
        last_s = before_s = 0.0
        for resumed_at, paused_s in reversed(self._suspended):
            if resumed_at <= since:
                break
            if last_s:
                before_s += min(paused_s, resumed_at - since)
            else:
                last_s = min(paused_s, resumed_at - since)
        return last_s + min(before_s, self._away_s_max)


class HeartbeatLossDetector:
    """Of one region's replicas; `known` of them, as the table counts."""

    def __init__(self, settings: RouterSettings) -> None:
        self._late_s, self._blind_s = settings.heartbeat_late_s, settings.heartbeat_blind_s
        self._seen_at = self._returned_at = -inf
        self.known = 0

    def seen(self, now: float, longer_s: float = 0.0) -> None:
        """Some replica of the region sent a heartbeat, and may be silent for so much longer than
        usual."""
        if self.is_blind(now):
            self._returned_at = now
        self._seen_at = max(self._seen_at, now + longer_s)

    def is_blind(self, now: float) -> bool:
        """Whether heartbeats are lost rather than replicas."""
        return self.known >= BLIND_FROM and self._late_s < now - self._seen_at <= self._blind_s

    def since(self, seen_at: float) -> float:
        """From when on the silence of a replica seen at that time counts."""
        return max(seen_at, self._returned_at)
