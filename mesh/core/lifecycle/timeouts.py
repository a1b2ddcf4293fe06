"""Timeouts of attempts, waits and requests, and which places not tried yet may serve a request.

Reads: inflight, peers, placer, replicas, settings, targets.
Writes: nothing.
"""

from collections.abc import Collection

from mesh.core.model.request import Request
from mesh.core.model.served_names import is_model, model_of
from mesh.core.requests.hold_queue import Need
from mesh.core.requests.record import RequestRecord
from mesh.core.state import RouterState
from mesh.core.view.bus_status import UNREACHABLE
from mesh.core.view.peers import Peer
from schemas.exchange import SILENCE_S_MAX, WORKING_S
from schemas.ids import ModelId
from schemas.state import ModelCard

RETURN_S = WORKING_S + 3.0  # by then an answer that goes on sends a frame after the bus's return
UNHEARD_S = RETURN_S  # by then the first frame of work that has arrived is there
DEADLINE_PASSED = "the request's deadline has passed"


def ready_models(state: RouterState) -> tuple[ModelId, ...]:
    """Models that some ready replica of the mesh serves, full or not; by name."""
    ready = {
        model
        for replica in state.replicas
        for model in replica.heartbeat.models
        if state.replicas.serves(replica, model)
    }
    for _, peer in state.peers:
        for digest in peer.digests.values():
            ready.update(model for model, has in digest.models.items() if has.ready)
    return tuple(sorted(filter(is_model, ready)))


def model_card(state: RouterState, model: ModelId) -> ModelCard:
    """Its card, by an engine of this region rather than of a peer."""
    if (card := state.replicas.card(model)) is not None:
        return card
    sent = (seldom for _, peer in state.peers for seldom in peer.seldom_sent.values())
    cards = (seldom.cards.get(model) for seldom in sent)
    return next((card for card in cards if card is not None), ModelCard())


def others_serve(
    state: RouterState,
    record: RequestRecord,
    model: ModelId | None = None,
    besides: Collection[str] = (),
) -> bool:
    """Whether a place that has not failed this request serves its model, free or not.

    `model`: another one instead of its own. `besides`: replicas that don't count.
    """
    request, residency = record.request, state.placer.residency
    model = model or request.model
    wanted = residency.wanted(request)
    avoid = record.avoid.union(besides)
    for replica in state.replicas:
        may_answer = state.replicas.may_answer(replica, model, avoid)
        if may_answer and residency.takes_replica(wanted, replica):
            return True
    return _may_leave(state, is_foreign=not request.kind.ends_here) and any(
        region not in record.avoid
        and residency.takes_peer(wanted, region, peer)
        and peer.ready(model, wanted) > 0
        for region, peer in state.peers
    )


def serving(state: RouterState, need: Need, now: float, enough: int = 1) -> int:
    """Replicas, here and in other regions, that serve requests of this need, free or not.

    Counted up to `enough`. 0 while the bus is away; without replicas that the router is
    blind to.
    """
    model, labels, is_foreign = need
    replicas, residency = state.replicas, state.placer.residency
    if replicas.bus.lost_at is not None:
        return 0
    wanted, found = residency.wanted_by(labels, is_foreign=is_foreign), 0
    for replica in replicas.serving(model):
        if found >= enough:
            return found
        found += (
            replicas.serves(replica, model)
            and residency.takes_replica(wanted, replica)
            and not replicas.is_blind_to(replica, now)
        )
    if _may_leave(state, is_foreign=is_foreign):
        for region, peer in state.peers:
            if found < enough and residency.takes_peer(wanted, region, peer):
                found += peer.ready(model, wanted)
    return found


def queue_delay_s(state: RouterState, request: Request) -> float:
    """The limit of its wait in queues, if it has no objective; 0: none."""
    by_model = state.targets.queue_delay_s
    if not by_model:
        return state.settings.queue_delay_s_max
    return by_model.get(model_of(request.model), state.settings.queue_delay_s_max)


def _may_leave(state: RouterState, *, is_foreign: bool) -> bool:
    return not is_foreign and state.settings.hops_max > 0


def unserved_because(state: RouterState, record: RequestRecord) -> str | None:
    """Why no place at all may serve it, or None if one will have room."""
    if state.replicas.bus.lost_at is not None:
        return UNREACHABLE
    if others_serve(state, record):
        return None
    within = state.placer.residency.within(record.request)
    return f"no replica{within} serves {record.request.model!r} at present"


