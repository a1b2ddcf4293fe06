"""Attempts that are refused, fail or are lost: another one, or the request's end.

A refusal leads back into the hold queue until there were `refusals_max` of them, a failure before
the first byte until there were `failures_max` or no place is left; a peer that was lost with its
link is tried again where there is no other, and counts as one that refused. After it, another
engine goes on with the stream (`continued_streams`), or a failure is the request's end. Of an
attempt on a pair of replicas both stages are over, and what is still under way is cancelled. The
places to blame are in `RequestRecord.failed`. After an engine's server error the region's budget of
retries (`retries`) must allow another one.

Reads: begun, inflight, replicas, retries, settings.
Writes: nothing.
"""

from collections.abc import Collection

from mesh.core.lifecycle import (
    attempts,
    continued_streams,
    ends,
    model_choice,
    queue_scheduler,
    timeouts,
)
from mesh.core.lifecycle.timeouts import DEADLINE_PASSED
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import KEPT_RESPONSE, is_keeper_name, model_of
from mesh.core.requests.record import (
    MAYBE_INNOCENT,
    Cause,
    RequestRecord,
    RequestState,
    is_client_error,
)
from mesh.core.state import RouterState
from mesh.core.view.outliers import SILENT
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.http_statuses import NOT_IMPLEMENTED, SERVER_ERRORS, TOO_MANY
from schemas.ids import ReplicaId

KEEPER_GONE = "the replica that kept that response is gone"
# Of engines: too many requests, and what it never does.
NOT_ITS_FAULT = (TOO_MANY, NOT_IMPLEMENTED)
# Client errors that depend on the engine's key, model or adapter, and hardly on the request: others
# may come of a smaller context, if the prompt is not short.
TO_EVERYBODY = (401, 403, 404)
SHORT_TOKENS = 1000
KEEPER_DRAINS = "the replica that keeps that response is drained"


def on_refused(
    state: RouterState, record: RequestRecord, event: ev.AttemptRefused, now: float
) -> None:
    """A replica or peer did not take the attempt under way."""
    if record.is_handed_over:
        ends.fail(state, record, now, Fault.ENGINE_FAILED, event.reason)
        return
    if event.reason == Refusal.BAD_WORK:
        ends.fail(state, record, now, Fault.ENGINE_FAILED, "the replica could not read the request")
        return
    if is_keeper_name(record.request.model):
        if event.reason == Refusal.NOT_KEPT:
            is_call = model_of(record.request.model) == KEPT_RESPONSE
            fault = Fault.RESPONSE_UNKNOWN if is_call else Fault.STATE_GONE
            ends.fail(state, record, now, fault, KEEPER_GONE)
            return
        if event.reason == Refusal.KEEPER_DRAINS:
            ends.fail(state, record, now, Fault.NO_REPLICA, KEEPER_DRAINS)
            return
    if event.prefill and not record.is_prefilling:
        attempts.cancel(state, record)  # the other stage was sent at once
    is_for_none_there = event.reason == Refusal.WRONG_MODEL and event.replica is None
    if record.peer is not None and (record.continuations or is_for_none_there):
        record.avoid_peer()
    elif event.reason != Refusal.ELSEWHERE:  # for others it may be the right place
        attempts.rest(state, record, now, in_prefill=event.prefill)
    refused(state, record, now)
    queue_scheduler.place_waiting(state, now)


def refused(state: RouterState, record: RequestRecord, now: float) -> None:
    """Back into the hold queue, if it was not refused too often and is not too late."""
    record.refused(now)
    if record.refusals >= state.settings.refusals_max:
        ends.shed(state, record, None, f"refused {record.refusals} times", now)
    elif not ends.shed_if_too_late(state, record, None, now):
        queue_scheduler.hold(state, record, now)


def on_failed(
    state: RouterState, record: RequestRecord, event: ev.AttemptFailed, now: float
) -> None:
    """The attempt under way failed."""
    if now >= record.request.deadline:  # the agent's clock may be ahead
        ends.fail(state, record, now, Fault.DEADLINE, DEADLINE_PASSED)
        return
    if event.prefill and record.has_started:
        return  # only what followed the transfer went wrong
    record.engine_answered(event.status)
    if not (event.blameless or event.status in NOT_ITS_FAULT):
        _note(state, record, event, now)
    whole_place = record.peer is None or record.replica is None
    if whole_place and event.status is None:
        attempts.rest(state, record, now, in_prefill=event.prefill)
    if event.prefill and not record.is_prefilling:
        attempts.cancel(state, record)
    cause = Cause.PREFILL if event.prefill else Cause.PLACE
    if event.blameless and record.peer is not None:
        cause = Cause.PEERS_REPLICA if event.replica_lost else Cause.LINK
    failed(state, record, event.detail, now, cause)
    queue_scheduler.place_waiting(state, now)


