"""Attempts: begun and left, what they occupy in the tables, their effects and receipts.

What an attempt occupies (a hand-off to a replica, a forwarded request) is counted once and released
once, and every placement has its receipt. The caller decides whether and where.

Reads: ownership, peers, placer, region, replicas, shares, unlearned.
Writes: peers, placer, replicas, told_held_at, unlearned.
"""

from mesh.core.lifecycle import fair_turns
from mesh.core.model import effects as fx
from mesh.core.model.request import Request, Served
from mesh.core.placement.pairs import PrefillChoice
from mesh.core.placement.placement import PlacementResult
from mesh.core.policies.base import CacheEstimate, Destination
from mesh.core.requests.record import PrefillStage, RequestRecord, Suspect
from mesh.core.state import RouterState
from mesh.core.view.outliers import SEEN, FailingPlaces
from mesh.core.view.replica import split_replica_name
from schemas.decision import CandidateKind, Decision, Placement
from schemas.exchange import HELD_S
from schemas.ids import RegionId, ReplicaId


def decided(
    state: RouterState,
    request: Request,
    place: PlacementResult,
    *,
    attempt: int = 1,
    held_s: float = 0.0,
) -> None:
    is_local = place.placement is Placement.LOCAL
    decision = Decision(
        request=request.request_id,
        region=state.region,
        policy=place.policy,
        placement=place.placement,
        replica=place.target if is_local else None,
        prefill=None if place.prefill is None else place.prefill.replica,
        peer=None if is_local else place.target,
        hops=request.hops + (place.placement is Placement.PEER),
        attempt=attempt,
        held_s=held_s,
        reason=place.reason,
        residency=request.residency,
        candidates=place.candidates,
        considered=place.considered,
    )
    state.emit(fx.Decided(request.key, decision, place.unlisted))


def begin(
    state: RouterState,
    record: RequestRecord,
    place: PlacementResult,
    now: float,
    *,
    learn_later: bool = False,
) -> None:
    """Begin an attempt at `place`.

    A peer's request ends here with it, as the replica answers to the peer's inbox, or with its
    prefill stage. `learn_later`: policies learn of it by `learn`, which is called before
    anything else happens. That takes as long as the decision, and the replica need not wait.
    """
    request, name = record.request, place.target
    assert name is not None, "an attempt goes to a place"
    if place.placement is not Placement.LOCAL:
        _forward(state, record, place, name, now)
        return
    if place.prefill is not None:
        _begin_pair(state, record, place, place.prefill, now)
        return
    replicas, slow = state.replicas, state.replicas.slow
    replica, prefill_tokens = ReplicaId(name), place.prefill_tokens
    # The rest of a stream begins for the router when its client has read what was said before.
    if request.answer_inbox is None and not record.continuations:
        slow.sent(request, replicas.by_name[replica], prefill_tokens, now)
    handoff = replicas.hand_off(replica, request.prompt.tokens, prefill_tokens, now)
    if replicas.failing.places:
        replicas.failing.tries(name, request.model, request.key, now)
    if slow.by_key:
        slow.placed(name, request.model, len(replicas.serving(request.model)))
    destination = Destination(CandidateKind.REPLICA, name)
    record.dispatch(destination, handoff, now)
    decided(state, request, place, attempt=record.attempt, held_s=record.held_s)
    if learn_later:
        state.unlearned = request, destination, now
    else:
        state.placer.placed(request, destination, now)
    state.emit(
        _work(
            state, record, replica, handoff, request.answer_inbox, prefill_tokens, place.may_queue
        )
    )
    if request.answer_inbox is not None:
        replicas.relay(replica, request.answer_inbox, request.deadline)
        record.end()


def learn(state: RouterState) -> None:
    """Let policies learn of the last request, if they have not."""
    if (unlearned := state.unlearned) is not None:
        state.unlearned = None
        state.placer.placed(*unlearned)


def _work(
    state: RouterState,
    record: RequestRecord,
    replica: ReplicaId,
    handoff: int,
    inbox: str | None,
    prefill_tokens: int,
    may_queue: bool,
    pair: fx.KvPair | None = None,
) -> fx.Dispatch:
    region, bus_name = split_replica_name(replica)
    known = state.replicas.get(replica)
    return fx.Dispatch(
        record.request.key,
        record.attempt,
        bus_name,
        handoff,
        inbox,
        prefill_tokens,
        may_queue,
        region,
        state.ownership.owned.get(region or state.region),
        region is None and known is not None and known.heartbeat.held_seq is not None,
        pair,
    )


