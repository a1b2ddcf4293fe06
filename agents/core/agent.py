"""AgentCore: each event goes to its rule, and what is due after any of them.

The package docstring has the host's loop and duties.

Reads: beat_due_at.
Writes: cuts, engine, hangs, health, leaving, offline, requests, routers, speed.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from agents.core import (
    answers,
    engine_watch,
    events,
    heartbeat,
    keep_alives,
    offline_work,
    speed_probe,
    work,
)
from agents.core.effects import AgentEffect
from agents.core.offline_work import OfflineTotals
from agents.core.replica_config import ReplicaConfig
from agents.core.state import AgentState
from agents.core.work_message import WorkRequest
from schemas.exchange import Outcome
from schemas.ids import ModelId
from schemas.state import Heartbeat, ReplicaState

SILENT_ROUTER = "no keep-alive from the requesting router for too long"
STOPPED_S = 1.0  # later than `wake_at`: far more than a busy event loop is ever late


class AgentCore:
    """Feed events with `handle`, perform the effects in order.

    Call `handle(TimerFired(), now)` at `wake_at` at the latest. An event that comes STOPPED_S later
    shows that this process or its host was stopped: then the silence of others does not count.
    """

    def __init__(self, replica: ReplicaConfig) -> None:
        self.state = AgentState(replica)
        self.totals = self.state.requests.totals
        self.wake_at = self.state.beat_due_at  # when the next `TimerFired` is due at the latest
        self.outstanding = 0  # requests taken from the bus and not ended

    def handle(self, event: events.AgentEvent, now: float) -> list[AgentEffect]:
        """What to do about `event`. `now`: seconds of a monotonic clock, never decreasing."""
        state = self.state
        if state.leaving is ReplicaState.GONE:
            self.wake_at = inf
            return []
        if now - self.wake_at > STOPPED_S:
            _restart_clocks(state, now)
        effects = state.effects
        effects.clear()
        HANDLERS[type(event)](state, event, now)
        if (offline := state.offline) is not None:
            full = heartbeat.is_full(state)
            is_open = heartbeat.replica_state(state) not in work.CLOSED
            offline_work.decide(state, offline, now, full=full, is_open=is_open)
        self.outstanding = outstanding = len(state.requests)
        if state.speed.is_wanted:
            is_free = not outstanding and self.replica_state is ReplicaState.READY
            if (first := speed_probe.decide(state, now, is_free=is_free)) is not None:
                effects.insert(0, first)
        heartbeat.publish_if_due(state, now)
        self.wake_at = state.beat_due_at
        return effects.copy()

    @property
    def replica_state(self) -> ReplicaState:
        return heartbeat.replica_state(self.state)

    @property
    def models(self) -> tuple[ModelId, ...]:
        return self.state.engine.models

    def adapter_of(self, work: WorkRequest) -> ModelId | None:
        """The adapter that it is for; None if for a model."""
        return work.model if work.model in self.state.engine.adapters else None

    @property
    def offline_totals(self) -> OfflineTotals:
        """For metrics."""
        return offline_work.totals(self.state)

    def down_because(self, now: float) -> str | None:
        """For the log: why it is down though its last scrape was good."""
        return engine_watch.down_because(self.state, now)

    def heartbeat(self, now: float) -> Heartbeat:
        """The replica as it is now, under the number of the last heartbeat published."""
        return heartbeat.heartbeat(self.state, now)


def _restart_clocks(state: AgentState, now: float) -> None:
    """This process was stopped until now."""
    state.routers.restart_clock(now)
    state.requests.restart_clock(now)
    if state.offline is not None:
        state.offline.admission.restart_clock(now)
    state.health.restart_clock(now)
    state.hangs.restart_clock(now)
    speed_probe.void(state.speed, now)


def _drain(state: AgentState, event: events.DrainRequested, now: float) -> None:
    state.leaving = ReplicaState.DRAINING


def _stop(state: AgentState, event: events.StopRequested, now: float) -> None:
    state.leaving = ReplicaState.DRAINING
    requests, why = state.requests, "the replica stopped"
    answers.end_all(state, requests.offline.by_inbox.values(), Outcome.PREEMPTED, why)
    answers.end_all(state, requests.online.by_inbox.values(), Outcome.ENGINE_LOST, why)


def _drained(state: AgentState, event: events.DrainFinished, now: float) -> None:
    state.leaving = ReplicaState.GONE


def _time_passed(state: AgentState, event: events.TimerFired, now: float) -> None:
    requests = state.requests
    if state.cuts.count:
        state.cuts.update(now)
    if state.engine.limit.is_lowered:
        state.engine.limit.update(now)
    if state.engine.width is not None and state.engine.width.known is not None:
        state.engine.bound(now)
    answers.end_all(state, requests.overdue(now), Outcome.DEADLINE, "the deadline passed")
    for router in state.routers.silent(now):
        answers.orphan(state, router, SILENT_ROUTER)
    lost = requests.without_next_part(now)
    answers.end_all(state, lost, Outcome.BODY_LOST, "the next part of the body never came")
    engine_watch.end_lost(state, now)
    engine_watch.probe(state, now)


HANDLERS: dict[type[Any], Callable[[AgentState, Any, float], None]] = {
    events.WorkArrived: work.arrived,
    events.BodyPartArrived: work.body_part_arrived,
    events.AdapterLoadEnded: work.adapter_load_ended,
    events.RelayBegan: answers.began,
    events.RelayEnded: answers.ended,
    events.CancelArrived: answers.cancelled,
    events.AliveArrived: keep_alives.alive,
    events.BusDisconnected: keep_alives.bus_lost,
    events.BusReconnected: keep_alives.bus_returned,
    events.EngineScraped: engine_watch.scraped,
    events.ScrapeFailed: engine_watch.scrape_failed,
    events.ProbeEnded: engine_watch.probe_ended,
    events.PromptMeasured: speed_probe.ended,
    events.DrainRequested: _drain,
    events.StopRequested: _stop,
    events.DrainFinished: _drained,
    events.TimerFired: _time_passed,
}
