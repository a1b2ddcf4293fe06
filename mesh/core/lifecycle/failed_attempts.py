"""Attempts that are refused, fail or are lost: another one, or the request's end.

A refusal leads back into the hold queue until there were `refusals_max` of them, a failure before
the first byte until there were `failures_max` or no place is left. After it, a failure is the
request's end. Of an attempt on a pair of replicas both stages are over, and what is still under way
is cancelled. The places to blame are in `RequestRecord.failed`.
"""

from collections.abc import Collection

from mesh.core.lifecycle.admission import Admission
from mesh.core.lifecycle.attempts import Attempts, Completion
from mesh.core.lifecycle.model_choice import ModelChoice
from mesh.core.lifecycle.queue_scheduler import QueueScheduler
from mesh.core.lifecycle.timeouts import DEADLINE_PASSED, Timeouts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import KEPT_RESPONSE, is_keeper_name, model_of
from mesh.core.model.settings import RouterSettings
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.requests.record import (
    STATUS_NOT_IMPLEMENTED,
    STATUS_TOO_MANY,
    RequestRecord,
    is_client_error,
)
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.ids import ReplicaId

KEEPER_GONE = "the replica that kept that response is gone"
REASON_CHARS_MAX = 60  # of a failure, in receipts of other requests
# Of engines: too many requests, and what it never does.
NOT_ITS_FAULT = (STATUS_TOO_MANY, STATUS_NOT_IMPLEMENTED)
# Client errors that depend on the engine's key, model or adapter, and hardly on the request: others
# may come of a smaller context.
TO_EVERYBODY = (401, 403, 404)
KEEPER_DRAINS = "the replica that keeps that response is drained"