def _begin_pair(
    state: RouterState,
    record: RequestRecord,
    place: PlacementResult,
    choice: PrefillChoice,
    now: float,
) -> None:
    """Begin the prefill stage, and the decode stage where the engines need both at once."""
    request, tokens = record.request, record.request.prompt.tokens
    first, second = ReplicaId(choice.replica), ReplicaId(place.target or "")
    handoff = state.replicas.hand_off(first, tokens, place.prefill_tokens, now)
    reserved = state.replicas.reserve(second, tokens)
    stage = PrefillStage(first, handoff, now, choice.pair, reserved)
    if state.replicas.failing.places:
        for replica in (first, second):
            state.replicas.failing.tries(replica, request.model, request.key, now)
    destination = Destination(CandidateKind.REPLICA, second)
    record.dispatch(destination, None, now, stage)
    decided(state, request, place, attempt=record.attempt, held_s=record.held_s)
    state.placer.placed(request, destination, now)
    # After it, which decides whether peers may know of the prompt.
    stage.matched_blocks, stage.matched_at = state.placer.prefills(request, first, now)
    work = _work(state, record, first, handoff, None, place.prefill_tokens, place.may_queue)
    state.emit(fx.DispatchPrefill(work, choice.pair))
    if choice.pair.kind.is_at_once:
        decode(state, record, now)


def decode(state: RouterState, record: RequestRecord, now: float) -> None:
    """Begin the decode stage of an attempt on a pair."""
    stage, replica, request = record.prefill, record.replica, record.request
    assert stage is not None and stage.reserved is not None, "its first stage has begun"
    assert replica is not None, "the decode replica of a pair is chosen with it"
    state.replicas.over(replica, stage.reserved)
    handoff = state.replicas.hand_off(replica, request.prompt.tokens, 1, now)
    record.decode(handoff, now)
    inbox = request.answer_inbox
    state.emit(_work(state, record, replica, handoff, inbox, 1, True, stage.pair))
    if inbox is not None:
        state.replicas.relay(replica, inbox, request.deadline)


def prefilled(state: RouterState, record: RequestRecord, served: Served | None, now: float) -> None:
    """The prefill stage is over, at that cost."""
    stage = record.prefill
    assert stage is not None, "only a stage ends"
    state.replicas.over(stage.replica, stage.handoff)
    record.prefilled()
    if served is not None:
        held = CacheEstimate(stage.matched_blocks, stage.matched_at, stage.began_at)
        state.placer.prefilled(record.request, stage.replica, held, served, now)


def _forward(
    state: RouterState, record: RequestRecord, place: PlacementResult, name: str, now: float
) -> None:
    request, peer = record.request, RegionId(name)
    destination = Destination(CandidateKind.PEER, name)
    record.dispatch(destination, None, now)
    decided(state, request, place, attempt=record.attempt, held_s=record.held_s)
    state.peers.forwarded(peer, now)
    if state.peers.failing.places:
        state.peers.failing.tries(peer, request.model, request.key, now)
    state.placer.placed(request, destination, now)
    state.emit(fx.Forward(request.key, record.attempt, peer, record.in_line_s(now)))


def began(state: RouterState, record: RequestRecord, now: float, *, shows_ttft: bool) -> None:
    """A first byte is here; policies learn from it if it shows when the first token was."""
    if record.handoff is not None and record.replica is not None:
        state.replicas.began(record.replica, record.handoff)
    if shows_ttft:
        state.replicas.slow.began(record.request.key, now)
    if record.destination is not None and shows_ttft:
        state.placer.began(record.request, record.destination, now)


def served(state: RouterState, record: RequestRecord, served: Served | None, now: float) -> None:
    """The whole answer has arrived; policies learn from its cost, if that is known."""
    if served is None:
        return
    replicas, request = state.replicas, record.request
    if record.suspects or replicas.failing.places or state.peers.failing.places:
        _judge(state, record, served, now)
    if state.shares:
        fair_turns.served(state, request, served, now)
    replicas.slow.served(request.key, served, now)
    if record.destination is not None:
        state.placer.served(request, record.destination, served, now)


def leave(state: RouterState, record: RequestRecord, now: float) -> None:
    """Release what the attempt under way occupies. The record's next transition follows."""
    replicas = state.replicas
    replicas.slow.left(record.request.key)
    if replicas.failing.places or state.peers.failing.places:
        for place in _places_of(record):
            _failing_of(state, record).left(place, record.request.model, record.request.key)
    if record.handoff is not None and record.replica is not None:
        replicas.over(record.replica, record.handoff)
    if record.prefill is not None:
        _leave_prefill(state, record, record.prefill)
        if not record.request.kind.ends_here:
            return  # policies don't follow peers' requests
    if record.destination is not None:
        state.placer.left(record.request, record.destination, now)


