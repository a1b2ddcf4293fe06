"""Heartbeats, digests and leases: what they change, and what peers and agents receive.

Requests are `router.py`'s: those of a replica that restarted or left go to
`failed_attempts.replica_lost`, those of one that fell silent are found at ticks
(`timeouts.lost_because`).

Reads: digest, draining, gossip, handed_back, held, inflight, models, ownership, peers, placer,
region, replicas, subscribed.
Writes: digest, draining, handed_back, models, ownership, peers, placer, replicas, subscribed.
"""

from mesh.core.lifecycle import attempts, failed_attempts, queue_scheduler
from mesh.core.membership.adoption import Adopted, Changes, GivenBack
from mesh.core.membership.handed_back import AdoptedAttempt, LostWatch
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import (
    answered_names,
    beat_by_all_names,
    beat_of_pair,
    digest_by_name,
    with_adapters,
    with_fields,
)
from mesh.core.state import RouterState
from mesh.core.view.replica import replica_name_at, split_replica_name
from schemas.ids import RegionId, ReplicaId
from schemas.state import DownReason, Heartbeat, ReplicaState


def expire(state: RouterState, now: float) -> None:
    """A tick: replicas and regions that are silent for too long are lost."""
    replicas = state.replicas
    replicas.bus.tick(now)
    accepting, rests = not state.draining, state.digest.is_slow
    _take_changes(state, state.ownership.tick(now, accepting=accepting, rests=rests), now)
    replicas.adopted_by_peer = state.ownership.adopted_by(now) is not None
    for name, orphans in replicas.expire(now):
        state.digest.busy(now)
        _notify_lost(state, name, orphans)
        # It can't be sent their decode stage; requests that it has may still be answered.
        waiting = [one for one in state.inflight.values() if one.will_decode_on(name)]
        if waiting:
            failed_attempts.replica_lost(state, waiting, name, "its heartbeats are missing", now)
    for name in replicas.forgotten(now):
        state.placer.forget_replica(name)
    state.peers.expire(now, replicas.bus.paused_s)
    if state.handed_back.watched:
        _expire_handed_back(state, now)
    _subscribe_needed_heartbeats(state)
    state.models.expire(now)
    state.placer.expire(now)


def publish_digest_if_due(state: RouterState, now: float, *, has_changed: bool = True) -> None:
    """`has_changed`: what peers act on may have; else only time has passed."""
    if state.inflight or state.ownership.adopted:
        state.digest.busy(now)
    digest = state.digest.due(
        now,
        accepting=not state.draining,
        adopted=state.ownership.adopted,
        rtt_s=state.peers.round_trips,
        routers=state.gossip.routers,
        has_changed=has_changed,
    )
    if digest is not None:
        state.emit(fx.PublishDigest(digest))


def drain(state: RouterState, now: float) -> None:
    """Accept no new requests from now on."""
    state.draining = True
    publish_digest_if_due(state, now)


# Leases.


def release_expired_leases(state: RouterState, now: float) -> None:
    """Before anything is decided: this process may have been suspended."""
    _take_changes(state, state.ownership.release_expired(now), now)


def on_lease_heard(state: RouterState, event: ev.LeaseHeard, now: float) -> None:
    _take_changes(state, state.ownership.heard(event, now), now)


def on_lease_answered(state: RouterState, event: ev.LeaseAnswered, now: float) -> None:
    _take_changes(state, state.ownership.answered(event, now), now)


def _take_changes(state: RouterState, changes: Changes, now: float) -> None:
    for change in changes:
        if isinstance(change, Adopted):
            state.peers.remember(change.region)
            _subscribe_needed_heartbeats(state)
        elif isinstance(change, GivenBack):
            _hand_back(state, change.region, now)
        else:
            state.emit(change)


def _hand_back(state: RouterState, region: RegionId, now: float) -> None:
    """Place on its replicas no more. Attempts under way end as if the region had placed them,
    and the replicas' heartbeats are received until then."""
    ours: dict[ReplicaId, list[AdoptedAttempt]] = {}
    for record in state.inflight.values():
        if record.peer or record.replica is None:
            continue
        if split_replica_name(record.replica).region == region:
            attempt = AdoptedAttempt(record.request.key, record.attempt)
            ours.setdefault(record.replica, []).append(attempt)
            attempts.leave_to_its_region(state, record, now)
    for name in state.replicas.names_of(region):
        if (replica := state.replicas.get(name)) is not None:
            state.handed_back.keep(replica, ours.get(name, ()), now)
        state.replicas.remove(name)
        state.placer.forget_replica(name)
    publish_digest_if_due(state, now)
    _subscribe_needed_heartbeats(state)


