"""AgentCore: every decision of an agent. See the package docstring for the theory."""

from collections.abc import Callable, Iterable
from typing import Any

from agents.core import effects, events, load
from agents.core.answers import HELD_BYTES_MAX, Answer, AnswerTable
from agents.core.beat import Replica, Told, compose
from agents.core.bodies import Bodies, BodyLost
from agents.core.cadence import Cadence
from agents.core.effects import Effect
from agents.core.fence import Fence
from agents.core.routers import RouterName, RouterWatch
from agents.core.taken import Taken
from agents.core.view import EngineView, Load
from agents.core.work import BadWork, Work, parse_handoff, parse_owner, parse_term, parse_work
from schemas import subjects
from schemas.exchange import BodyWanted, Outcome, Refusal, Refused
from schemas.ids import ModelId
from schemas.replies import reply_inbox
from schemas.state import Heartbeat, ReplicaState

# States in which work is refused, and what the router is told.
_CLOSED = {
    ReplicaState.STARTING: Refusal.ENGINE_DOWN,
    ReplicaState.DOWN: Refusal.ENGINE_DOWN,
    ReplicaState.DRAINING: Refusal.DRAINING,
    ReplicaState.GONE: Refusal.DRAINING,
}


# After these the engine may be gone, or be another one.
_DOUBTFUL = (Outcome.ENGINE_LOST, Outcome.ENGINE_FAILED)
HANGS = "the engine hangs: it answers looks and computes nothing"
STOOD_STILL_S = 1.0  # beyond `wake_at`: far more than a busy event loop is ever late


