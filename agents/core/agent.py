"""AgentCore: every decision of an agent. The package docstring has the host's loop and duties."""

from collections.abc import Callable, Iterable
from typing import Any

from agents.core import effects, events
from agents.core.adapters import Adapters
from agents.core.cut_requests import CutRequests, plain_answer_tokens
from agents.core.effects import AgentEffect
from agents.core.engine_health import BLIND_S, EngineBacklog, EngineHealth, HangDetector
from agents.core.engine_load import EngineLoad, LoadCounts
from agents.core.engine_results import ANSWERED, Verdict
from agents.core.events import RouterKey
from agents.core.heartbeat import HeartbeatTimer, ReplicaConfig
from agents.core.heartbeat_fields import HeartbeatFields, HeartbeatNumbers
from agents.core.offline_work import OfflineTotals, OfflineWork
from agents.core.request_tables import RequestTables
from agents.core.requests import (
    HELD_BYTES_MAX,
    AgentRequest,
    BadWork,
    BodyLost,
    WorkRequest,
    parse_handoff,
    parse_work,
)
from agents.core.routers import Fence, HandoffAcks, RouterLiveness
from agents.core.speed_probe import SpeedProbe
from schemas import subjects
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import BodyWanted, Outcome, Refusal, Refused
from schemas.ids import ModelId
from schemas.replies import reply_inbox
from schemas.state import DownReason, Heartbeat, ReplicaState

# States in which work is refused, and the reason that the router gets.
_CLOSED = {
    ReplicaState.STARTING: Refusal.ENGINE_DOWN,
    ReplicaState.DOWN: Refusal.ENGINE_DOWN,
    ReplicaState.DRAINING: Refusal.DRAINING,
    ReplicaState.GONE: Refusal.DRAINING,
}

# After these the engine may be gone, or another one may be in its place.
_DOUBTFUL = (Outcome.ENGINE_LOST, Outcome.ENGINE_FAILED)
HANGS = "the engine hangs: it answers scrapes and computes nothing"
NOT_LOADED = "the engine could not load its adapter"
SILENT_ROUTER = "no keep-alive from the requesting router for too long"
STOPPED_S = 1.0  # later than `wake_at`: far more than a busy event loop is ever late


