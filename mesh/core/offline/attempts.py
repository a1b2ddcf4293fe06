"""Attempts of lines: begun, and over by an answer, a refusal, a failure, a loss, or silence.

A line that an attempt leaves unanswered waits again at its old place. Failures are counted, and
after `failures_max` of them the line's result is an error. Refusals and preemptions are not
counted, but the place that refused gets nothing for a while. An attempt that was under way when
the connection to the bus was lost is not counted as the line's failure.

Reads: asked_at, at_replica, backoff, began_at, counts, forecast, jobs, last_frame_at, memory, pace,
region, regions, replicas, settings, window.
Writes: all of these but region and settings.
"""

from collections.abc import Iterable

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Request, Served
from mesh.core.offline.effects import CloseLine, OpenLine, ReleaseLine, SettleLine, Settlement
from mesh.core.offline.jobs import served_tokens
from mesh.core.offline.lines import Attempt, LineRecord, LineState
from mesh.core.offline.room import term
from mesh.core.offline.state import RunnerState
from schemas.exchange import SILENCE_S_MAX, Priority, Refusal
from schemas.http import Fault
from schemas.http_statuses import TOO_MANY
from schemas.ids import RegionId, ReplicaId

PEER_REPLY_S_MAX = 5.0  # for a peer to place or refuse a line

# Begun.


def give(
    state: RunnerState,
    record: LineRecord,
    replica: ReplicaId,
    now: float,
    raised: Priority | None = None,
) -> None:
    """Give the line to a replica of this region; `raised`: with this online priority."""
    line = record.line
    held = state.memory.held_blocks(replica, line.prompt.hashes)
    prefill_tokens = line.prompt.uncached_tokens(held)
    handoff = state.replicas.hand_off(replica, line.tokens, prefill_tokens, now)
    state.memory.given(replica, line.prompt.hashes)
    attempt = Attempt(now, replica, None, handoff, held, raised is None, raised or Priority.LOW)
    _begin(state, record, attempt, now)
    state.counts.given += 1
    if state.replicas.failing.places:
        state.replicas.failing.tries(replica, line.model, line.key, now)
    state.last_frame_at[line.key] = now
    state.at_replica.setdefault(replica, {})[line.key] = None
    state.emit(
        fx.Dispatch(
            line.key,
            record.number,
            replica,
            handoff,
            None,
            prefill_tokens,
            term=term(state, now),
        )
    )


def forward(
    state: RunnerState,
    record: LineRecord,
    peer: RegionId,
    now: float,
    raised: Priority | None = None,
) -> None:
    """Ask a peer to place the line."""
    state.regions.sent(peer, record.line.tokens, now)
    attempt = Attempt(now, None, peer, None, 0, raised is None, raised or Priority.LOW)
    _begin(state, record, attempt, now)
    state.counts.forwarded += 1
    state.asked_at[record.line.key] = now
    state.emit(fx.Forward(record.line.key, record.number, peer))


def _begin(state: RunnerState, record: LineRecord, attempt: Attempt, now: float) -> None:
    state.window.attempt(record, attempt)
    state.began_at[record.line.key] = now
    state.counts.raised += not attempt.offline
    state.emit(OpenLine(_request(state, record, attempt, now)))


def _request(state: RunnerState, record: LineRecord, attempt: Attempt, now: float) -> Request:
    line, job = record.line, state.jobs.get(record.line.job)
    assert job is not None, "lines of jobs that have ended are not handed out"
    return Request(
        key=line.key,
        request_id=line.request_id,
        model=line.model,
        prompt=line.prompt,
        arrived_at=record.fetched_at,
        deadline=min(job.job.deadline, now + state.settings.attempt_s_max),
        hops=0,
        origin=state.region,
        priority=attempt.priority,
        residency=job.job.residency,
        wants_receipt=False,
        offline=attempt.offline,
        answer_tokens=line.answer_tokens,
    )


# Under way.


def progressed(state: RunnerState, event: ev.AttemptProgressed, now: float) -> None:
    record = state.window.current(event.key, event.attempt)
    if record is not None and record.attempt is not None:
        _frame_came(state, event.key, now)
        if record.attempt.replica is not None:  # it has taken the line
            state.backoff.answered(record.attempt.replica)