def due_for_check(state: RouterState, now: float) -> list[RequestRecord]:
    """Requests that may have run out of time: few of thousands at a tick."""
    settings = state.settings
    # An attempt with a frame within this time can't be lost.
    patience_s = min(SILENCE_S_MAX, settings.heartbeat_lost_s, settings.peer_reply_s)
    silent_since = now - patience_s
    return [
        record
        for record in state.inflight.values()
        if record.held_since is not None
        or now >= record.request.deadline
        or (record.last_frame_at < silent_since and lost_because(state, record, now) is not None)
        or (record.peer is not None and is_kept_too_long(state, record, now))
        or (record.prefill is not None and record.is_foreign_prefill)
    ]


def is_kept_too_long(state: RouterState, record: RequestRecord, now: float) -> bool:
    """Whether a peer holds it for longer than any request may be held, by its defect."""
    if record.peer is None or not record.waits_at_peer:
        return False
    peer = state.peers.get(record.peer)
    rtt_s = None if peer is None else peer.rtt_s
    patience_s = state.settings.hold_s_max + state.settings.peer_reply_s + (rtt_s or 0.0)
    return now - record.attempted_at > patience_s


def is_left_waiting(state: RouterState, record: RequestRecord, now: float) -> bool:
    """Whether the peer's router that held it is gone, which is not that region's fault."""
    return record.waits_at_peer and not is_kept_too_long(state, record, now)


def lost_because(state: RouterState, record: RequestRecord, now: float) -> str | None:
    """Why the attempt under way can bring no answer, or None."""
    if record.is_broken:
        return None  # none is under way
    bus = state.replicas.bus
    silent_s = bus.silent_s(record.last_frame_at, now)
    # Its agent has other nats-servers than this router where a region has three: one that was lost
    # may have had the work, while neither heard of the other's loss.
    # A peer's may wait in a busy link.
    peer = None if record.peer is None else state.peers.get(record.peer)
    is_unheard = record.is_unheard and not (peer is not None and peer.may_be_late(now))
    if silent_s > (UNHEARD_S if is_unheard else SILENCE_S_MAX):
        who = "the replica" if bus.lost_at is None else f"{UNREACHABLE}: the replica"
        return f"{who} has been silent for {silent_s:.0f} s"
    if record.last_frame_at < bus.returned_at and bus.silent_s(bus.returned_at, now) > RETURN_S:
        return "its answer was lost with the bus"
    if is_kept_too_long(state, record, now):
        return f"region {record.peer} has kept the request waiting for too long"
    if record.peer is not None:
        assert peer is not None, "peers that requests were forwarded to are kept"
        return _lost_at_peer_because(state, record, peer, silent_s, now)
    name = record.working
    replica = None if name is None else state.replicas.get(name)
    if replica is None:
        lost = name is not None and silent_s > state.settings.heartbeat_lost_s
        return f"replica {name} was lost: no heartbeat and no answer" if lost else None
    # Without heartbeats only the answer shows; an agent with nothing to send sends WORKING.
    patience_s = state.settings.heartbeat_lost_s + WORKING_S
    if state.replicas.is_blind_to(replica, now) and silent_s > patience_s:
        return f"replica {name} does not answer, and no heartbeats arrive"
    return None


def _lost_at_peer_because(
    state: RouterState, record: RequestRecord, peer: Peer, silent_s: float, now: float
) -> str | None:
    is_unplaced = record.replica is None and not record.has_started
    # In a busy link the request, or the word of it, may wait behind other bytes, as pings then
    # do: the time for the word is counted from when these are answered again.
    word_s = 0.0 if peer.may_be_late(now) else min(silent_s, now - peer.answers_since)
    if is_unplaced and word_s > state.settings.peer_reply_s + (peer.rtt_s or 0.0):
        return f"region {record.peer} did not report where it placed the request"
    # Routers of that region may restart while its agent works on. An agent with nothing to send
    # sends WORKING; only when that is missing too is the link cut.
    is_placed = record.replica is not None or record.has_started
    patience_s = state.settings.heartbeat_lost_s + (WORKING_S if is_placed else 0.0)
    if not peer.digests and silent_s > patience_s:
        return f"region {record.peer} can't be reached"
    return None
