"""Room of the region's replicas: how many tokens of offline work each would take now.

A replica's heartbeat names its room. What was handed out and is not counted in a heartbeat yet is
subtracted from the moment it is sent, whatever becomes of it.
"""

from collections.abc import Iterator
from math import inf

from mesh.core.offline.queues import Wanted
from mesh.core.placement.residency import Residency
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId
from schemas.state import Lease, ReplicaState

PLACES_MAX = 16_384  # that wait after a refusal or failure
LEASE_S_MAX = 10.0  # an older lease is ignored: agents then take their own region's work


class Backoff:
    """Places (replicas or regions, by name) that refused or failed work get none for a while.

    Each time in a row the wait is longer.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._waits: dict[str, tuple[int, float]] = {}  # times in a row, and until when

    def __len__(self) -> int:
        return len(self._waits)

    def penalize(self, place: str, now: float) -> None:
        """It refused or failed work. Refusals of work sent before the wait began count once."""
        times, until = self._waits.get(place, (0, -inf))
        if now < until:
            return
        self._waits.pop(place, None)
        if len(self._waits) >= PLACES_MAX:
            del self._waits[next(iter(self._waits))]
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(times, 30))
        self._waits[place] = times + 1, now + wait_s

    def answered(self, place: str) -> None:
        self._waits.pop(place, None)

    def is_waiting(self, place: str, now: float) -> bool:
        """Whether it gets no work yet."""
        known = self._waits.get(place)
        return known is not None and now < known[1]


class OfflineRoom:
    """Room of one region's replicas."""

    def __init__(
        self,
        region: RegionId,
        replicas: ReplicaTable,
        backoff: Backoff,
        residency: Residency,
        late_s: float,
    ) -> None:
        """`late_s`: a replica whose last heartbeat is older gets nothing."""
        self._region = region
        self._replicas = replicas
        self._backoff = backoff
        self._residency = residency
        self._late_s = late_s
        self._lease: Lease | None = None
        self._leased_at = -inf

    # Who owns the replicas.

    def see_lease(self, lease: Lease, now: float) -> None:
        """A write of a lease; others than this region's, and old ones, are ignored."""
        if lease.region != self._region:
            return
        if self._lease is None or lease.term >= self._lease.term:
            self._lease, self._leased_at = lease, now

    def term(self, now: float) -> int | None:
        """Of this region's lease of its own replicas; None if there is none."""
        lease = self._lease_at(now)
        return lease.term if lease is not None and lease.owner == self._region else None

    def is_adopted(self, now: float) -> bool:
        """Whether a peer owns the replicas, so that agents refuse this region's work."""
        lease = self._lease_at(now)
        return lease is not None and lease.owner != self._region

    def _lease_at(self, now: float) -> Lease | None:
        return self._lease if now - self._leased_at <= LEASE_S_MAX else None

    # Room.

    def at(self, replica: Replica, now: float) -> int:
        """Tokens that it may be handed now; 0 if it takes nothing."""
        beat = replica.heartbeat
        room = beat.offline_room_tokens
        if room is None or not self.may_work(replica, now):
            return 0
        return max(0, room - replica.on_the_way.tokens)

    def may_work(self, replica: Replica, now: float) -> bool:
        """Whether it may be given lines at all, as offline or online work."""
        beat = replica.heartbeat
        return (
            beat.state is ReplicaState.READY
            and now - replica.seen_at <= self._late_s
            and replica.refused_at is None
            and self._replicas.bus.lost_at is None
            and not self._backoff.is_waiting(beat.replica, now)
            and not self.is_adopted(now)
        )

    def carries(self, replica: Replica, wanted: Wanted) -> bool:
        return self._residency.takes_replica(wanted, replica)

    def serving(self, model: ModelId, wanted: Wanted, now: float) -> Iterator[tuple[Replica, int]]:
        """Replicas with room for lines of that model, and how much."""
        for replica in self._replicas.serving(model):
            room = self.at(replica, now)
            if room and self.carries(replica, wanted):
                yield replica, room

    def largest(self, model: ModelId, wanted: Wanted, now: float) -> int:
        """The most that one of them would take."""
        return max((room for _, room in self.serving(model, wanted, now)), default=0)

    def total(self, model: ModelId, now: float) -> int:
        return sum(room for _, room in self.serving(model, None, now))