def _judge(state: RouterState, record: RequestRecord, served: Served, now: float) -> None:
    """What was answered is a good end, and shows that others failed it by their own fault."""
    model = record.request.model
    if record.suspects and (served.prompt_tokens or served.output_tokens):
        for suspect in record.suspects:
            table = state.peers.failing if suspect.is_peer else state.replicas.failing
            if _is_there(state, suspect.place, is_peer=suspect.is_peer):
                table.failed(suspect.place, model, suspect.what, now)
    for place in _places_of(record):
        _failing_of(state, record).answered(place, model)


def failed(
    state: RouterState,
    record: RequestRecord,
    what: str,
    now: float,
    *,
    is_sure: bool,
    weight: int = 1,
    is_late: bool = False,
    in_prefill: bool = False,
) -> None:
    """The attempt under way failed. `is_sure`: by its place's fault; else an answer elsewhere
    has to show it. `weight`: of the failure, SEEN at least inside an answer. `is_late`: the place
    went on with others, and only this one waited too long. `in_prefill`: in the
    prefill stage of a pair. An error that the decode engine of a pair answers with may be of the
    transfer, and so of either one: neither is judged."""
    stage, place = record.prefill, record.peer or record.replica
    if stage is not None and in_prefill:
        place = stage.replica
    if place is None or (stage is not None and not (in_prefill or is_sure)):
        return
    is_peer = record.peer is not None
    if not is_sure:
        record.suspect(Suspect(place, what, is_peer=is_peer))
    elif _is_there(state, place, is_peer=is_peer):
        weight = max(weight, SEEN) if record.has_started else weight
        table, model = _failing_of(state, record), record.request.model
        table.failed(place, model, what, now, weight=weight, is_late=is_late)


def _is_there(state: RouterState, place: str, *, is_peer: bool) -> bool:
    return place in (state.peers.by_region if is_peer else state.replicas.by_name)


def _failing_of(state: RouterState, record: RequestRecord) -> FailingPlaces:
    return state.replicas.failing if record.peer is None else state.peers.failing


def _places_of(record: RequestRecord) -> tuple[str, ...]:
    """Of the attempt under way: of a pair both replicas."""
    place = record.peer or record.replica or ""
    return (place,) if record.prefill is None else (place, record.prefill.replica)


def _leave_prefill(state: RouterState, record: RequestRecord, stage: PrefillStage) -> None:
    if stage.reserved is not None and record.replica is not None:
        state.replicas.over(record.replica, stage.reserved)
    if not stage.is_open:
        return
    state.replicas.over(stage.replica, stage.handoff)
    request = record.request
    state.emit(fx.CancelPrefill(request.key, record.attempt, stage.replica))
    if not record.has_started:  # else its prompt was computed
        new = request.prompt.hashes[stage.matched_blocks :]
        state.placer.never_prefilled(stage.replica, new, stage.began_at)


def tell_held(state: RouterState, request: Request, now: float) -> None:
    """Send HELD to the router of a peer's request, which waits here."""
    assert request.answer_inbox is not None, "only a peer's request has another router"
    state.told_held_at[request.key] = now
    state.emit(fx.TellHeld(request.answer_inbox, request.hops))


def tell_held_if_due(state: RouterState, request: Request, now: float) -> None:
    """A tick: the same again, if it is a peer's request and time."""
    if now - state.told_held_at.get(request.key, now) >= HELD_S:
        tell_held(state, request, now)


def rest(
    state: RouterState, record: RequestRecord, now: float, *, in_prefill: bool = False
) -> None:
    """The replica or peer that did not take this attempt gets no work until its next report."""
    if in_prefill and record.prefill is not None:
        state.replicas.refused(record.prefill.replica, now)
    elif record.peer is not None:
        state.peers.refused(record.peer, now)
    elif record.replica is not None:
        state.replicas.refused(record.replica, now)


def cancel(state: RouterState, record: RequestRecord, why: str = "") -> None:
    """Cancel the attempt at the place that answers it; `leave` cancels its prefill stage. `why`:
    for people, where it goes elsewhere for its place's sake."""
    if record.is_prefilling:
        return
    region, replica = record.peer, record.replica
    if region is None and replica is not None:
        region, replica = split_replica_name(replica)
    state.emit(
        fx.CancelAttempt(record.request.key, record.attempt, region or state.region, replica, why)
    )


def leave_to_its_region(state: RouterState, record: RequestRecord, now: float) -> None:
    """Its adopted replica belongs to its own region again."""
    assert record.replica is not None, "an attempt on an adopted replica"
    region, replica = split_replica_name(record.replica)
    assert region is not None, "adopted replicas are named with their region"
    leave(state, record, now)
    record.handed_back(region, replica)
