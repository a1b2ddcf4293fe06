"""Streams that break after their first byte, and go on from another engine.

The edge keeps what was said of a stream. Here it is decided whether another place may go on with
it: while the deadline lasts, another place serves the model, and it broke no more than
`continuations_max` times. The edge then reads what was said (`Continue`), and the request is placed
like any other, its prompt being the one it had and what was said. Where no engine could go on
exactly, the stream ends with its error event.

Reads: inflight, replicas, settings.
Writes: nothing.
"""

from collections.abc import Collection

from mesh.core.lifecycle import attempts, ends, queue_scheduler, timeouts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.requests.record import RequestRecord
from mesh.core.state import RouterState
from schemas.http import Fault


def may_go_on(state: RouterState, record: RequestRecord) -> bool:
    """Whether a stream that has begun may be placed again."""
    is_armed = record.has_started and record.may_continue
    return is_armed and record.continuations < state.settings.continuations_max


def why_not(record: RequestRecord) -> str:
    """To be said of a stream that has begun and may not be placed again."""
    if record.has_started and record.may_continue:
        return f"; it has gone on from {record.continuations} other engines, and does no more"
    return f"; {record.why_not}" if record.why_not else ""


def broke(
    state: RouterState, record: RequestRecord, detail: str, now: float, *, avoid_place: bool
) -> None:
    """Its attempt is lost. The edge answers with `ContinuationRead`."""
    attempts.leave(state, record, now)
    record.broke(detail, avoid_place=avoid_place)
    state.emit(fx.Continue(record.request.key, record.attempt, detail))


def read(state: RouterState, event: ev.ContinuationRead, now: float) -> None:
    """What was said of a broken stream was read: place it again, or end it."""
    record = state.inflight.get(event.key)
    if record is None or not record.is_broken or record.attempt != event.attempt:
        return
    if event.prompt is not None:
        unable = frozenset(
            name
            for name, replica in state.replicas.by_name.items()
            if event.kinds and replica.heartbeat.engine not in event.kinds
        )
        record.goes_on(event.prompt, unable)
        if not timeouts.others_serve(state, record):  # those that failed it earlier, once more
            record.forgives(unable)
        if timeouts.others_serve(state, record):
            queue_scheduler.hold(state, record, now)
            queue_scheduler.place_waiting(state, now)
            return
    none = "" if event.prompt is None else f"; {_nowhere(state, record, event.kinds)}"
    ends.fail(state, record, now, Fault.ENGINE_FAILED, event.detail + none)


def _nowhere(state: RouterState, record: RequestRecord, kinds: Collection[str]) -> str:
    """Why no other replica goes on with it, which ends it."""
    record.forgives(frozenset())
    if timeouts.others_serve(state, record):
        return f"a chat goes on from engines of kind {', '.join(kinds)} alone, and no other is left"
    return "no other replica serves its model at present"