def place_overdue_again(state: RouterState, now: float) -> None:
    """Requests that wait at a silent replica while its like answer, each once (`slowness.py`)."""
    slow = state.replicas.slow
    for key in slow.overdue(state.replicas.by_name, now):
        record = state.inflight.get(key)
        if record is None or record.state is not RequestState.TRIED or record.replica is None:
            continue
        is_first = not record.failures and state.settings.failures_max > 1
        if not (slow.may_place_again and is_first):
            continue
        if timeouts.others_serve(state, record, besides=(record.replica,)):
            silence = f"nothing in {now - record.attempted_at:.1f} s"
            is_late = slow.heard_since_sent(key) or _brings_to_others(state, record)
            does = "while it went on with others" if is_late else "while others answered"
            what = f"{silence}, {does}"
            how = " and went on with others" if is_late else ""
            why = f"{record.replica} brought {silence}{how}, while other replicas answered: moved"
            slow.placed_again(key, now)
            attempts.cancel(state, record, why)
            attempts.failed(state, record, what, now, is_sure=True, weight=SILENT, is_late=is_late)
            failed(state, record, what, now)
            queue_scheduler.place_waiting(state, now)


def _brings_to_others(state: RouterState, record: RequestRecord) -> bool:
    """Whether frames of another stream of its replica have come since it was sent there."""
    since, place = record.attempted_at, record.replica
    return any(
        other.replica == place and other.has_started and other.last_frame_at > since
        for other in state.inflight.values()
    )


def _note(state: RouterState, record: RequestRecord, event: ev.AttemptFailed, now: float) -> None:
    """What the failure says of its place. An error that the engine answered with may be the
    request's fault: another place's answer will show."""
    status, in_prefill = event.status, event.prefill
    if status is None:
        # All regions are told of it: an answer's text, which may follow, is none of their business.
        what, is_sure = event.detail.partition(": ")[0], True
    elif not is_client_error(status):
        what, is_sure = f"HTTP {status}", False
    elif status in TO_EVERYBODY or record.request.prompt.tokens <= SHORT_TOKENS:
        what, is_sure = f"HTTP {status} to what others answer", False
    else:
        return
    attempts.failed(state, record, what, now, is_sure=is_sure, in_prefill=in_prefill)


def failed(
    state: RouterState,
    record: RequestRecord,
    detail: str,
    now: float,
    cause: Cause = Cause.PLACE,
) -> None:
    """Back into the hold queue if another attempt may help; the caller tries held requests.

    What a link or silence ends says nothing of the request: it is limited as refusals are, and not
    as what may have killed a replica.
    """
    is_restart = cause is Cause.RESTART
    if continued_streams.may_go_on(state, record):
        continued_streams.broke(state, record, detail, now, avoid_place=not is_restart)
        return
    if record.has_started or record.is_handed_over:
        detail += continued_streams.why_not(record)
        ends.fail(state, record, now, Fault.ENGINE_FAILED, detail)
        return
    if cause is Cause.LINK:
        record.refused(now)
    record.failed(cause)
    reconsider(state, record)
    has_places = is_restart or cause in MAYBE_INNOCENT or timeouts.others_serve(state, record)
    has_places = has_places or model_choice.other(state, record, now) is not None
    is_worth = has_places and record.is_worth_another(state.settings.failures_max)
    is_worth = is_worth and record.refusals < state.settings.refusals_max
    if is_worth and _may_retry(state, record, now):
        queue_scheduler.hold(state, record, now)
        model_choice.retarget(state, record, now)
    elif record.engine_status is not None and _is_unseen(record):
        ends.end(state, record, now)
        state.emit(fx.PassEngineError(record.request.key))
    else:
        if record.continuations:
            detail = f"{record.broke_because}; where it was to go on: {detail}"
        ends.fail(state, record, now, Fault.ENGINE_FAILED, detail)


def _may_retry(state: RouterState, record: RequestRecord, now: float) -> bool:
    is_server_error = record.engine_status in SERVER_ERRORS
    return not is_server_error or state.retries.spend(state.begun.per_s(now), now)


def _is_unseen(record: RequestRecord) -> bool:
    """Whether its client can still be answered with an engine's own error."""
    return record.request.kind.ends_here and not record.continuations


def reconsider(state: RouterState, record: RequestRecord) -> None:
    """Where no other place is left, try those again that may be innocent."""
    if record.maybe_innocent and not timeouts.others_serve(state, record):
        record.trust_again()


def replica_lost(
    state: RouterState, lost: Collection[RequestRecord], name: ReplicaId, why: str, now: float
) -> None:
    """The agent that they need is gone; one that returns under its name is another."""
    for record in lost:
        if record.prefill is not None:
            attempts.cancel(state, record)  # the other one of the pair may be at work
        failed(state, record, f"replica {name} was lost: {why}", now, Cause.RESTART)
    queue_scheduler.place_waiting(state, now)
