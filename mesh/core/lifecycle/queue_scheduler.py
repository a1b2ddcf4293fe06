"""When held requests are tried again: whenever a replica or peer may have room.

A request that can't use the room (that place failed it before, or it waits for a better one)
doesn't block those behind it that can.

Where the policy judges load, a try prices all candidates for each request. There it is made once a
replica or peer has reported something new, at the earliest RETRY_S after the one before; and
without news after UNCHANGED_S, as queues are computed meanwhile. Who goes first: `fair_turns`.

Reads: begun, choosy, has_news, held, inflight, peer_reports, placer, replica_reports, replicas,
shares, tried_at.
Writes: begun, choosy, has_news, held, inflight, peer_reports, replica_reports, told_held_at,
tried_at.
"""

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

from mesh.core.lifecycle import admission, attempts, ends, fair_turns
from mesh.core.model.request import Request
from mesh.core.model.served_names import work_name
from mesh.core.placement.placement import NONE, PlacementResult
from mesh.core.requests.hold_queue import Need, need_of
from mesh.core.requests.record import RequestRecord
from mesh.core.state import Reports, RouterState
from mesh.core.view.bus_status import AWAY
from schemas.decision import Placement
from schemas.ids import ModelId, ReplicaId
from schemas.state import Digest, Heartbeat

OTHERS_WAIT = "others wait for this model"
# Requests held by the policy's choice that don't block newcomers, and are tried at every event.
CHOOSY_MAX = 16
RETRY_S = 0.02  # a hundred replicas would keep a core busy with the held requests
UNCHANGED_S = 0.1  # a heartbeat's time
REPORTS_MAX = 32_768  # replicas, and routers of peers
# Most of what the price of a replica, and whether it is available, depend on beside what was sent
# to it and the wait for a slot, which follows from `waited`: itself that differs in each heartbeat
# while any prompt waits. Where only something else has changed, a request is tried after
# UNCHANGED_S.
PRICED_BY: Callable[[Heartbeat], tuple[object, ...]] = attrgetter(
    "state",
    "models",
    "full",
    "pending",
    "running",
    "outstanding",
    "outstanding_max",
    "prefill_queued_tokens",
    "batch_max",
    "kv_used_ratio",
    "kv_capacity_tokens",
    "prefill_s_per_token",
    "prefill_base_s",
    "loadable",
    "loading",
    "adapters_busy",
    "adapters_free",
    "prefill_prior",
)


def must_queue(state: RouterState, newcomer: Request) -> bool:
    """Whether requests for the same model and labels are held before it.

    Requests that wait for other labels must not hold it up.
    """
    model, labels, _ = need_of(newcomer)
    ours_and_theirs = (model, labels, False), (model, labels, True)
    waiting = sum(map(state.held.alike, ours_and_theirs))
    if not waiting:
        return False
    choosy = sum(
        choosing in ours_and_theirs and _is_held(state, key)
        for key, choosing in state.choosy.items()
    )
    return waiting > choosy


def place_new(state: RouterState, request: Request, now: float) -> PlacementResult:
    """Place it. Local replicas that held requests wait for are not for it; peers may be."""
    if state.replicas.bus.is_away(now):
        return state.placer.held(request, AWAY)
    shares = fair_turns.shares_of(state, request, now)
    must_wait = must_queue(state, request)
    if must_wait and shares is not None:
        must_wait = not fair_turns.goes_first(state, request, shares)
    if must_wait and not state.placer.judges_load:
        return state.placer.held(request, OTHERS_WAIT)
    ahead, queue = state.held.waiting(request.model), len(state.held) + 1
    if shares is not None:
        ahead = fair_turns.ahead(state, request)
    kept = fair_turns.kept_from(state, request, now, {}) if state.shares else NONE
    place = state.placer.place(request, (), now, ahead, queue, kept_from=kept)
    if must_wait and place.placement is Placement.LOCAL:
        return state.placer.held(request, OTHERS_WAIT)
    place = _within_its_share(state, request, place, now)
    _sent_to(state, place)
    return place


def _within_its_share(
    state: RouterState, request: Request, place: PlacementResult, now: float
) -> PlacementResult:
    """That place, or held though it is available: the request would only wait there, or the peer
    that it would go back to would only send it here again."""
    if not state.shares or fair_turns.leaves_room(state, request, place, now):
        return place
    return state.placer.held(request, fair_turns.OVER_ITS_SHARE)._replace(by_choice=True)


def joined(state: RouterState, request: Request, place: PlacementResult) -> None:
    """A newcomer is held for the reason in `place`."""
    if place.by_choice and len(state.choosy) < CHOOSY_MAX:
        state.choosy[request.key] = need_of(request)


def _is_held(state: RouterState, key: int) -> bool:
    record = state.inflight.get(key)
    return record is not None and record.held_since is not None