def placed_by_peer(state: RunnerState, event: ev.PlacedByPeer, now: float) -> None:
    record = state.window.current(event.key, event.attempt)
    if record is not None and record.attempt is not None and record.attempt.peer is not None:
        state.window.placed_by_peer(record, event.replica)
        _frame_came(state, event.key, now)


def _frame_came(state: RunnerState, key: int, now: float) -> None:
    state.asked_at.pop(key, None)
    state.last_frame_at.pop(key, None)
    state.last_frame_at[key] = now


# Over.


def answered(state: RunnerState, event: ev.AnswerEnded, now: float) -> None:
    record = state.window.current(event.key, event.attempt)
    if record is None or record.attempt is None:
        return
    attempt, tokens = record.attempt, _count(state, record, record.attempt, event.served)
    if attempt.peer is not None:
        state.regions.answered(attempt.peer, tokens)
    elif attempt.replica is not None:
        state.backoff.answered(attempt.replica)
        if state.replicas.failing.places:
            state.replicas.failing.answered(attempt.replica, record.line.model)
    state.counts.answered += 1
    state.counts.tokens += tokens
    settle(state, record, Settlement.ANSWER)


def _count(state: RunnerState, record: LineRecord, attempt: Attempt, served: Served | None) -> int:
    line, job = record.line, state.jobs.get(record.line.job)
    tokens = served_tokens(line, served)
    if attempt.peer is not None:  # what it claims speeds up jobs, and what it is sent
        tokens = min(tokens, line.tokens)
    if job is not None:
        job.served(tokens)
    if attempt.offline and attempt.peer is None:
        state.forecast.computed(line.model, tokens)
    speeds = state.pace.speeds(line.model)
    if attempt.offline and attempt.peer is None:
        if line.model in state.pace.saturated:
            speeds.home.add(tokens)
    elif line.model in state.window.waiting_lines:
        (speeds.peers if attempt.offline else speeds.raised).add(tokens)
    return tokens


def refused(state: RunnerState, event: ev.AttemptRefused, now: float) -> None:
    record = state.window.current(event.key, event.attempt)
    if record is None or record.attempt is None:
        return
    attempt = record.attempt
    if event.reason == Refusal.BAD_WORK:
        _fail(state, record, "the replica could not read the request", None, now)
        return
    state.counts.refused += 1
    if attempt.peer is not None:
        state.regions.penalize(attempt.peer, now)
        state.window.avoid(record, now)  # it may be too long for any single replica there
    elif attempt.replica is not None:
        state.replicas.refused(attempt.replica, now)
        state.backoff.penalize(attempt.replica, now)
    _put_back(state, record)


def failed(state: RunnerState, event: ev.AttemptFailed, now: float) -> None:
    record = state.window.current(event.key, event.attempt)
    if record is None or record.attempt is None:
        return
    if event.preempted:
        state.counts.preempted += 1
        if record.attempt.replica is not None:
            state.replicas.refused(record.attempt.replica, now)  # until its next heartbeat
        else:
            _penalize_place(state, record.attempt, now)
        _put_back(state, record, computed=True)
    elif event.status == TOO_MANY:
        state.counts.refused += 1
        _penalize_place(state, record.attempt, now)
        _put_back(state, record)
    else:
        _fail(state, record, event.detail, event.status, now, is_blameless=event.blameless)


def _fail(
    state: RunnerState,
    record: LineRecord,
    detail: str,
    status: int | None,
    now: float,
    *,
    same_again: bool = False,
    is_blameless: bool = False,
) -> None:
    """The attempt failed: another one later, or the line's result is an error.

    `same_again`: the place may be tried again at once, as another process runs there now.
    `is_blameless`: it tells nothing of the place.
    """
    assert record.attempt is not None, "only attempts fail"
    state.counts.failed += 1
    state.window.failed(record, status, now, avoid=not same_again)
    if not same_again:
        _penalize_place(state, record.attempt, now)
    replica = record.attempt.replica
    is_its_fault = status is None and not (same_again or is_blameless)
    if is_its_fault and replica is not None:
        state.replicas.failing.failed(replica, record.line.model, detail, now)
    if record.is_worth_another(state.settings.failures_max):
        _put_back(state, record)
    elif status is not None:
        settle(state, record, Settlement.ENGINE_ERROR)
    else:
        settle_error(state, record, Fault.ENGINE_FAILED.value.code, detail)


def _penalize_place(state: RunnerState, attempt: Attempt, now: float) -> None:
    if attempt.peer is not None:
        state.regions.penalize(attempt.peer, now)
    elif attempt.replica is not None:
        state.backoff.penalize(attempt.replica, now)