class AgentCore:
    """Decide; never do. Feed events with `handle`, perform the effects in order.

    Call `handle(Tick(), now)` at `wake_at` at the latest. An event that comes STOOD_STILL_S later
    shows that this process was stopped, or its host was: then nobody else's silence counts.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._answers = AnswerTable()
        self._bodies = Bodies()
        self._routers = RouterWatch(replica.region)
        self._taken = Taken()
        self._fence = Fence(replica.region)
        self._engine = EngineView(batch_max=replica.batch_max, counts_own=replica.counts_own)
        self._cadence = Cadence(replica.heartbeat_s)
        self._leaving: ReplicaState | None = None  # DRAINING, then GONE
        self._seq = 0
        self._served_total = 0
        self._refused_total = 0
        self._like: Work | None = None  # what a probe is like: the last that was answered well
        self._has_answered = False
        self._told: tuple[ReplicaState, bool, tuple[ModelId, ...]] | None = None
        self._handlers: dict[type[Any], Callable[[Any, float], list[Effect]]] = {
            events.WorkArrived: self._on_work,
            events.BodyPartArrived: self._on_body_part,
            events.CancelArrived: self._on_cancel,
            events.AliveArrived: self._on_alive,
            events.BusLost: self._on_bus_lost,
            events.BusReturned: self._on_bus_returned,
            events.AnswerBegan: self._on_began,
            events.AnswerEnded: self._on_ended,
            events.EngineRead: self._on_engine_read,
            events.EngineFailed: self._on_engine_failed,
            events.ProbeEnded: self._on_probe_ended,
            events.DrainAsked: self._on_drain,
            events.StopAsked: self._on_stop,
            events.Left: self._on_left,
            events.Tick: self._on_tick,
        }

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """What to do about `event`. `now`: seconds of a monotonic clock, never decreasing."""
        if self._leaving is ReplicaState.GONE:
            return []
        if now - self._cadence.due_at > STOOD_STILL_S:
            self._wait_anew(now)
        return [*self._handlers[type(event)](event, now), *self._beat(now)]

    def _wait_anew(self, now: float) -> None:
        """This process stood still: what others sent meanwhile is still to be read."""
        self._routers.wait_anew(now)
        self._bodies.wait_anew(now)
        self._engine.wait_anew(now)

    @property
    def wake_at(self) -> float:
        """When the next `Tick` is wanted at the latest."""
        return self._cadence.due_at

    @property
    def outstanding(self) -> int:
        """Answers taken from the bus and not finished."""
        return len(self._answers)

    @property
    def state(self) -> ReplicaState:
        return self._leaving or self._engine.state

    @property
    def models(self) -> tuple[ModelId, ...]:
        """What the engine said it serves."""
        return self._engine.models

    def down_because(self, now: float) -> str | None:
        """For people: why a look that went well leaves it down."""
        if not self._engine.stall.hung:
            return None
        silent_s = self._engine.stall.silent_s(now)
        owed = f"{len(self._answers)} requests outstanding"
        return f"engine hung: {owed}, no output and no counter moved for {silent_s:.1f} s"

    def heartbeat(self, now: float) -> Heartbeat:
        """The replica as it is now, under the number of the last heartbeat published."""
        carried = self._engine.load(self._answers)
        return self._heartbeat(carried, self._is_full(carried), now)

    def _heartbeat(self, carried: Load, full: bool, now: float) -> Heartbeat:
        told = Told(
            self._seq,
            self.state,
            full,
            self._served_total,
            self._refused_total,
            self._taken.snapshot(),
            owner := self._fence.owner(now),
            self._taken.snapshot(owner) if owner is not None else None,
            self._fence.term,
        )
        return compose(self._replica, self._engine, self._answers, carried, told, now)

    def _on_work(self, event: events.WorkArrived, now: float) -> list[Effect]:
        handoff = parse_handoff(event.headers)
        if handoff is not None:
            self._taken.note(handoff)
        router = self._router_of(event.inbox)
        if router is None or event.inbox in self._answers:
            return []  # nobody to answer, or frames of two answers would mix
        try:
            work = parse_work(event.headers, event.body)
            owner = parse_owner(event.headers) or self._replica.region
        except BadWork as problem:
            return [self._refuse(event.inbox, Refusal.BAD_WORK, str(problem))]
        size = len(event.body) if work.body_bytes is None else work.body_bytes
        admitted = self._fence.admits(owner, parse_term(event.headers), now)
        reason = self._reason_against(work, size) if admitted else Refusal.NOT_OWNER
        if reason is not None:
            return [self._refuse(event.inbox, reason)]
        answer = Answer(event.inbox, router, work, event.headers, size, now)
        self._answers.add(answer)
        self._routers.join(router, now)
        return self._take(answer, event.body, now)

    def _router_of(self, inbox: str) -> RouterName | None:
        """Whose inbox this is, or None for a reply subject that work is not answered at."""
        home = self._replica.region
        subject = subjects.work(home, self._replica.replica)
        address = reply_inbox("work", subject, inbox, home, None)
        return None if address is None else RouterName(address.region, address.router)

    def _take(self, answer: Answer, body: bytes, now: float) -> list[Effect]:
        if answer.work.deadline_s <= 0.0:
            return self._finish(answer, Outcome.DEADLINE, "no time was left on arrival")
        if answer.work.body_bytes is None:
            return self._hand(answer, body, now)
        self._bodies.open(answer.inbox, answer.work.body_bytes, now)
        wanted = BodyWanted(self._replica.region, self._replica.replica)
        return [effects.AskBody(answer.inbox, wanted)]

    def _reason_against(self, work: Work, size: int) -> Refusal | None:
        if self.state in _CLOSED:
            return _CLOSED[self.state]
        if work.model not in self._engine.models:
            return Refusal.WRONG_MODEL
        if not self._replica.stands_on(work.residency):
            return Refusal.RESIDENCY
        over = self._answers.held_bytes + size > HELD_BYTES_MAX
        return Refusal.FULL if over or self._full_for(work) else None

    def _refuse(self, inbox: str, reason: Refusal, detail: str = "") -> Effect:
        return effects.Refuse(inbox, self._refused(reason), detail)

    def _refused(self, reason: Refusal) -> Refused:
        self._refused_total += 1
        fresh = self._engine.load(self._answers)
        return Refused(
            reason=reason,
            region=self._replica.region,
            replica=self._replica.replica,
            pending=-1 if fresh.pending is None else fresh.pending,
            running=-1 if fresh.running is None else fresh.running,
        )

    def _hand(self, answer: Answer, body: bytes, now: float) -> list[Effect]:
        answer.unqueued = self._engine.is_unqueued(self._answers)
        self._answers.hand(answer, now)
        work = answer.work
        if not self._has_answered:
            self._like = work
        return [effects.Hand(answer.inbox, work.path, work.request_id, body, answer.headers)]

    def _on_body_part(self, event: events.BodyPartArrived, now: float) -> list[Effect]:
        answer = self._answers.get(event.inbox)
        if answer is None:
            return []
        try:
            body = self._bodies.add(event.inbox, event.offset, event.data, now)
        except BodyLost as problem:
            return self._finish(answer, Outcome.BODY_LOST, str(problem))
        return [] if body is None else self._hand(answer, body, now)

    def _on_cancel(self, event: events.CancelArrived, now: float) -> list[Effect]:
        answer = self._answers.get(event.inbox)
        return [] if answer is None else self._end(answer, Outcome.CANCELLED, "cancelled")

    def _on_alive(self, event: events.AliveArrived, now: float) -> list[Effect]:
        name = RouterName(event.region, event.router)
        done: list[Effect] = []
        if event.term is not None:
            owner = self._fence.owner(now)
            self._fence.claim(event.region, event.term, now)
            if self._fence.owner(now) != owner:
                done.append(effects.OwnerChanged(name, event.term))
        heard = self._routers.seen(name, event.epoch, now)
        if heard.again:
            done.append(effects.SpeakUp(name))
        if heard.restarted:
            abroad = event.region != self._replica.region
            self._taken.forget(event.router, event.region if abroad else None)
            done += self._orphan(name, "the asking router restarted")
        return done

    def _on_bus_lost(self, event: events.BusLost, now: float) -> list[Effect]:
        self._routers.bus_lost(now)
        return []

    def _on_bus_returned(self, event: events.BusReturned, now: float) -> list[Effect]:
        self._routers.bus_returned(now)
        return []

    def _orphan(self, name: RouterName, why: str) -> list[Effect]:
        asked = [answer for answer in self._answers if answer.router == name]
        return self._end_all(asked, Outcome.CANCELLED, why)

    def _on_began(self, event: events.AnswerBegan, now: float) -> list[Effect]:
        answer = self._answers.get(event.inbox)
        if answer is not None and answer.handed_at is not None:
            self._answers.begin(answer, now)
            if event.good:
                self._like, self._has_answered = answer.work, True
                self._engine.stall.begun(answer.prompt_tokens, answer.handed_at, now)
        return []

    def _on_ended(self, event: events.AnswerEnded, now: float) -> list[Effect]:
        answer = self._answers.get(event.inbox)
        assert answer is not None, "a relay ended that was never handed over, or twice"
        self._engine.learn(answer, event, now)
        self._answers.settle(answer, now)
        self._forget(answer)
        if event.outcome is Outcome.DONE and not answer.work.warm:
            self._served_total += 1
        return [effects.LookNow()] if event.outcome in _DOUBTFUL else []

    def _on_engine_read(self, event: events.EngineRead, now: float) -> list[Effect]:
        self._engine.read(event)
        self._answers.look(event.began_at, now)
        hangs = self._engine.stalls(event, self._answers, now)
        return self._let_go(also_handed=True) if hangs else []

    def _on_probe_ended(self, event: events.ProbeEnded, now: float) -> list[Effect]:
        hangs = self._engine.stall.probed(now, answered=event.answered)
        return self._let_go(also_handed=False) if hangs else []

    def _let_go(self, *, also_handed: bool) -> list[Effect]:
        """The engine hangs: what has no byte yet is placed elsewhere, and has not failed.

        `also_handed`: what the engine was handed too. Not if it may compute it after all.
        """
        done: list[Effect] = []
        for answer in list(self._answers.waiting()):
            if answer.handed_at is None:
                self._forget(answer)
                done.append(self._refuse(answer.inbox, Refusal.ENGINE_DOWN, HANGS))
            elif also_handed and not answer.aborted:
                answer.aborted = True
                refused = self._refused(Refusal.ENGINE_DOWN)
                done.append(effects.Abort(answer.inbox, Outcome.ENGINE_LOST, HANGS, refused))
        return done

    def _on_engine_failed(self, event: events.EngineFailed, now: float) -> list[Effect]:
        self._engine.failed(event, now)
        self._engine.stall.look_failed()
        return []

    def _on_drain(self, event: events.DrainAsked, now: float) -> list[Effect]:
        self._leaving = ReplicaState.DRAINING
        return []

    def _on_stop(self, event: events.StopAsked, now: float) -> list[Effect]:
        self._leaving = ReplicaState.DRAINING
        return self._end_all(self._answers, Outcome.ENGINE_LOST, "the replica stopped")

    def _on_left(self, event: events.Left, now: float) -> list[Effect]:
        self._leaving = ReplicaState.GONE
        return []

    def _on_tick(self, event: events.Tick, now: float) -> list[Effect]:
        done: list[Effect] = []
        overdue = self._answers.overdue(now)
        done += self._end_all(overdue, Outcome.DEADLINE, "the deadline passed")
        for name in self._routers.silent(now):
            done += self._orphan(name, "the replica has not heard the asking router for too long")
        lost = [found for inbox in self._bodies.late(now) if (found := self._answers.get(inbox))]
        done += self._end_all(lost, Outcome.BODY_LOST, "the next part of the body never came")
        if self._engine.health.lost(now):
            done += self._end_all(self._answers, Outcome.ENGINE_LOST, "the engine fell silent")
        if self._engine.stall.is_given_up(now):
            owed = [answer for answer in self._answers if answer.inbox not in self._engine.held]
            done += self._end_all(owed, Outcome.ENGINE_LOST, HANGS)
        if self._engine.stall.begins_probe(now):
            done.append(self._probe())
        return done

    def _probe(self) -> Effect:
        """The smallest request of a kind that it has answered, for a model that it serves now."""
        assert self._like is not None, "what hangs was given work"
        models = self._engine.models
        model = self._like.model if self._like.model in models else models[0]
        return effects.Probe(self._like.path, model)

    def _end_all(self, answers: Iterable[Answer], outcome: Outcome, why: str) -> list[Effect]:
        return [effect for answer in answers for effect in self._end(answer, outcome, why)]

    def _end(self, answer: Answer, outcome: Outcome, why: str) -> list[Effect]:
        """End an answer that has not ended by itself: abort its relay, if it has one."""
        if answer.handed_at is None:
            return self._finish(answer, outcome, why)
        if answer.aborted:
            return []
        answer.aborted = True
        return [effects.Abort(answer.inbox, outcome, why)]

    def _finish(self, answer: Answer, outcome: Outcome, why: str) -> list[Effect]:
        self._forget(answer)
        return [effects.Finish(answer.inbox, outcome, why)]

    def _forget(self, answer: Answer) -> None:
        self._answers.remove(answer)
        self._bodies.close(answer.inbox)
        self._routers.leave(answer.router)

    def _full_for(self, work: Work) -> bool:
        pending = None if work.may_queue else self._engine.load(self._answers).pending
        return load.full(pending, len(self._answers), self._replica.outstanding_max)

    def _is_full(self, carried: Load) -> bool:
        return load.full(carried.pending, len(self._answers), self._replica.outstanding_max)

    def _beat(self, now: float) -> list[Effect]:
        carried = self._engine.load(self._answers)
        full = self._is_full(carried)
        verdict = (self.state, full, self._engine.models)
        if verdict != self._told:
            self._cadence.hurry()
        last_word = self._leaving is ReplicaState.GONE
        if now < self._cadence.due_at and not last_word:
            return []
        self._told = verdict
        self._cadence.sent(now)
        self._seq += 1
        return [effects.Beat(self._heartbeat(carried, full, now))]
