"""Whether heartbeats arrive at all: one replica that falls silent is dead, all at once are not.

When two replicas or more are known and nobody has been heard for a while, it is the heartbeats
that are lost, and the router is blind. It then goes on with its last view: what it handed off and
has not seen end takes room, agents refuse what they can't take, and who refused rests for a
moment instead of until its next word. The bus itself says where nobody listens. Blindness ends
with the first heartbeat, and the others get as long as a dead one to be heard of again, or after
`heartbeat_blind_s`: then the region is as lost as it looks.

Each region's heartbeats come their own way, so each has a sight of its own: a router that has
adopted a region and hears it well may be blind at home, and the other way round.

Rejected: placing at random among agents of a pool subject (what each of them has in work is known
here, and a random choice throws it away).
"""

from mesh.core.model.settings import RouterSettings

BLIND_FROM = 2  # replicas; the silence of a single one says nothing of the others'
REST_S = 1.0  # of one that refused while nobody is heard


class HeartbeatLossDetector:
    """Of one region's replicas; `known` of them, as the table counts."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._heard_at = self._returned_at = float("-inf")
        self.known = 0

    def seen(self, now: float) -> None:
        """Some replica of the region spoke."""
        if self.is_blind(now):
            self._returned_at = now
        self._heard_at = now

    def is_blind(self, now: float) -> bool:
        """Whether heartbeats are lost rather than replicas."""
        silent_s = now - self._heard_at
        late_s, blind_s = self._settings.heartbeat_late_s, self._settings.heartbeat_blind_s
        return self.known >= BLIND_FROM and late_s < silent_s <= blind_s

    def since(self, seen_at: float) -> float:
        """From when on the silence of a replica seen at that time counts."""
        return max(seen_at, self._returned_at)