# Time and losses.


def expire(state: RunnerState, now: float) -> None:
    """Give up attempts of which no frame has come for too long, and those past their deadline:
    a peer's claims that it works are not believed for ever."""
    bus = state.replicas.bus
    for since, most_s in (
        (state.asked_at, PEER_REPLY_S_MAX),
        (state.last_frame_at, SILENCE_S_MAX),
        (state.began_at, state.settings.attempt_s_max + SILENCE_S_MAX),
    ):
        while since:
            key, since_at = next(iter(since.items()))
            if bus.silent_s(since_at, now) <= most_s:
                break
            _silent(state, key, now)


def _silent(state: RunnerState, key: int, now: float) -> None:
    record = state.window.get(key)
    assert record is not None and record.attempt is not None, "it is under way"
    _cancel(state, record)
    if record.attempt.began_at < state.replicas.bus.returned_at:
        _put_back(state, record)
    elif record.attempt.peer is not None and key in state.asked_at:
        state.regions.penalize(record.attempt.peer, now)
        _put_back(state, record)
    else:
        _fail(state, record, "its answer has not come in time", None, now, is_blameless=True)


def replica_lost(state: RunnerState, replica: ReplicaId, why: str, now: float) -> None:
    """Its process is gone: its lines go back."""
    state.memory.lost(replica)
    for key in list(state.at_replica.get(replica, ())):
        record = state.window.get(key)
        assert record is not None, "it is under way"
        _cancel(state, record)
        _fail(state, record, f"replica {replica} was lost: {why}", None, now, same_again=True)


# Ends of lines.


def settle(state: RunnerState, record: LineRecord, settlement: Settlement) -> None:
    """The attempt's answer, or its engine's error, is the line's result."""
    line = record.line
    state.emit(SettleLine(line.key, line.job, line.number, settlement))
    _leave(state, record)
    state.window.settle(record)


def settle_error(state: RunnerState, record: LineRecord, code: str, message: str) -> None:
    """An error is the line's result; an attempt under way is over already, or is cancelled by
    the caller."""
    line, kind = record.line, Settlement.ERROR
    state.counts.errors += 1
    state.emit(SettleLine(line.key, line.job, line.number, kind, code, message))
    _leave(state, record)
    state.window.settle(record)


def end(
    state: RunnerState, records: Iterable[LineRecord], error: tuple[str, str] | None = None
) -> None:
    """No result is wanted any more: cancel what runs. Lines are released, or get that error
    (code and message)."""
    for record in list(records):
        if record.state is LineState.SETTLED:
            continue
        if record.attempt is not None:
            _cancel(state, record)
        if error is not None:
            settle_error(state, record, *error)
            continue
        state.counts.released += 1
        _leave(state, record)
        line = record.line
        state.emit(ReleaseLine(line.key, line.job, line.number))
        state.window.release(record)


def _put_back(state: RunnerState, record: LineRecord, *, computed: bool = False) -> None:
    """`computed`: the replica may have some of the prompt in its cache."""
    attempt = record.attempt
    if attempt is not None and attempt.replica is not None and not computed:
        new_blocks = record.line.prompt.hashes[attempt.held_blocks :]
        state.memory.given_back(attempt.replica, new_blocks)
    _leave(state, record)
    state.window.put_back(record)


def _cancel(state: RunnerState, record: LineRecord) -> None:
    attempt = record.attempt
    assert attempt is not None, "only attempts are cancelled"
    replica = attempt.replica or record.peer_replica
    region = attempt.peer or state.region
    state.emit(fx.CancelAttempt(record.line.key, record.number, region, replica))


def _leave(state: RunnerState, record: LineRecord) -> None:
    """Forget the attempt under way, if there is one. The line's next state follows."""
    attempt, key = record.attempt, record.line.key
    if attempt is None:
        return
    for since in (state.began_at, state.last_frame_at, state.asked_at):
        since.pop(key, None)
    if attempt.replica is not None:
        if state.replicas.failing.places:
            state.replicas.failing.left(attempt.replica, record.line.model, key)
        here = state.at_replica[attempt.replica]
        del here[key]
        if not here:
            del state.at_replica[attempt.replica]
    elif attempt.peer is not None:
        state.regions.over(attempt.peer, record.line.tokens)
    state.emit(CloseLine(key))
