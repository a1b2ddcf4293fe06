"""OfflineCore: takes events in, gives effects out, and calls the other modules.

Reads and writes: all of the state.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import beat_by_name, is_model
from mesh.core.offline import attempts
from mesh.core.offline.deadlines import margin
from mesh.core.offline.effects import JobPaced, OfflineEffect, ReleaseLine, SaveForecast
from mesh.core.offline.events import (
    ForecastRestored,
    JobEnded,
    JobSeen,
    Line,
    LinesFetched,
    LineStored,
    OfflineEvent,
    OfflineStateSeen,
)
from mesh.core.offline.jobs import JobRecord, UnservedModels
from mesh.core.offline.line_placement import place_by_timer, replica_gone, to_replica
from mesh.core.offline.peer_lines import peer_line_arrived
from mesh.core.offline.report import publish
from mesh.core.offline.room import see_lease
from mesh.core.offline.state import OfflineCounts, RunnerState
from schemas.http import Fault
from schemas.ids import ModelId, ReplicaId
from schemas.state import ReplicaState

FETCH_S = 0.25  # between two looks at what to fetch
SECOND_S = 1.0
SAVE_S = 300.0  # between two copies of the forecast
WAIT_MARGINS = 2.0  # before its deadline a job that waits for lower prices should be done
REPORT_S = 1.0  # between two reports of a job's estimated end
CHANGE_SHARE = 0.01  # of the time left: a smaller change is not reported
EXPIRED = "batch_expired", "The completion window was over before the line was answered."
DRAINED = "the runner ends"


class OfflineCore:
    """Decides and has no side effects: same events, times and seed, same effects."""

    def __init__(self, state: RunnerState) -> None:
        """`state`: as it is at the start, of this core alone."""
        self.state = state

    def handle(self, event: OfflineEvent, now: float) -> list[OfflineEffect]:
        """The effects of one event, in order. `now`: seconds, never going back.

        Events that mean nothing to a batch runner (digests, prefixes, clients) are ignored.
        """
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self.state, event, now)
        effects = self.state.effects.copy()
        self.state.effects.clear()
        return effects

    @property
    def counts(self) -> OfflineCounts:
        return self.state.counts

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.state.draining

    @property
    def is_idle(self) -> bool:
        """Whether no line is in the window and none is being fetched."""
        return not len(self.state.window) and not self.state.window.is_fetching

    def served(self) -> frozenset[ModelId]:
        """What some replica has, here or in another region, by served names."""
        return _served(self.state)


# Jobs and lines.


def _on_job(state: RunnerState, event: JobSeen, now: float) -> None:
    wanted = state.residency.wanted_by(event.job.residency, is_foreign=False)
    state.jobs.see(event.job, wanted)


def _on_job_ended(state: RunnerState, event: JobEnded, now: float) -> None:
    attempts.end(state, state.window.of_job(event.job))
    state.jobs.end(event.job)


def _on_lines(state: RunnerState, event: LinesFetched, now: float) -> None:
    job = state.jobs.get(event.job)
    state.jobs.fetched(event.job, event.number, len(event.lines), now)
    for line in event.lines:
        if job is None or job.is_over or state.draining or not _enter(state, job, line, now):
            state.counts.released += 1
            state.emit(ReleaseLine(line.key, line.job, line.number))


def _enter(state: RunnerState, job: JobRecord, line: Line, now: float) -> bool:
    """Whether the line is in the window, or has a result, from now on."""
    if line.job != job.job.id:
        return False
    known = job.job
    needed_by = known.deadline - WAIT_MARGINS * margin(known.began_at, known.deadline)
    queue = state.queues.open(line.job, line.model, job.wanted, known.deadline, needed_by)
    record = state.window.enter(line, queue, now)
    if record is None:
        state.queues.close_if_empty(queue)
        return False
    job.fetched(line)
    forbidden = state.residency.forbids_labels(job.wanted)
    if forbidden is not None:
        attempts.settle_error(state, record, Fault.RESIDENCY.value.code, forbidden)
    return True


def _on_peer_line(state: RunnerState, event: ev.RequestArrived, now: float) -> None:
    inbox = event.request.answer_inbox
    if inbox is not None:
        peer_line_arrived(state, event.request, inbox, now)


# Replicas.


def _on_heartbeat(state: RunnerState, event: ev.HeartbeatSeen, now: float) -> None:
    beat = beat_by_name(event.heartbeat)
    if beat.region != state.region:
        return
    change = state.replicas.see(beat, now)
    state.replicas.told(beat, now)
    if change.restarted:
        gone = beat.state is ReplicaState.GONE
        why = "it has left" if gone else "another process runs there now"
        _lost(state, beat.replica, change.orphans, why, now)
    replica = state.replicas.get(beat.replica)
    if replica is not None and replica.seen_at == now and not state.draining:
        to_replica(state, replica, now)


def _lost(
    state: RunnerState, name: ReplicaId, orphans: tuple[str, ...], why: str, now: float
) -> None:
    """The agent is gone; one that returns under its name is another."""
    replica_gone(state, name)
    state.effects.extend(fx.TellLost(inbox, name) for inbox in orphans)
    attempts.replica_lost(state, name, why, now)
    state.peer_memory.lost(name)


# Time.


def _on_tick(state: RunnerState, event: ev.Tick, now: float) -> None:
    state.replicas.bus.tick(now)
    for name, orphans in state.replicas.expire(now):
        _lost(state, name, orphans, "its heartbeats are missing", now)
    attempts.expire(state, now)
    if now - state.second_at >= SECOND_S:
        state.second_at = now
        _each_second(state, now)
    state.pace.look(state.jobs, state.window.waiting_lines, state.unserved, now)
    if state.draining:
        if state.drain_until is not None and now >= state.drain_until:
            attempts.end(state, state.window)
        return
    place_by_timer(state, now)
    if now - state.fetched_at >= FETCH_S:
        state.fetched_at = now
        state.effects.extend(state.jobs.fetches(now))


def _each_second(state: RunnerState, now: float) -> None:
    state.regions.expire(now)
    for name in state.replicas.forgotten(now):
        replica_gone(state, name)
    for job in state.jobs.overdue(now):
        attempts.end(state, state.window.of_job(job.job.id), EXPIRED)
    _end_unserved(state, now)
    state.emit(publish(state, now))
    for job in state.jobs:
        _report_estimate(state, job, now)
    if state.saved_at is None:
        state.saved_at = now
    if now - state.saved_at >= SAVE_S:
        _save(state, now)


def _served(state: RunnerState) -> frozenset[ModelId]:
    return state.regions.models().union(state.replicas.models())


def _end_unserved(state: RunnerState, now: float) -> None:
    """Lines of models that no replica has served for long get an error."""
    if state.replicas.bus.lost_at is not None:
        state.unserved.restart(now)
        return
    for model in state.unserved.overdue(state.queues.models(), _served(state), now):
        message = f"No replica serves the model {model}."
        fault = Fault.MODEL_UNKNOWN if is_model(model) else Fault.PATH_UNSERVED
        error = fault.value.code, message
        for key in state.queues.some_waiting(model, UnservedModels.LINES_MAX):
            record = state.window.get(key)
            assert record is not None, "a line that waits is in the window"
            attempts.settle_error(state, record, *error)


def _report_estimate(state: RunnerState, job: JobRecord, now: float) -> None:
    """Report the estimate of its end, if that has changed."""
    estimate = job.end_at, job.is_late
    if estimate == job.reported or now - job.reported_at < REPORT_S:
        return
    before, after = job.reported[0], job.end_at
    if before is not None and after is not None and job.reported[1] == job.is_late:
        is_small = abs(after - before) <= CHANGE_SHARE * max(0.0, after - now) + SECOND_S
        if is_small:
            return
    job.reported, job.reported_at = estimate, now
    state.emit(JobPaced(job.job.id, *estimate))


def _save(state: RunnerState, now: float) -> None:
    state.saved_at = now
    state.emit(SaveForecast(state.forecast.state()))


# The end.


def _on_drain(state: RunnerState, event: ev.Drain, now: float) -> None:
    """What waits goes back to the store at once; what runs may end."""
    if state.drain_until is None:
        state.drain_until = now + state.settings.drain_s_max
        _save(state, now)
    attempts.end(state, [one for one in state.window if one.attempt is None])


def _on_drain_over(state: RunnerState, event: ev.DrainOver, now: float) -> None:
    attempts.end(state, state.window)


HANDLERS: Mapping[type, Callable[[RunnerState, Any, float], None]] = {
    JobSeen: _on_job,
    JobEnded: _on_job_ended,
    LinesFetched: _on_lines,
    LineStored: lambda state, event, _: state.window.stored(event.key),
    OfflineStateSeen: lambda state, event, now: state.regions.see(event.state, now),
    ForecastRestored: lambda state, event, now: state.forecast.restore(event.state, now),
    ev.RequestArrived: _on_peer_line,
    ev.HeartbeatSeen: _on_heartbeat,
    ev.LeaseHeard: lambda state, event, now: see_lease(state, event.lease, now),
    ev.PlacedByPeer: attempts.placed_by_peer,
    ev.AttemptProgressed: attempts.progressed,
    ev.AttemptRefused: attempts.refused,
    ev.AttemptFailed: attempts.failed,
    ev.AnswerEnded: attempts.answered,
    ev.BusLost: lambda state, _, now: state.replicas.bus.lost(now),
    ev.BusReturned: lambda state, _, now: state.replicas.bus.returned(now),
    ev.Drain: _on_drain,
    ev.DrainOver: _on_drain_over,
    ev.Tick: _on_tick,
}