class AgentCore:
    """Feed events with `handle`, perform the effects in order.

    Call `handle(TimerFired(), now)` at `wake_at` at the latest. An event that comes STOPPED_S later
    shows that this process or its host was stopped: then the silence of others does not count.
    """

    def __init__(self, replica: ReplicaConfig) -> None:
        self._replica = replica
        self._work_subject = subjects.work(replica.region, replica.replica)
        self._tables = tables = RequestTables()
        self._requests = tables.online
        self.totals = tables.totals
        self._routers = RouterLiveness(replica.region)
        self._offline = OfflineWork(replica, tables, self._routers)
        self._acks = HandoffAcks()
        self._fence = Fence(replica.region)
        self._engine = EngineLoad(
            outstanding_max=replica.outstanding_max,
            batch_max=replica.batch_max,
            counts_own=replica.counts_own,
        )
        self._results, self._limit = self._engine.results, self._engine.limit
        self._adapters = Adapters(replica.adapters, replica.adapters_max, tables, self._engine)
        self.speed = SpeedProbe(replica, self._engine)
        self._fields = HeartbeatFields(
            replica,
            tables,
            self._engine,
            self._offline,
            self._adapters,
            self._fence,
            self._acks,
            self.speed,
        )
        self._health = EngineHealth()
        self._cuts = CutRequests()
        self._hangs = HangDetector(replica.load_s)
        self._timer = HeartbeatTimer(replica.heartbeat_s)
        self._leaving: ReplicaState | None = None  # DRAINING, then GONE
        self._seq = self._served_total = self._refused_total = 0
        self._published: tuple[object, ...] | None = None  # what must be published at once
        self.wake_at = self._timer.due_at  # when the next `TimerFired` is due at the latest
        self.outstanding = 0  # requests taken from the bus and not ended
        self._handlers: dict[type[Any], Callable[[Any, float], list[AgentEffect]]] = {
            events.WorkArrived: self._on_work,
            events.BodyPartArrived: self._on_body_part,
            events.CancelArrived: self._on_cancel,
            events.AliveArrived: self._on_alive,
            events.BusDisconnected: self._on_bus_lost,
            events.BusReconnected: self._on_bus_returned,
            events.RelayBegan: self._on_began,
            events.RelayEnded: self._on_ended,
            events.EngineScraped: self._on_scraped,
            events.ScrapeFailed: self._on_scrape_failed,
            events.ProbeEnded: self._on_probe_ended,
            events.PromptMeasured: self.speed.ended,
            events.AdapterLoadEnded: self._on_adapter_load_ended,
            events.DrainRequested: self._on_drain,
            events.StopRequested: self._on_stop,
            events.DrainFinished: self._on_drained,
            events.TimerFired: self._on_timer,
        }

    def handle(self, event: events.AgentEvent, now: float) -> list[AgentEffect]:
        """What to do about `event`. `now`: seconds of a monotonic clock, never decreasing."""
        if self._leaving is ReplicaState.GONE:
            return []
        if now - self.wake_at > STOPPED_S:
            times = self._routers, self._tables, self._offline, self._health, self._hangs
            for part in (*times, self.speed):
                part.restart_clock(now)
        done = self._handlers[type(event)](event, now)
        if self._replica.offline is not None:
            is_open = self.state not in _CLOSED
            done += self._offline.decide(now, full=self._load().full, is_open=is_open)
        self.outstanding = len(self._tables)
        if self.speed.is_wanted:
            is_free = not self.outstanding and self.state is ReplicaState.READY
            done = self.speed.decide(now, is_free=is_free) + done
        done += self._heartbeat_if_due(now)
        self.wake_at = self._timer.due_at
        return done

    @property
    def state(self) -> ReplicaState:
        if self._leaving is not None:
            return self._leaving
        found = ReplicaState.DOWN if self._hangs.hung else self._health.state
        return self._routers.orders.applied_to(found)

    @property
    def models(self) -> tuple[ModelId, ...]:
        return self._engine.models

    def adapter_of(self, inbox: str) -> ModelId | None:
        """The adapter that the request with this inbox is for; None if for a model."""
        adapters = self._engine.adapters
        record = self._tables.find(inbox) if adapters else None
        return None if record is None or record.work.model not in adapters else record.work.model

    @property
    def offline_totals(self) -> OfflineTotals:
        """For metrics."""
        return self._offline.totals

    def down_because(self, now: float) -> str | None:
        """For the log: why it is down though its last scrape was good."""
        if self._health.asleep:
            return "engine asleep: it was told to sleep and not to wake up"
        if not self._hangs.hung:
            return None
        silence = f"no output and no counter moved for {self._hangs.silent_s(now):.1f} s"
        return f"engine hung: {self.outstanding} requests outstanding, {silence}"

    def heartbeat(self, now: float) -> Heartbeat:
        """The replica as it is now, under the number of the last heartbeat published."""
        return self._heartbeat(self._load(), self.state, now)

    def _load(self) -> LoadCounts:
        requests, cuts = self._requests, self._cuts.count
        outstanding, at_engine = len(requests.by_inbox), requests.at_engine
        if cuts:
            outstanding += cuts if outstanding else 0  # one is always taken: its answer teaches
            at_engine += cuts
        if self._limit.is_lowered:  # by what the engine takes of both kinds
            outstanding += self._tables.offline.at_engine
        return self._engine.counts(requests.counters, outstanding, at_engine)

    def _heartbeat(self, counts: LoadCounts, state: ReplicaState, now: float) -> Heartbeat:
        down_reason = DownReason.HUNG if self._hangs.hung else None
        if self._health.state is ReplicaState.DOWN:
            asleep = self._health.asleep
            down_reason = DownReason.ASLEEP if asleep else DownReason.UNREACHABLE
        numbers = HeartbeatNumbers(self._seq, self._served_total, self._refused_total)
        return self._fields.heartbeat(numbers, counts, state, down_reason, now)

    def _heartbeat_if_due(self, now: float) -> list[AgentEffect]:
        state, counts, engine = self.state, self._load(), self._engine
        loads = self._adapters.state(now)
        if engine.loaded.on_demand:
            loads = (*loads, *engine.loaded.told)
        urgent = (state, counts.full, engine.models, engine.paths, engine.routes, loads)
        if urgent != self._published:
            self._timer.hurry()
        if now < self._timer.due_at and self._leaving is not ReplicaState.GONE:
            return []
        self._published = urgent
        self._timer.sent(now)
        self._seq += 1
        return [effects.PublishHeartbeat(self._heartbeat(counts, state, now))]

    # Work, from its message to the engine.

    def _on_work(self, event: events.WorkArrived, now: float) -> list[AgentEffect]:
        inbox, home = event.inbox, self._replica.region
        address = reply_inbox("work", self._work_subject, inbox, home, None)
        if address is None:
            return [effects.DropWork(inbox, len(event.body))]
        work, problem = None, ""
        try:
            work = parse_work(event.headers, event.body)
        except BadWork as error:
            problem = str(error)
        if (handoff := parse_handoff(event.headers)) is not None:
            self._acks.record(handoff)
        if self._tables.find(inbox) is not None:
            return []  # frames of two responses would mix
        if work is None:
            return [self._refuse(inbox, Refusal.BAD_WORK, problem)]
        size = len(event.body) if work.body_bytes is None else work.body_bytes
        if not self._fence.admits(work.owner or home, work.term, now):
            return [self._refuse(inbox, Refusal.NOT_OWNER, offline=work.offline)]
        if (reason := self._reason_against(work, size, now)) is not None:
            return [self._refuse(inbox, reason, offline=work.offline)]
        router = RouterKey(address.region, address.router)
        return self._take(AgentRequest(inbox, router, work, event.headers, size, now), event, now)

    def _take(
        self, record: AgentRequest, event: events.WorkArrived, now: float
    ) -> list[AgentEffect]:
        work = record.work
        self._routers.join(record.router, now)
        self._tables.of(record).add(record, now)
        self._adapters.used(work.model, now)
        if work.deadline_s <= 0.0:
            return self._finish(record, Outcome.DEADLINE, "no time was left on arrival")
        if work.body_bytes is None:
            return self._start(record, event.body, now)
        message = BodyWanted(self._replica.region, self._replica.replica)
        return [effects.RequestBody(record.inbox, message)]

    def _reason_against(self, work: WorkRequest, size: int, now: float) -> Refusal | None:
        state = self.state
        if state in _CLOSED:
            return _CLOSED[state]
        if not self._replica.computes(work.role):
            return Refusal.WRONG_MODEL
        serves = self._engine.serves(work.model, work.path)
        if not serves and (reason := self._adapters.reason_against(work, now)) is not None:
            return reason
        if work.warm and not self._engine.loaded.may_ask(work.model, now):
            return Refusal.WRONG_MODEL  # nobody asked for what the engine would have to load
        if work.residency and not self._replica.fits_residency(work.residency):
            return Refusal.RESIDENCY
        if work.offline:
            return None if self._offline.has_room(work, size, now) else Refusal.NO_OFFLINE_ROOM
        if self._requests.held_bytes + size > HELD_BYTES_MAX:
            return Refusal.FULL
        counts = self._load()
        return Refusal.FULL if (counts.capped if work.may_queue else counts.full) else None

    def _refuse(
        self, inbox: str, reason: Refusal, detail: str = "", *, offline: bool = False
    ) -> AgentEffect:
        return effects.Refuse(inbox, self._refused(reason, offline=offline), detail)

    def _refused(self, reason: Refusal, *, offline: bool) -> Refused:
        self._refused_total += not offline
        fresh = self._load()
        return Refused(
            reason=reason,
            region=self._replica.region,
            replica=self._replica.replica,
            pending=-1 if fresh.pending is None else fresh.pending,
            running=-1 if fresh.running is None else fresh.running,
        )

    def _start(self, record: AgentRequest, body: bytes, now: float) -> list[AgentEffect]:
        """Its body is whole. An offline request waits for what online ones leave."""
        self._hangs.seen(record.work.path, record.work.model, answered=False)
        if record.work.offline:
            return self._offline.hold(record, body, now)
        if self._adapters.is_loaded(record.work.model):
            return self._send(record, body, now)
        if (waits := self._adapters.wait(record, body, now)) is not None:
            return waits
        self._forget(record)
        return [self._refuse(record.inbox, Refusal.FULL, "no room for its adapter any more")]

    def _send(self, record: AgentRequest, body: bytes, now: float) -> list[AgentEffect]:
        self._requests.send(record, now)
        if self._replica.counts_own and record.work.generates:
            record.answer_tokens = plain_answer_tokens(body)
        self._offline.online_sent(record, now)
        if self._engine.loaded.on_demand:
            self._sent_on_demand(record, now)
        return [record.relay(body)]

    def _sent_on_demand(self, record: AgentRequest, now: float) -> None:
        """The engine has to load its model now, if it has not: that one is asked if it hangs."""
        self._engine.loaded.sent(record.work.model, now)
        self._hangs.seen(record.work.path, record.work.model, answered=True)

    def _on_adapter_load_ended(
        self, event: events.AdapterLoadEnded, now: float
    ) -> list[AgentEffect]:
        done: list[AgentEffect] = []
        for record, body in self._adapters.ended(event, now):
            if event.good:
                done += self._send(record, body, now)
            else:
                self._forget(record)
                done.append(self._refuse(record.inbox, Refusal.WRONG_MODEL, NOT_LOADED))
        return [*done, effects.ScrapeNow()]

    def _on_body_part(self, event: events.BodyPartArrived, now: float) -> list[AgentEffect]:
        record = self._tables.find(event.inbox)
        if record is None:
            return []
        try:
            body = self._tables.of(record).add_part(event.inbox, event.offset, event.data, now)
        except BodyLost as problem:
            return self._finish(record, Outcome.BODY_LOST, str(problem))
        return [] if body is None else self._start(record, body, now)

    # Responses.

    def _on_began(self, event: events.RelayBegan, now: float) -> list[AgentEffect]:
        record = self._tables.find(event.inbox)
        if record is not None and record.sent_at is not None:
            self._tables.of(record).begin(record, now)
            self._offline.began(event.inbox, now)
            if self._engine.loaded.on_demand:
                loaded = self._engine.loaded
                (loaded.answered if event.good else loaded.failed)(record.work.model, now)
            if event.good and record.work.path not in SERVER_PATHS:
                self._hangs.seen(record.work.path, record.work.model, answered=True)
                self._hangs.begun(record.prompt_tokens, record.sent_at, now)
                if self._engine.counts_own:
                    self._hangs.answered(record.work.model, now)
        return []

    def _on_ended(self, event: events.RelayEnded, now: float) -> list[AgentEffect]:
        record = self._tables.find(event.inbox)
        assert record is not None and record.sent_at is not None, "an end without a StartRelay"
        work, alone = record.work, record.alone and not record.work.is_decode
        if event.outcome is Outcome.DONE and not work.offline:
            began_at, odd = record.first_token_at(streamed=event.streamed), work.is_odd
            self._engine.learn(event.usage, record.sent_at, began_at, now, alone=alone, odd=odd)
            self._served_total += not work.warm
        elif event.outcome is not Outcome.DONE and self._engine.loaded.on_demand:
            self._engine.loaded.failed(work.model, now)
        if self._replica.counts_own and work.generates:
            self._take_end(record, event, record.sent_at, now)
        self._offline.ended(event, record.sent_at, now, offline=work.offline)
        self._tables.end(record, record.sent_at, event.outcome, now)
        self._routers.leave(record.router)
        if event.verdict is ANSWERED:
            self._results.answered(now)
            if self._limit.is_lowered:
                self._limit.answered(now)
        else:
            self._take_verdict(event.verdict, now)
        return [effects.ScrapeNow()] if event.outcome in _DOUBTFUL else []

    def _take_verdict(self, verdict: Verdict, now: float) -> None:
        """Of a request that the engine did not answer well, and that no longer counts as its."""
        if verdict.failure is not None:
            if self._results.failed(verdict.failure, now):
                self._published = None  # to be told at once
        elif verdict.too_many_s is not None:
            self._limit.too_many(verdict.too_many_s, self._tables.at_engine, now)

    def _take_end(
        self, record: AgentRequest, event: events.RelayEnded, sent_at: float, now: float
    ) -> None:
        """Of a request at an engine that shows no numbers: it may go on with one that was cut."""
        if event.verdict is ANSWERED:
            self._cuts.answered(event.usage.completion_tokens, sent_at, now)
        elif event.outcome is Outcome.DONE:
            return  # an error, which an engine may answer beside what it computes
        elif record.aborted and record.answer_tokens is not None:
            self._cuts.cut(record.answer_tokens, sent_at, now)

    def _on_cancel(self, event: events.CancelArrived, now: float) -> list[AgentEffect]:
        record = self._tables.find(event.inbox)
        return [] if record is None else self._end(record, Outcome.CANCELLED, "cancelled")

    def _end_all(
        self, records: Iterable[AgentRequest], outcome: Outcome, why: str
    ) -> list[AgentEffect]:
        return [effect for record in list(records) for effect in self._end(record, outcome, why)]

    def _end(self, record: AgentRequest, outcome: Outcome, why: str) -> list[AgentEffect]:
        """End a request that has not ended by itself: abort its relay, if it has one."""
        if record.sent_at is None:
            return self._finish(record, outcome, why)
        aborts = self._tables.of(record).abort(record)
        return [effects.AbortRelay(record.inbox, outcome, why)] if aborts else []

    def _finish(self, record: AgentRequest, outcome: Outcome, why: str) -> list[AgentEffect]:
        self._forget(record)
        self.totals.add(outcome)
        return [effects.SendEnd(record.inbox, outcome, why)]

    def _forget(self, record: AgentRequest) -> None:
        self._offline.withdraw(record)
        self._adapters.withdraw(record)
        self._tables.of(record).remove(record)
        self._routers.leave(record.router)

    # Routers and the bus.

    def _on_alive(self, event: events.AliveArrived, now: float) -> list[AgentEffect]:
        router = RouterKey(event.region, event.router)
        done: list[AgentEffect] = []
        if event.term is not None:
            owner = self._fence.owner(now)
            self._fence.claim(event.region, event.term, now)
            if self._fence.owner(now) != owner:
                done.append(effects.LogOwnerChange(router, event.term))
        change = self._routers.alive(router, event.epoch, now, event.order)
        if change.resync:
            done.append(effects.ResyncRouter(router))
        if change.restarted:
            abroad = event.region != self._replica.region
            self._acks.forget(event.router, event.region if abroad else None)
            done += self._orphan(router, "the requesting router restarted")
        return done

    def _orphan(self, router: RouterKey, why: str) -> list[AgentEffect]:
        orphans = [record for record in self._tables.all() if record.router == router]
        return self._end_all(orphans, Outcome.CANCELLED, why)

    def _on_bus_lost(self, event: events.BusDisconnected, now: float) -> list[AgentEffect]:
        self._routers.bus_lost(now)
        return []

    def _on_bus_returned(self, event: events.BusReconnected, now: float) -> list[AgentEffect]:
        self._routers.bus_returned(now)
        return []

    # The engine.

    def _on_scraped(self, event: events.EngineScraped, now: float) -> list[AgentEffect]:
        tables = self._tables
        event = self.speed.scraped(event)
        self._engine.scraped(self._offline.online_part(event, now))
        self._adapters.scraped(event, self._health.state)
        asleep = bool(event.reading.is_asleep)
        if asleep:
            self._health.slept(now)
            self._results.clear()  # what it was, not what it is when it wakes up
        else:
            self._health.succeeded(wants_proof=event.pages.wants_proof)
        self._requests.scraped(event.began_at, now)
        at_engine = tables.at_engine - len(event.held) - tables.waiting_for_others(now)
        is_loading = self._engine.loaded.loading or self._may_load(now)
        backlog = EngineBacklog(
            0 if asleep else at_engine, tables.longest_prompt_tokens, is_loading
        )
        line = self._engine.prefill.line
        hangs = self._hangs.scraped(
            event.reading.progress, event.last_content_at, backlog, line, now
        )
        return self._let_go(also_sent=True) if hangs else []

    def _may_load(self, now: float) -> bool:
        """Whether an engine that shows no numbers may be loading a model for a request, or still
        computes one that was cut. Looked into only when it has been silent for long."""
        if not self._engine.counts_own or self._hangs.silent_s(now) < BLIND_S:
            return False
        doubted_at = now - self._hangs.silent_s(now) + BLIND_S
        if self._cuts.count and self._cuts.may_compute(doubted_at, now):
            return True
        return any(
            self._hangs.may_load(record.work.model, record.sent_at)
            for record in self._tables.waiting()
            if record.sent_at is not None
        )

    def _on_scrape_failed(self, event: events.ScrapeFailed, now: float) -> list[AgentEffect]:
        self._health.failed(event, now)
        self._hangs.scrape_failed()
        if self._health.state is ReplicaState.DOWN:
            self._cuts.clear()
            self._results.clear()
            self._limit.clear(now)
        return []

    def _on_probe_ended(self, event: events.ProbeEnded, now: float) -> list[AgentEffect]:
        hangs = self._hangs.probed(now, answered=event.answered)
        return self._let_go(also_sent=False) if hangs else []

    def _let_go(self, *, also_sent: bool) -> list[AgentEffect]:
        """The engine hangs: requests without a byte are placed elsewhere, and have not failed.

        `also_sent`: those at the engine too. Not if it may compute them after all.
        """
        done: list[AgentEffect] = []
        for record in self._tables.waiting():
            offline = record.work.offline
            if record.sent_at is None:
                self._forget(record)
                done.append(self._refuse(record.inbox, Refusal.ENGINE_DOWN, HANGS, offline=offline))
            elif also_sent and self._tables.of(record).abort(record):
                refused = self._refused(Refusal.ENGINE_DOWN, offline=offline)
                done.append(effects.AbortRelay(record.inbox, Outcome.ENGINE_LOST, HANGS, refused))
        return done

    # The end, and time.

    def _on_drain(self, event: events.DrainRequested, now: float) -> list[AgentEffect]:
        self._leaving = ReplicaState.DRAINING
        return []

    def _on_stop(self, event: events.StopRequested, now: float) -> list[AgentEffect]:
        self._leaving = ReplicaState.DRAINING
        tables, why = self._tables, "the replica stopped"
        done = self._end_all(tables.offline.by_inbox.values(), Outcome.PREEMPTED, why)
        return done + self._end_all(tables.online.by_inbox.values(), Outcome.ENGINE_LOST, why)

    def _on_drained(self, event: events.DrainFinished, now: float) -> list[AgentEffect]:
        self._leaving = ReplicaState.GONE
        return []

    def _on_timer(self, event: events.TimerFired, now: float) -> list[AgentEffect]:
        tables = self._tables
        if self._cuts.count:
            self._cuts.update(now)
        if self._limit.is_lowered:
            self._limit.update(now)
        done = self._end_all(tables.overdue(now), Outcome.DEADLINE, "the deadline passed")
        for router in self._routers.silent(now):
            done += self._orphan(router, SILENT_ROUTER)
        lost = tables.without_next_part(now)
        done += self._end_all(lost, Outcome.BODY_LOST, "the next part of the body never came")
        if self._health.lost(now):
            done += self._end_all(self._tables.all(), Outcome.ENGINE_LOST, "the engine fell silent")
        if self._hangs.is_given_up(now):
            held = self._engine.held
            stuck = [record for record in self._tables.all() if record.inbox not in held]
            done += self._end_all(stuck, Outcome.ENGINE_LOST, HANGS)
        models, wants_proof = self._engine.models, self._health.wants_proof
        if (loaded := self._engine.loaded).on_demand:
            models = loaded.to_probe(models)
            if wants_proof:  # it must not load a model for that
                wants_proof = bool(models) and all(loaded.may_ask(each, now) for each in models)
        probe = self._hangs.probe(models, now, wants_proof=wants_proof)
        return done if probe is None else [*done, probe]
