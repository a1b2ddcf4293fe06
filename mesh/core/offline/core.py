"""OfflineCore: takes events in, gives effects out, and calls the other modules."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import beat_by_name, is_model
from mesh.core.model.settings import RouterSettings
from mesh.core.offline.attempts import Attempts, OfflineCounts
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
from mesh.core.offline.forecast import Forecast
from mesh.core.offline.jobs import JobRecord, Jobs, UnservedModels
from mesh.core.offline.line_placement import LinePlacement
from mesh.core.offline.lines import Window
from mesh.core.offline.pace import Pace, margin
from mesh.core.offline.peer_lines import PeerLines
from mesh.core.offline.prefixes import PrefixMemory
from mesh.core.offline.queues import Queues
from mesh.core.offline.regions import Regions
from mesh.core.offline.report import OfflineReport
from mesh.core.offline.room import OfflineRoom
from mesh.core.offline.settings import OfflineSettings
from mesh.core.placement.residency import Residency
from mesh.core.view.replica_table import ReplicaTable
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
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

    def __init__(
        self,
        *,
        region: RegionId,
        runner: RouterId,
        epoch: int,
        settings: OfflineSettings,
        dice: Random,
        unix_at_zero: float,
    ) -> None:
        """`runner`: the name in `Heartbeat.taken` and of its inboxes. `unix_at_zero`: seconds since
        1970 when the runner's clock shows 0, for the time of day."""
        self.region, self.runner = region, runner
        self._settings = settings
        self._effects: list[OfflineEffect] = []
        router_settings = RouterSettings(ground=settings.ground)
        self.replicas = ReplicaTable(runner, router_settings)
        self.regions = Regions(region, settings.ground)
        self._residency = Residency(region, settings.ground)
        self._queues = Queues(
            dice, utility_ratio=settings.utility_ratio, fair_share=settings.fair_share
        )
        self.window = Window(settings.window_lines, settings.window_bytes, self._queues)
        self.jobs = Jobs(self.window, settings.fair_share)
        self.forecast = Forecast(unix_at_zero)
        self._pace = Pace(self.forecast, self.regions)
        self._unserved = UnservedModels(settings.unserved_s_max)
        self._drain_until: float | None = None
        self._fetched_at = self._second_at = -inf
        self._saved_at: float | None = None
        self._construct_placement(router_settings.heartbeat_late_s)
        self._report = OfflineReport(
            region=region,
            runner=runner,
            epoch=epoch,
            settings=settings,
            replicas=self.replicas,
            room=self._room,
            window=self.window,
            jobs=self.jobs,
            pace=self._pace,
            forecast=self.forecast,
            peer_lines=self._peer_lines,
        )
        self._handlers = self._event_handlers()

    def _construct_placement(self, late_s: float) -> None:
        """What places lines; `late_s`: a replica whose last heartbeat is older gets none."""
        settings, memory = self._settings, PrefixMemory()
        self._attempts = Attempts(
            region=self.region,
            settings=settings,
            window=self.window,
            jobs=self.jobs,
            replicas=self.replicas,
            regions=self.regions,
            pace=self._pace,
            forecast=self.forecast,
            memory=memory,
            effects=self._effects,
        )
        self._room = OfflineRoom(
            self.region, self.replicas, self._attempts.backoff, self._residency, late_s
        )
        self._peer_lines = PeerLines(
            takes_peers=settings.takes_peers,
            replicas=self.replicas,
            room=self._room,
            residency=self._residency,
            memory=PrefixMemory(),
            attempts=self._attempts,
            effects=self._effects,
        )
        self._placement = LinePlacement(
            price=settings.price,
            window=self.window,
            queues=self._queues,
            replicas=self.replicas,
            room=self._room,
            regions=self.regions,
            pace=self._pace,
            forecast=self.forecast,
            attempts=self._attempts,
        )

    def _event_handlers(self) -> dict[type, Callable[[Any, float], None]]:
        attempts = self._attempts
        return {
            JobSeen: self._on_job,
            JobEnded: self._on_job_ended,
            LinesFetched: self._on_lines,
            LineStored: lambda event, _: self.window.stored(event.key),
            OfflineStateSeen: lambda event, now: self.regions.see(event.state, now),
            ForecastRestored: lambda event, now: self.forecast.restore(event.state, now),
            ev.RequestArrived: self._on_peer_line,
            ev.HeartbeatSeen: self._on_heartbeat,
            ev.LeaseHeard: lambda event, now: self._room.see_lease(event.lease, now),
            ev.PlacedByPeer: attempts.placed_by_peer,
            ev.AttemptProgressed: attempts.progressed,
            ev.AttemptRefused: attempts.refused,
            ev.AttemptFailed: attempts.failed,
            ev.AnswerEnded: attempts.answered,
            ev.BusLost: lambda _, now: self.replicas.bus.lost(now),
            ev.BusReturned: lambda _, now: self.replicas.bus.returned(now),
            ev.Drain: self._on_drain,
            ev.DrainOver: self._on_drain_over,
            ev.Tick: self._on_tick,
        }

    def handle(self, event: OfflineEvent, now: float) -> list[OfflineEffect]:
        """The effects of one event, in order. `now`: seconds, never going back.

        Events that mean nothing to a batch runner (digests, prefixes, clients) are ignored.
        """
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def counts(self) -> OfflineCounts:
        return self._attempts.counts

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self._drain_until is not None

    @property
    def is_idle(self) -> bool:
        """Whether no line is in the window and none is being fetched."""
        return not len(self.window) and not self.window.is_fetching

    # Jobs and lines.

    def _on_job(self, event: JobSeen, now: float) -> None:
        wanted = self._residency.wanted_by(event.job.residency, is_foreign=False)
        self.jobs.see(event.job, wanted)

    def _on_job_ended(self, event: JobEnded, now: float) -> None:
        self._attempts.end(self.window.of_job(event.job))
        self.jobs.end(event.job)

    def _on_lines(self, event: LinesFetched, now: float) -> None:
        job = self.jobs.get(event.job)
        self.jobs.fetched(event.job, event.number, len(event.lines), now)
        for line in event.lines:
            if job is None or job.is_over or self.draining or not self._enter(job, line, now):
                self._attempts.counts.released += 1
                self._effects.append(ReleaseLine(line.key, line.job, line.number))

    def _enter(self, job: JobRecord, line: Line, now: float) -> bool:
        """Whether the line is in the window, or has a result, from now on."""
        if line.job != job.job.id:
            return False
        known = job.job
        needed_by = known.deadline - WAIT_MARGINS * margin(known.began_at, known.deadline)
        queue = self._queues.open(line.job, line.model, job.wanted, known.deadline, needed_by)
        record = self.window.enter(line, queue, now)
        if record is None:
            self._queues.close_if_empty(queue)
            return False
        job.fetched(line)
        forbidden = self._residency.forbids_labels(job.wanted)
        if forbidden is not None:
            self._attempts.settle_error(record, Fault.RESIDENCY.value.code, forbidden)
        return True

    def _on_peer_line(self, event: ev.RequestArrived, now: float) -> None:
        inbox = event.request.answer_inbox
        if inbox is not None:
            self._peer_lines.arrived(event.request, inbox, now, draining=self.draining)

    # Replicas.

    def _on_heartbeat(self, event: ev.HeartbeatSeen, now: float) -> None:
        beat = beat_by_name(event.heartbeat)
        if beat.region != self.region:
            return
        change = self.replicas.see(beat, now)
        if change.restarted:
            gone = beat.state is ReplicaState.GONE
            why = "it has left" if gone else "another process runs there now"
            self._lost(beat.replica, change.orphans, why, now)
        replica = self.replicas.get(beat.replica)
        if replica is not None and replica.seen_at == now and not self.draining:
            self._attempts.term = self._room.term(now)
            self._placement.to_replica(replica, now)

    def _lost(self, name: ReplicaId, orphans: tuple[str, ...], why: str, now: float) -> None:
        """The agent is gone; one that returns under its name is another."""
        self._placement.gone(name)
        self._effects.extend(fx.TellLost(inbox, name) for inbox in orphans)
        self._attempts.replica_lost(name, why, now)
        self._peer_lines.replica_lost(name)

    # Time.

    def _on_tick(self, event: ev.Tick, now: float) -> None:
        self.replicas.bus.tick(now)
        for name, orphans in self.replicas.expire(now):
            self._lost(name, orphans, "its heartbeats are missing", now)
        self._attempts.expire(now)
        if now - self._second_at >= SECOND_S:
            self._second_at = now
            self._each_second(now)
        self._pace.look(self.jobs, self.window.waiting_lines, self._unserved, now)
        if self.draining:
            if self._drain_until is not None and now >= self._drain_until:
                self._attempts.end(self.window)
            return
        self._attempts.term = self._room.term(now)
        self._placement.tick(now)
        if now - self._fetched_at >= FETCH_S:
            self._fetched_at = now
            self._effects.extend(self.jobs.fetches(now))

    def _each_second(self, now: float) -> None:
        self.regions.expire(now)
        for name in self.replicas.forgotten(now):
            self._placement.gone(name)
        for job in self.jobs.overdue(now):
            self._attempts.end(self.window.of_job(job.job.id), EXPIRED)
        self._end_unserved(now)
        self._effects.append(self._report.publish(now, accepting=not self.draining))
        for job in self.jobs:
            self._report_estimate(job, now)
        if self._saved_at is None:
            self._saved_at = now
        if now - self._saved_at >= SAVE_S:
            self._save(now)

    def served(self) -> frozenset[ModelId]:
        """What some replica has, here or in another region, by served names."""
        return self.regions.models().union(self.replicas.models())

    def _end_unserved(self, now: float) -> None:
        """Lines of models that no replica has served for long get an error."""
        if self.replicas.bus.lost_at is not None:
            self._unserved.restart(now)
            return
        for model in self._unserved.overdue(self._queues.models(), self.served(), now):
            message = f"No replica serves the model {model}."
            fault = Fault.MODEL_UNKNOWN if is_model(model) else Fault.PATH_UNSERVED
            error = fault.value.code, message
            for key in self._queues.some_waiting(model, UnservedModels.LINES_MAX):
                record = self.window.get(key)
                assert record is not None, "a line that waits is in the window"
                self._attempts.settle_error(record, *error)

    def _report_estimate(self, job: JobRecord, now: float) -> None:
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
        self._effects.append(JobPaced(job.job.id, *estimate))

    def _save(self, now: float) -> None:
        self._saved_at = now
        self._effects.append(SaveForecast(self.forecast.state()))

    # The end.

    def _on_drain(self, event: ev.Drain, now: float) -> None:
        """What waits goes back to the store at once; what runs may end."""
        if self._drain_until is None:
            self._drain_until = now + self._settings.drain_s_max
            self._save(now)
        waiting = [one for one in self.window if one.attempt is None]
        self._attempts.end(waiting)

    def _on_drain_over(self, event: ev.DrainOver, now: float) -> None:
        self._attempts.end(self.window)