def _subscribe_needed_heartbeats(state: RouterState) -> None:
    """Subscribe to peers' heartbeats, which cross their links, only while they are needed."""
    wanted = {*state.ownership.adopted, *state.handed_back.regions}
    for region in sorted(wanted ^ state.subscribed):
        state.emit(fx.HearReplicas(region, region in wanted))
    state.subscribed = wanted


def _expire_handed_back(state: RouterState, now: float) -> None:
    living = [region for region, peer in state.peers if peer.digests]
    ours = (attempt for watch in state.handed_back.watched.values() for attempt in watch.ours)
    awaited = [attempt for attempt in ours if _is_awaited(state, attempt)]
    for gone in state.handed_back.expire(now, living, awaited):
        _replica_gone(state, gone, now)


def _is_awaited(state: RouterState, attempt: AdoptedAttempt) -> bool:
    record = state.inflight.get(attempt.key)
    if record is None or record.held_since is not None:
        return False
    return record.attempt == attempt.attempt


def _replica_gone(state: RouterState, gone: LostWatch, now: float) -> None:
    _notify_lost(state, gone.name, gone.orphans)
    lost = [state.inflight[one.key] for one in gone.ours if _is_awaited(state, one)]
    for record in lost:
        attempts.cancel(state, record)
    failed_attempts.replica_lost(state, lost, gone.name, gone.why, now)


def _notify_lost(state: RouterState, name: ReplicaId, orphans: tuple[str, ...]) -> None:
    region, replica = split_replica_name(name)
    for inbox in orphans:
        state.emit(fx.TellLost(inbox, replica, region))


# Heartbeats and digests.


def on_heartbeat(state: RouterState, event: ev.HeartbeatSeen, now: float) -> None:
    if state.handed_back.watched:
        gone = state.handed_back.seen(event.heartbeat, now)
        if gone is not None:
            _replica_gone(state, gone, now)
    beat = _as_known_here(state, event.heartbeat)
    if beat is None:
        return
    change = state.replicas.see(beat, now)
    state.replicas.told(beat, now)
    if beat.state is not ReplicaState.GONE:
        state.models.see(answered_names(beat) if beat.routes else beat.models, now)
    if change.restarted:
        state.placer.forget_replica(beat.replica)
        _notify_lost(state, beat.replica, change.orphans)
        there = [one for one in state.inflight.values() if one.needs(beat.replica)]
        failed_attempts.replica_lost(state, there, beat.replica, "the agent restarted or left", now)
    if state.held.keys:
        queue_scheduler.offer(state, beat.replica, now)
    if change.changed:
        _replica_changed(state, beat, now)


def _replica_changed(state: RouterState, beat: Heartbeat, now: float) -> None:
    if beat.down_reason == DownReason.ASLEEP:  # its memory is given back, cache and all
        for index in state.placer.replica_indexes:
            index.leave_until(beat.replica, now)
    publish_digest_if_due(state, now)


def _as_known_here(state: RouterState, beat: Heartbeat) -> Heartbeat | None:
    """The heartbeat with the names in the tables; None for a region not owned."""
    if beat.term:
        state.ownership.saw_term(beat.region, beat.term)
    if beat.loadable or beat.loading:
        state.replicas.note_on_demand(beat)
        beat = with_adapters(beat)
    if beat.paths or beat.routes:
        beat = beat_by_all_names(beat)
    if beat.region == state.region:
        return beat if beat.kv is None else beat_of_pair(beat, state.replicas.has_ready)
    if beat.region not in state.ownership.adopted:
        return None
    name = replica_name_at(beat.region, beat.replica, state.region)
    taken = beat.owner_taken if beat.owner == state.region else {}
    # Without a part in pairs, it answers whole requests only, for the models that it names.
    return with_fields(beat, replica=name, taken=taken, kv=None)


def on_digest(state: RouterState, event: ev.DigestSeen, now: float) -> None:
    digest = digest_by_name(event.digest) if event.digest.models_by_path else event.digest
    if state.peers.see(digest, now):
        state.emit(fx.RequestAgain(digest.region))
    state.ownership.digest_seen(digest, now)
    state.models.see(digest.models, now)
    if state.held.keys:
        queue_scheduler.digest_arrived(state, digest, now)


def on_round_trip(state: RouterState, event: ev.RttMeasured, now: float) -> None:
    state.peers.measured(event.region, event.rtt_s, now)
