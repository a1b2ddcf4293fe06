"""Ends of requests other than by their answer: failed, shed, or refused.

The place in the hold queue, the attempt, and all that they occupied is released. A peer's request
is refused where a client's would fail: the peer's router, which receives this region's digest with
the refusal, then places it elsewhere. The caller decides whether a request must end.

Reads: digest, draining, held, inflight, ownership, placer.
Writes: digest, held, inflight, told_held_at.
"""

from collections.abc import Iterable

from mesh.core.lifecycle import admission, attempts
from mesh.core.lifecycle.admission import LateFirstToken
from mesh.core.model import effects as fx
from mesh.core.model.request import Request
from mesh.core.model.served_names import work_name
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.record import RequestRecord
from mesh.core.requests.retry_after import RETRY_AFTER_S_MAX
from mesh.core.state import RouterState
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.state import Digest

SHUTTING_DOWN = "this router is shutting down"


def fresh_digest(state: RouterState, now: float) -> Digest:
    """This region's digest as of now, for a peer that is being refused."""
    adopted = state.ownership.adopted
    return state.digest.fresh(now, accepting=not state.draining, adopted=adopted)


def end(state: RouterState, record: RequestRecord, now: float) -> None:
    """End it. What its client receives is the caller's to emit."""
    del state.inflight[record.request.key]
    if state.told_held_at:
        state.told_held_at.pop(record.request.key, None)
    if record.held_since is not None:
        state.held.remove(record.request)
        admission.left(state, record.request, now)
    attempts.leave(state, record, now)
    record.end()


def fail(
    state: RouterState,
    record: RequestRecord,
    now: float,
    fault: Fault,
    message: str,
    retry_after_s: float | None = None,
) -> None:
    """End it with an error, or refuse it if it is a peer's."""
    handed_over, replica = record.is_handed_over, record.replica
    held_since = record.held_since
    end(state, record, now)
    if (inbox := record.request.answer_inbox) is not None:
        if handed_over and replica is not None:
            state.emit(fx.StopForwarded(inbox, replica))
            state.emit(fx.TellLost(inbox, replica))
            return
        why = Refusal.DRAINING if fault is Fault.DRAINING else Refusal.NO_REPLICA
        refuse(state, record.request, why, now)
    else:
        key = record.request.key
        state.emit(fx.Fail(key, fault, message, retry_after_s, held_since))


def drained(state: RouterState, records: Iterable[RequestRecord], now: float) -> None:
    """End these because this router shuts down; their attempts are cancelled."""
    for record in list(records):
        if record.held_since is None:
            attempts.cancel(state, record)
        fail(state, record, now, Fault.DRAINING, SHUTTING_DOWN, 1.0)


def refuse(state: RouterState, request: Request, why: Refusal, now: float) -> None:
    """Refuse a peer's request, placed or held."""
    inbox = request.answer_inbox
    assert inbox is not None, "only peers' routers are refused"
    state.emit(fx.RefusePeer(request.key, inbox, why, fresh_digest(state, now)))


def refuse_as_elsewhere(state: RouterState, record: RequestRecord, now: float) -> None:
    """Let the peer place its request elsewhere, which was held here."""
    end(state, record, now)
    refuse(state, record.request, Refusal.ELSEWHERE, now)


def end_copy(state: RouterState, record: RequestRecord, now: float) -> bool:
    """End the copy of a request, which neither waits nor is tried again; False for others."""
    if record.request.kind.waits:
        return False
    fail(state, record, now, Fault.SATURATED, "a copy does not wait")
    return True


def make_room(
    state: RouterState, record: RequestRecord, place: PlacementResult, now: float
) -> bool:
    """Have room in the hold queue, by shedding another request for it if it is full; False if
    this one was shed."""
    request = record.request
    if not state.held.is_full_for(request):
        return True
    last = state.held.gives_way(request)
    if last is None:
        shed(state, record, place, f"{place.reason}, and the hold queue is full", now)
        return False
    is_same = work_name(last.model) == work_name(request.model)
    goes_before = f"{request.priority}" if is_same else f"a request for {request.model}"
    if is_same and last.priority is request.priority:
        goes_before = "a tenant with fewer requests waiting"
    why = f"the hold queue is full, and {goes_before} goes before"
    shed(state, state.inflight[last.key], None, why, now)
    return True


def shed_if_too_late(
    state: RouterState, record: RequestRecord, place: PlacementResult | None, now: float
) -> bool:
    """Shed it if it would miss its objective or, without one, wait too long; whether it was."""
    late = admission.late(state, record, place, now)
    why = late or admission.too_long(state, record, place, now)
    if why is None:
        return False
    joins = place is not None and place.target is None and record.held_since is None
    placed = f"; {place.reason}" if joins and place is not None else ""
    shed(state, record, place, f"{why}{placed}", now, late)
    return True


def shed(
    state: RouterState,
    record: RequestRecord,
    place: PlacementResult | None,
    why: str,
    now: float,
    late: LateFirstToken | None = None,
) -> None:
    """Refuse it with its receipt and a time to retry after."""
    _give_up(state, record, place, why, now)
    retry_after_s = admission.retry_after_s(state, record.request, late, now)
    fault = Fault.SATURATED if late is None else Fault.TOO_LATE
    fail(state, record, now, fault, f"no room in time: {why}", retry_after_s)


def unserved(state: RouterState, record: RequestRecord, why: str, now: float) -> None:
    """Refuse it with its receipt: no place that may serve it is there."""
    _give_up(state, record, None, why, now)
    fail(state, record, now, Fault.NO_REPLICA, why, RETRY_AFTER_S_MAX)


def _give_up(
    state: RouterState, record: RequestRecord, place: PlacementResult | None, why: str, now: float
) -> None:
    """Emit its last receipt."""
    request = record.request
    last = place or record.place or state.placer.held(request, why)
    shed = last._replace(placement=Placement.SHED, target=None, prefill=None, reason=why)
    attempt, held_s = max(1, record.attempt), record.waited_s(now)
    attempts.decided(state, request, shed, attempt=attempt, held_s=held_s)