def place_waiting(state: RouterState, now: float) -> None:
    """Place held requests in order, as far as there is room."""
    if state.replicas.bus.is_away(now):
        return
    state.choosy.clear()
    state.tried_at, state.has_news = now, False
    stuck: set[tuple[Need, str, frozenset[str], frozenset[str]]] = set()
    done: set[tuple[Need, str]] = set()  # none of whose requests can be placed
    needs = len(state.held.held_needs) * state.placer.policy_count
    found: dict[ModelId, frozenset[str]] = {}  # what is kept, by work
    ahead: Counter[ModelId] = Counter()  # requests by work that stay held, up to here
    for request in fair_turns.in_order(state, now):
        record = state.inflight[request.key]
        need, avoid = (need_of(request), state.placer.policy_name(request)), record.avoided(now)
        work = work_name(request.model)
        kept = fair_turns.kept_from(state, request, now, found) if state.shares else NONE
        if not stuck.isdisjoint(((*need, NONE, NONE), (*need, avoid, kept))):
            ahead[work] += 1
            continue
        queue = len(state.held)
        place = state.placer.place(
            request, avoid, now, ahead[work], queue, is_held=True, kept_from=kept
        )
        place = _within_its_share(state, request, place, now)
        record.decided(place)
        ahead[work] += place.target is None
        if place.target is not None:
            _sent_to(state, place)
            state.held.remove(request)
            begin(state, record, place, now)
            found.clear()
            continue
        if place.by_choice and len(state.choosy) < CHOOSY_MAX:
            state.choosy[request.key] = need_of(request)
            continue
        stuck.add((*need, avoid, kept))
        if not avoid and (not kept or fair_turns.kept_from_all(state, request, now)):
            done.add(need)
            if len(done) == needs:
                return


def hold(state: RouterState, record: RequestRecord, now: float) -> None:
    """The attempt under way, if any, is over: it waits at its place by class and arrival."""
    if ends.end_copy(state, record, now):
        return
    attempts.leave(state, record, now)
    if state.shares:
        fair_turns.came_back(state, record.request, now)
    record.hold(now)
    state.held.put(record.request, comes_back=record.attempt > 0)
    admission.waits(state, record.request, now)


def begin(
    state: RouterState,
    record: RequestRecord,
    place: PlacementResult,
    now: float,
    *,
    learn_later: bool = False,
) -> None:
    """Begin an attempt, unless it is too late (own: by its objective), or hand it back."""
    request = record.request
    if record.held_since is not None:
        if not request.kind.ends_here and place.placement is Placement.PEER:
            ends.refuse_as_elsewhere(state, record, now)
            return
        admission.released(state, request, now)
    may_be_late = request.slo_ttft_s is not None or place.placement is not Placement.LOCAL
    if may_be_late and ends.shed_if_too_late(state, record, place, now):
        return
    state.begun.count(now)
    if state.shares:
        fair_turns.placed(state, request, place, now)
    if request.kind.ends_here:
        attempts.begin(state, record, place, now, learn_later=learn_later)
        return
    state.told_held_at.pop(request.key, None)
    del state.inflight[request.key]
    begin_foreign(state, record, place, now)


def begin_foreign(
    state: RouterState, record: RequestRecord, place: PlacementResult, now: float
) -> None:
    """Begin an attempt for a peer's request, which stays here while a prefill stage runs."""
    if place.prefill is not None:
        state.inflight[record.request.key] = record
    attempts.begin(state, record, place, now)
    if record.is_prefilling:
        attempts.tell_held(state, record.request, now)


def offer(state: RouterState, name: ReplicaId | None, now: float) -> None:
    """Try held requests, if this replica may have room now that it had not before."""
    replica = None if name is None else state.replicas.get(name)
    if replica is None:
        return
    if not state.placer.may_go(replica, state.held.models(), now):
        return
    beat, sent = replica.heartbeat, replica.on_the_way
    sent_there = sent.count, sent.waiting, sent.tokens, sent.prefill_tokens
    (s_per_token, base_s), slot_s = replica.prefill_line, 0.0
    if beat.waited is not None and s_per_token is not None:
        slot_s = beat.waited.slot_s(s_per_token, base_s or 0.0)
    report = PRICED_BY(beat), slot_s, sent_there
    _note(state, state.replica_reports, (beat.replica,), report)
    if _is_due(state, now):
        place_waiting(state, now)


def digest_arrived(state: RouterState, digest: Digest, now: float) -> None:
    """The same of a peer, by its digest."""
    report = digest.accepting, digest.replicas_free, digest.queue
    _note(state, state.peer_reports, (digest.region, digest.router), report)
    if digest.replicas_free and _is_due(state, now):
        place_waiting(state, now)


def tick(state: RouterState, now: float) -> None:
    """Try held requests, as time has passed."""
    if _is_due(state, now):
        place_waiting(state, now)


def _note(
    state: RouterState, table: Reports, place: tuple[str, ...], report: tuple[object, ...]
) -> None:
    if table.get(place) != report:
        if len(table) >= REPORTS_MAX:
            table.clear()  # one try too many
        table[place] = report
        state.has_news = True


def _sent_to(state: RouterState, place: PlacementResult) -> None:
    """Who is tried from now on sees it there, so that its end is news."""
    if place.placement is Placement.LOCAL and place.target is not None:
        state.replica_reports.pop((place.target,), None)


def _is_due(state: RouterState, now: float) -> bool:
    """Whether a try has not to wait, which it has where the policy judges load by itself."""
    wait_s = RETRY_S if state.has_news else UNCHANGED_S
    return not state.placer.judges_load or now - state.tried_at >= wait_s
