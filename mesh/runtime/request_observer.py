"""What becomes of requests at one router, as metrics, log lines and steps of each request."""

import logging
from collections.abc import Callable

from infra.process import LimitedLog
from mesh.adapters.ended_requests import EndedRequests
from mesh.adapters.metrics import OTHER, LabelSet, RouterMetrics
from mesh.adapters.span_attributes import receipt_line
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptReader
from mesh.core.view.replica import replica_name_at
from mesh.http.read_request import BodyBudget
from mesh.runtime.config import RouterConfig
from mesh.session.answer import AnswerReceiver
from mesh.session.bus_receiver import NOBODY_LISTENS
from mesh.session.client_request import ClientRequest
from mesh.session.cost import NOTHING
from mesh.session.record import STEPS_MAX, Ending, Observer, OpenRequest, Step, StepKind
from mesh.session.usage_book import UsageBook, account
from schemas import exchange
from schemas.decision import Placement
from schemas.exchange import Placed
from schemas.ids import RegionId, ReplicaId

log = logging.getLogger(__name__)

_REASONS = frozenset((*exchange.Refusal, NOBODY_LISTENS))


def logs_decisions() -> bool:
    """Whether the log has a line for each decision, with its candidates."""
    return log.isEnabledFor(logging.DEBUG)


class RequestObserver(Observer):
    """Metrics, steps and log lines of one router's requests."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        prompts: PromptReader,
        clock: Callable[[], float],
        ended: EndedRequests,
        bodies: BodyBudget,
        book: UsageBook,
    ) -> None:
        self._home = config.region
        self._regions = frozenset((*config.peers, config.region))
        self._metrics = metrics
        self._prompts = prompts
        self._clock, self._ended = clock, ended
        self._bodies, self._book = bodies, book
        self._log = LimitedLog(log)

    def _note(self, record: OpenRequest, what: StepKind, outcome: str = "") -> None:
        if len(record.steps) < STEPS_MAX:
            record.steps += (Step(self._clock(), what, outcome),)

    def decided(self, record: OpenRequest, effect: fx.Decided) -> None:
        if logs_decisions():
            log.debug("%s", receipt_line(effect.decision))
        request, placement = record.request, effect.decision.placement
        if request.shadow:
            return
        if placement is Placement.LOCAL or placement is Placement.PEER:
            held_s = effect.decision.held_s
            self._metrics.hold.observe(held_s and _held_since_last_s(record, held_s))
        if len(record.steps) < STEPS_MAX:  # as `_note`, for every request
            record.steps += (Step(self._clock(), effect),)
        if request.answer_inbox is None:
            self._metrics.placements_by_kind(placement.value).inc()

    def body_dropped(self, kept_bytes: int) -> None:
        self._bodies.give_back(kept_bytes)

    def placed_by_peer(self, record: OpenRequest, answer: AnswerReceiver) -> None:
        region = answer.region
        assert region is not None, "known since PLACED"
        self._metrics.forwards.labels(self._known(region), "placed").inc()
        self._note(record, Placed(region, answer.replica or "", answer.peer_held_s))
        log.info(
            "%s placed by %s on %s after %.3f s in its hold queue",
            record.request.request_id,
            region,
            answer.replica,
            answer.peer_held_s,
        )

    def refused(self, record: OpenRequest, event: ev.AttemptRefused) -> None:
        if record.request.shadow:
            return
        self._note(record, event)
        self._metrics.refusals.labels(event.reason if event.reason in _REASONS else OTHER).inc()
        if event.region != self._home:
            self._metrics.forwards.labels(self._known(event.region), "refused").inc()

    def attempt_failed(self, record: OpenRequest, event: ev.AttemptFailed) -> None:
        if record.request.shadow:
            return
        self._metrics.failures.inc()
        answer = record.answer
        outcome = "" if answer is None else answer.failed_as
        if answer is not None and not event.prefill:  # its prefill stage was another replica's
            failures = self._metrics.replica_failures
            failures.failed(self._name_of(answer), event.status, outcome)
        self._note(record, event, outcome)
        log.info("%s: attempt %d: %s", record.request.request_id, event.attempt, event.detail)

    def prefill_ended(self, record: OpenRequest, event: ev.PrefillEnded) -> None:
        self._note(record, event)

    def served(self, record: OpenRequest, end: exchange.End) -> None:
        if record.request.shadow:
            return
        assert isinstance(record, ClientRequest) and record.answer is not None
        prompt, output = end.prompt_tokens, end.completion_tokens
        if record.splice is not None and output >= 0:
            output = record.splice.whole(prompt, output)[1]
        if prompt >= 0:
            self._prompts.learn(record.request.model, record.size, prompt)
        began_at = record.first_byte_at
        if began_at is not None and output > 1 and record.answer.is_event_stream:
            seconds = (self._clock() - began_at) / (output - 1)
            labels = labels_of(self._metrics, record)
            self._metrics.token_time_seen(labels, seconds, exemplar_of(record))

    def frames_missing(self) -> None:
        self._metrics.frames_missing.inc()

    def residency_refused(self, asker: str) -> None:
        self._metrics.residency_refused.labels(asker).inc()

    def request_ended(self, record: OpenRequest, ending: Ending) -> None:
        request, metrics = record.request, self._metrics
        self._ended.add(ending)
        account(self._book, record, ending.region, ending.cost)
        outcome = ending.outcome
        if request.answer_inbox is not None:
            metrics.ingress.labels(request.origin, outcome).inc()
            if ending.detail:
                metrics.ingress_refusals.labels(ending.detail).inc()
        elif request.shadow:
            metrics.copy_ended(request.model, outcome)
        else:
            assert isinstance(record, ClientRequest)
            if record.splice is not None:
                metrics.streams_continued.labels("whole" if outcome == "ok" else outcome).inc()
            if ending.asked:
                metrics.mapped(ending.asked, request.model)
            labels, cost = labels_of(metrics, record), ending.cost
            if record.held is not None:
                record.held.settle(cost.uncached, cost.cached, cost.output)
            if cost is not NOTHING:
                metrics.tokens_seen(labels, cost)
            metrics.ended(
                outcome,
                labels,
                ending.ended_at - ending.arrived_at,
                streamed=ending.is_stream,
                trace_id=exemplar_of(record),
            )

    def unreadable(self, what: str, text: str, *args: object) -> None:
        self._log.warning(what, "unreadable", text, *args)

    def _name_of(self, answer: AnswerReceiver) -> ReplicaId | None:
        """Who answers, by its name at this router: a peer's may have the name of one of ours."""
        if answer.region is None or answer.replica is None:
            return None
        return replica_name_at(answer.region, answer.replica, self._home)

    def _known(self, region: RegionId) -> str:
        """That region as a label; a frame may name any."""
        return region if region in self._regions else OTHER


def _held_since_last_s(record: OpenRequest, held_s: float) -> float:
    """Seconds in the hold queue since the last placement; `held_s`: in all."""
    decisions = (step.what.decision for step in record.steps if isinstance(step.what, fx.Decided))
    return held_s - max((one.held_s for one in decisions), default=0.0)


def exemplar_of(record: OpenRequest) -> str | None:
    """The id of its trace, if that is exported."""
    return record.spans.trace_id if record.spans.is_recording else None


def labels_of(metrics: RouterMetrics, record: ClientRequest) -> LabelSet:
    """Of a request's series; without a region until a byte of its answer came."""
    answer = record.answer
    region = answer.region if answer is not None and answer.head is not None else None
    return metrics.labels_of(record.request.model, record.tenant or "", region or "")
