"""Room of the region's replicas: how many tokens of offline work each would take now.

A replica's heartbeat names its room. What was handed out and is not counted in a heartbeat yet is
subtracted from the moment it is sent, whatever becomes of it. A replica that fails its requests is
left out as routers leave it out (`mesh.core.view.outliers`), while another one serves the model.

Reads: backoff, late_s, lease, leased_at, region, replicas, residency.
Writes: lease, leased_at.
"""

from collections.abc import Iterator

from mesh.core.offline.queues import Wanted
from mesh.core.offline.state import RunnerState
from mesh.core.view.replica import Replica
from schemas.ids import ModelId
from schemas.state import Lease, ReplicaState

LEASE_S_MAX = 10.0  # an older lease is ignored: agents then take their own region's work

# Who owns the replicas.


def see_lease(state: RunnerState, lease: Lease, now: float) -> None:
    """A write of a lease; others than this region's, and old ones, are ignored."""
    if lease.region != state.region:
        return
    if state.lease is None or lease.term >= state.lease.term:
        state.lease, state.leased_at = lease, now


def term(state: RunnerState, now: float) -> int | None:
    """Of this region's lease of its own replicas; None if there is none."""
    lease = _lease_at(state, now)
    return lease.term if lease is not None and lease.owner == state.region else None


def is_adopted(state: RunnerState, now: float) -> bool:
    """Whether a peer owns the replicas, so that agents refuse this region's work."""
    lease = _lease_at(state, now)
    return lease is not None and lease.owner != state.region


def _lease_at(state: RunnerState, now: float) -> Lease | None:
    return state.lease if now - state.leased_at <= LEASE_S_MAX else None


# Room.


def room_at(state: RunnerState, replica: Replica, model: ModelId, now: float) -> int:
    """Tokens that it may be handed now of lines for that model; 0 if it takes nothing."""
    beat = replica.heartbeat
    room = beat.offline_room_tokens
    if room is None or not may_work(state, replica, model, now):
        return 0
    return max(0, room - replica.on_the_way.tokens)


def may_work(state: RunnerState, replica: Replica, model: ModelId, now: float) -> bool:
    """Whether it may be given lines for that model at all, as offline or online work."""
    if not state.replicas.failing.places or _bars(state, replica, model, now) is None:
        return _is_up(state, replica, now)
    others = (one for one in state.replicas.serving(model) if one is not replica)
    return _is_up(state, replica, now) and not any(
        _is_up(state, one, now) and _bars(state, one, model, now) is None for one in others
    )


def _bars(state: RunnerState, replica: Replica, model: ModelId, now: float) -> str | None:
    return state.replicas.failing.bars(replica.heartbeat.replica, model, now)


def _is_up(state: RunnerState, replica: Replica, now: float) -> bool:
    beat = replica.heartbeat
    return (
        beat.state is ReplicaState.READY
        and now - replica.silent_from <= state.late_s
        and replica.refused_at is None
        and state.replicas.bus.lost_at is None
        and not state.backoff.is_waiting(beat.replica, now)
        and not is_adopted(state, now)
    )


def with_room(
    state: RunnerState, model: ModelId, wanted: Wanted, now: float
) -> Iterator[tuple[Replica, int]]:
    """Replicas with room for lines of that model, and how much."""
    for replica in state.replicas.serving(model):
        room = room_at(state, replica, model, now)
        if room and state.residency.takes_replica(wanted, replica):
            yield replica, room


def largest_room(state: RunnerState, model: ModelId, wanted: Wanted, now: float) -> int:
    """The most that one of them would take."""
    return max((room for _, room in with_room(state, model, wanted, now)), default=0)