class FailedAttempts:
    """Decides what becomes of requests whose attempt has brought no answer."""

    def __init__(
        self,
        *,
        settings: RouterSettings,
        held: HoldQueue,
        admission: Admission,
        attempts: Attempts,
        completion: Completion,
        timeouts: Timeouts,
        scheduler: QueueScheduler,
        model_choice: ModelChoice,
        effects: list[fx.Effect],
    ) -> None:
        self.follow(settings)
        self._held = held
        self._admission = admission
        self._attempts = attempts
        self._completion = completion
        self._timeouts = timeouts
        self._scheduler = scheduler
        self._model_choice = model_choice
        self._effects = effects

    def follow(self, settings: RouterSettings) -> None:
        """Decide by these from now on."""
        self._refusals_max, self._failures_max = settings.refusals_max, settings.failures_max

    def to_hold_queue(self, record: RequestRecord, now: float) -> None:
        """The attempt under way, if any, is over: it waits at its place by class and arrival."""
        if self._completion.end_copy(record, now):
            return
        self._attempts.leave(record, now)
        record.hold(now)
        self._held.put(record.request, comes_back=record.attempt > 0)
        self._admission.waits(record.request, now)

    def on_refused(self, record: RequestRecord, event: ev.AttemptRefused, now: float) -> None:
        """A replica or peer did not take the attempt under way."""
        if record.is_handed_over:
            self._completion.fail(record, now, Fault.ENGINE_FAILED, event.reason)
            return
        if event.reason == Refusal.BAD_WORK:
            self._completion.fail(
                record, now, Fault.ENGINE_FAILED, "the replica could not read the request"
            )
            return
        if is_keeper_name(record.request.model):
            if event.reason == Refusal.NOT_KEPT:
                is_call = model_of(record.request.model) == KEPT_RESPONSE
                fault = Fault.RESPONSE_UNKNOWN if is_call else Fault.STATE_GONE
                self._completion.fail(record, now, fault, KEEPER_GONE)
                return
            if event.reason == Refusal.KEEPER_DRAINS:
                self._completion.fail(record, now, Fault.NO_REPLICA, KEEPER_DRAINS)
                return
        if event.prefill and not record.is_prefilling:
            self._attempts.cancel(record)  # the other stage was sent at once
        if event.reason != Refusal.ELSEWHERE:  # for others it may be the right place
            self._attempts.rest(record, now, in_prefill=event.prefill)
        self.refused(record, now)
        self._scheduler.place_waiting(now)

    def refused(self, record: RequestRecord, now: float) -> None:
        """Back into the hold queue, if it was not refused too often and is not too late."""
        record.refused(now)
        if record.refusals >= self._refusals_max:
            self._completion.shed(record, None, f"refused {record.refusals} times", now)
        elif not self._completion.shed_if_too_late(record, None, now):
            self.to_hold_queue(record, now)

    def on_failed(self, record: RequestRecord, event: ev.AttemptFailed, now: float) -> None:
        """The attempt under way failed."""
        if now >= record.request.deadline:  # the agent's clock may be ahead
            self._completion.fail(record, now, Fault.DEADLINE, DEADLINE_PASSED)
            return
        if event.prefill and record.has_started:
            return  # only what followed the transfer went wrong
        record.engine_answered(event.status)
        if not (event.blameless or event.status in NOT_ITS_FAULT):
            self._note(record, event, now)
        whole_place = record.peer is None or record.replica is None
        if whole_place and event.status is None:
            self._attempts.rest(record, now, in_prefill=event.prefill)
        if event.prefill and not record.is_prefilling:
            self._attempts.cancel(record)
        self.failed(record, event.detail, now, in_prefill=event.prefill)
        self._scheduler.place_waiting(now)

    def _note(self, record: RequestRecord, event: ev.AttemptFailed, now: float) -> None:
        """What the failure says of its place. An error that the engine answered with may be the
        request's fault: another place's answer will show."""
        if (status := event.status) is None:
            self._attempts.failed(record, event.detail[:REASON_CHARS_MAX], now, is_sure=True)
        elif not is_client_error(status):
            self._attempts.failed(record, f"HTTP {status}", now, is_sure=False)
        elif status in TO_EVERYBODY:
            what = f"HTTP {status} to what others answer"
            self._attempts.failed(record, what, now, is_sure=False)

    def failed(
        self,
        record: RequestRecord,
        detail: str,
        now: float,
        *,
        same_again: bool = False,
        in_prefill: bool = False,
    ) -> None:
        """Back into the hold queue if another attempt may help; the caller tries held requests.

        `same_again`: its place may be tried again, as another process runs there now. `in_prefill`:
        in the prefill stage of an attempt on a pair.
        """
        if record.has_started or record.is_handed_over:
            self._completion.fail(record, now, Fault.ENGINE_FAILED, detail)
            return
        record.failed(avoid_place=not same_again, in_prefill=in_prefill)
        self.reconsider(record)
        has_places = same_again or self._timeouts.others_serve(record)
        has_places = has_places or self._model_choice.other(record, now) is not None
        if has_places and record.is_worth_another(self._failures_max):
            self.to_hold_queue(record, now)
            self._model_choice.retarget(record, now)
        elif record.engine_status is not None and record.request.answer_inbox is None:
            self._completion.end(record, now)
            self._effects.append(fx.PassEngineError(record.request.key))
        else:
            self._completion.fail(record, now, Fault.ENGINE_FAILED, detail)

    def reconsider(self, record: RequestRecord) -> None:
        """Where no other place is left, try decode replicas again that may be innocent."""
        if record.doubted and not self._timeouts.others_serve(record):
            record.trust_again()

    def replica_lost(
        self, lost: Collection[RequestRecord], name: ReplicaId, why: str, now: float
    ) -> None:
        """The agent that they need is gone; one that returns under its name is another."""
        for record in lost:
            if record.prefill is not None:
                self._attempts.cancel(record)  # the other one of the pair may be at work
            self.failed(record, f"replica {name} was lost: {why}", now, same_again=True)
        self._scheduler.place_waiting(now)
