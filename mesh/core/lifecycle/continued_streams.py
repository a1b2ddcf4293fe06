"""Streams that break after their first byte, and go on from another engine.

The edge keeps what was said of a stream. Here it is decided whether another place may go on with
it: while the deadline lasts, another place serves the model, and it broke no more than
`continuations_max` times. The edge then reads what was said (`Continue`), and the request is placed
like any other, its prompt being the one it had and what was said. Where no engine could go on
exactly, the stream ends with its error event.

A replica that operators want empty (`mesh drain --move`) is drained; its streams that have taken
LONG_S go on in the same way, a few at a time, so that the pauses are short, and none while requests
for their model wait for room (requests that no ready replica may serve don't count). A stream that
flows has more to lose than one that broke: the edge is asked first whether it may go on, and the
stream stays where it is unless another place is there.

Reads: held, inflight, peers, replicas, settings.
Writes: nothing.
"""

from collections.abc import Collection
from itertools import islice

from mesh.core.lifecycle import attempts, ends, queue_scheduler, timeouts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.requests.record import RequestRecord
from mesh.core.state import RouterState
from schemas.http import Fault
from schemas.ids import ReplicaId

LONG_S = 5.0  # a stream that has taken so long likely takes as long again
MOVES_AT_ONCE = 4  # streams that have not begun again yet


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
        unable = _unable(state, event.kinds)
        record.goes_on(event.prompt, unable)
        if not timeouts.others_serve(state, record):  # those that failed it earlier, once more
            record.forgives(unable)
        if timeouts.others_serve(state, record):
            queue_scheduler.hold(state, record, now)
            queue_scheduler.place_waiting(state, now)
            return
    none = "" if event.prompt is None else f"; {_nowhere(state, record, event.kinds)}"
    ends.fail(state, record, now, Fault.ENGINE_FAILED, event.detail + none)


def move(state: RouterState, now: float) -> None:
    """A tick: ask of some streams whether they may leave a replica that is to be empty."""
    places = {(None, name) for name in state.replicas.moving} | {
        (region, name)
        for region, peer in state.peers
        for digest in peer.digests.values()
        for name in digest.moving
    }
    if not places or state.replicas.bus.lost_at is not None:
        return
    waits = {need[0] for need in state.held.held_needs if timeouts.serving(state, need, now)}
    under_way = [
        one for one in state.inflight.values() if one.continuations and not one.has_started
    ]
    found = (
        record
        for record in state.inflight.values()
        if (record.peer, record.replica) in places
        and may_go_on(state, record)
        and record.move_asked != record.attempt
        and now - record.attempted_at >= LONG_S
        and record.request.model not in waits
        and timeouts.others_serve(state, record)
    )
    for record in islice(found, max(0, MOVES_AT_ONCE - len(under_way))):
        record.asks_to_move()
        state.emit(fx.MayMove(record.request.key, record.attempt))


def movable(state: RouterState, event: ev.Movable, now: float) -> None:
    """Another engine could go on with that stream: let it, if one of them is there."""
    record = state.inflight.get(event.key)
    if record is None or record.attempt != event.attempt or not may_go_on(state, record):
        return
    if timeouts.others_serve(state, record, besides=_unable(state, event.kinds)):
        why = f"{record.replica} is drained, and its streams go on elsewhere: moved"
        attempts.cancel(state, record, why)
        broke(state, record, why, now, avoid_place=False)


def _unable(state: RouterState, kinds: Collection[str]) -> frozenset[ReplicaId]:
    """Replicas whose engines are of none of these kinds; none where all can."""
    return frozenset(
        name
        for name, replica in state.replicas.by_name.items()
        if kinds and replica.heartbeat.engine not in kinds
    )


def _nowhere(state: RouterState, record: RequestRecord, kinds: Collection[str]) -> str:
    """Why no other replica goes on with it, which ends it."""
    record.forgives(frozenset())
    if timeouts.others_serve(state, record):
        return f"a chat goes on from engines of kind {', '.join(kinds)} alone, and no other is left"
    return "no other replica serves its model at present"
