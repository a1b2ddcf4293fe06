"""The front door that the HTTP side calls, over one session: requests in, answers out.

`decide` is the core, or a recorder that calls the core.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from nats.aio.msg import Msg

from infra import tracing
from infra.process import LimitedLog
from mesh.adapters.access_log import AccessLog
from mesh.adapters.adopted_heartbeats import AdoptedHeartbeats
from mesh.adapters.bus import RouterBus
from mesh.adapters.client_request import ClientRequest
from mesh.adapters.ended_requests import STATUS_CLIENT_GONE, STEPS_MAX, EndedRequests
from mesh.adapters.kept_prefixes import KeptPrefixes
from mesh.adapters.metric_labels import OTHER, LabelSet
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.read_request import BodyBudget, ParsedRequest, RequestRefused
from mesh.adapters.spans import RequestSpans, receipt_line
from mesh.adapters.tenants import Tenants
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptReader
from mesh.core.model.request import Request
from mesh.core.model.served_names import served_name
from mesh.core.router import RouterCore
from mesh.core.view.bus_status import UNREACHABLE
from mesh.runtime.config import RouterConfig
from mesh.runtime.control_plane import LeaseClaims, PrefixGossip, ReplyGuard
from mesh.runtime.regions import Regions
from mesh.runtime.request_messages import RequestMessages
from mesh.session.answer import AnswerReceiver
from mesh.session.bus_receiver import NOBODY_LISTENS
from mesh.session.record import (
    NO_TRACE,
    Decide,
    Observer,
    OpenRequest,
    Step,
    StepKind,
    Trace,
)
from mesh.session.session import Session
from schemas import exchange, state, subjects
from schemas.decision import Placement
from schemas.exchange import Outcome, Placed
from schemas.http import OPTIONAL_PATHS, Fault, Readiness
from schemas.ids import ModelId, RegionId, RequestId
from schemas.replies import LEASE_PREFIX, TRIE_PREFIX
from schemas.residency import Labels
from schemas.state import ModelCard

log = logging.getLogger(__name__)

SHED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.DRAINING)
SHUTTING_DOWN = Fault.DRAINING, "this router is shutting down"
ENGINE_FAILED = Outcome.ENGINE_FAILED.value
END_S = 1.0  # from the last event of an answer to its end
INBOX_SECRET_BYTES = 12
_REASONS = frozenset((*exchange.Refusal, NOBODY_LISTENS))


class RequestObserver(Observer):
    """Metrics, steps and log lines of one router's requests. Warm-ups are not counted as a
    client's."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        prompts: PromptReader,
        clock: Callable[[], float],
        ended: EndedRequests,
    ) -> None:
        self._home = config.region
        self._regions = frozenset((*config.peers, config.region))
        self._metrics = metrics
        self._prompts = prompts
        self._clock, self._ended = clock, ended
        self._log = LimitedLog(log)

    def _note(self, record: OpenRequest, what: StepKind) -> None:
        if len(record.steps) < STEPS_MAX:
            record.steps.append(Step(self._clock(), what))

    def decided(self, record: OpenRequest, effect: fx.Decided) -> None:
        if len(record.steps) < STEPS_MAX:  # as `_note`, for every request
            record.steps.append(Step(self._clock(), effect))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", receipt_line(effect.decision))
        request = record.request
        if request.warm:
            return
        placement, held_s = effect.decision.placement, effect.decision.held_s
        if placement is Placement.LOCAL or placement is Placement.PEER:
            self._metrics.hold.observe(held_s)
        if request.answer_inbox is None:
            self._metrics.placements_by_kind(placement.value).inc()

    def placed_by_peer(self, record: OpenRequest, answer: AnswerReceiver) -> None:
        region = answer.region
        assert region is not None, "known since PLACED"
        self._metrics.forwards.labels(self._known(region), "placed").inc()
        self._note(record, Placed(region, answer.replica or "", answer.peer_held_s))
        log.info(
            "%s placed by %s on %s after %.3f s in its hold queue",
            *(record.request.request_id, region, answer.replica, answer.peer_held_s),
        )

    def refused(self, record: OpenRequest, event: ev.AttemptRefused) -> None:
        self._note(record, event)
        self._metrics.refusals.labels(event.reason if event.reason in _REASONS else OTHER).inc()
        if event.region != self._home:
            self._metrics.forwards.labels(self._known(event.region), "refused").inc()

    def attempt_failed(self, record: OpenRequest, event: ev.AttemptFailed) -> None:
        self._metrics.failures.inc()
        self._note(record, event)
        log.info("%s: attempt %d: %s", record.request.request_id, event.attempt, event.detail)

    def served(self, record: OpenRequest, end: exchange.End) -> None:
        assert isinstance(record, ClientRequest) and record.answer is not None
        prompt, output = end.prompt_tokens, end.completion_tokens
        if prompt >= 0:
            self._prompts.learn(record.request.model, record.size, prompt)
        if prompt < 0 and output < 0:
            return
        labels = _labels(self._metrics, record)
        self._metrics.tokens_seen(labels, prompt, end.cached_tokens, output)
        began_at = record.first_byte_at
        if began_at is not None and output > 1 and record.answer.is_event_stream:
            seconds = (self._clock() - began_at) / (output - 1)
            self._metrics.token_time_seen(labels, seconds, _exemplar(record))

    def frames_missing(self) -> None:
        self._metrics.frames_missing.inc()

    def residency_refused(self, asker: str) -> None:
        self._metrics.residency_refused.labels(asker).inc()

    def forwarded(self, record: OpenRequest, refusal: str | None = None) -> None:
        if record.request.warm:
            return
        self._ended.of_peer(record, refusal)
        result = "placed" if refusal is None else "refused"
        self._metrics.ingress.labels(record.request.origin, result).inc()
        if refusal is not None:
            self._metrics.ingress_refusals.labels(refusal).inc()

    def unreadable(self, what: str, text: str, *args: object) -> None:
        self._log.warning(what, "unreadable", text, *args)

    def _known(self, region: RegionId) -> str:
        """That region as a label; a frame may name any."""
        return region if region in self._regions else OTHER


class RequestManager:
    """One router's requests. It is the HTTP face's front door: mesh.adapters.http_api.FrontDoor."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        bus: RouterBus,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        decide: Decide,
        guard: ReplyGuard,
        on_control: Callable[[str, Msg], bool] = lambda token, msg: False,
        access_log: AccessLog | None = None,
    ) -> None:
        """`on_control` takes what comes to inboxes of the router that are no answer's."""
        self._config = config
        kept_max = config.requests_kept
        self.ended = EndedRequests(config.region, config.router, clock, access_log, kept_max)
        self._core, self._bus, self._metrics = core, bus, metrics
        self._clock, self._on_control = clock, on_control
        ground = config.settings.ground
        self._tenants = Tenants(config.region, ground, config.keys)
        self._may_be_limited = bool(config.keys or ground.labels)  # by a key or a label
        self._prompts = PromptReader(config.hash_key)
        self.bodies = BodyBudget()
        self.messages = RequestMessages(
            config,
            bus,
            metrics,
            self._prompts.read,
            self.bodies,
            guard,
            clock,
            self._control,
            self._reads_receipts,
        )
        self.session = Session(
            config.region,
            config.router,
            decide=decide,
            clock=clock,
            bus=bus,
            prefixes=KeptPrefixes(),
            secret=lambda: os.urandom(INBOX_SECRET_BYTES).hex(),
            keys=count(1),
            observer=RequestObserver(config, metrics, self._prompts, clock, self.ended),
            ground=ground,
            give_back=self.bodies.give_back,
        )
        self.messages.bind(self.session)
        self.feed = self.session.feed
        self.passed = self.session.passed
        self.buffered_bytes = self.session.buffered_bytes
        regions = Regions(config, core.peers, bus, clock)
        self.regions = regions.seen
        self.beats = AdoptedHeartbeats(lambda: bus.client, self.messages.receive_heartbeat)
        self.trie = PrefixGossip(config, bus, metrics, self.feed, guard)
        self.leases = LeaseClaims(config, bus, metrics, self.feed, core.ownership, self.beats)
        self.session.performers.update(self._performers(regions))
        metrics.guests.set_function(lambda: self.session.forwarded)
        metrics.buffered.set_function(self.buffered_bytes)
        metrics.bodies.set_function(lambda: self.bodies.taken_bytes)

    def _performers(self, regions: Regions) -> dict[type, Callable[[Any], None]]:
        """Of the effects that concern no request."""

        def publish_digest(effect: fx.PublishDigest) -> None:
            regions.published(effect.digest)
            subject = subjects.digest(self._config.region)
            self._bus.publish(subject, state.encode_state(effect.digest))

        return {
            fx.PublishDigest: publish_digest,
            fx.PublishTrie: self.trie.publish,
            fx.PublishToSiblings: self.trie.publish_to_siblings,
            fx.AskTrie: self.trie.ask,
            fx.AnswerTrie: self.trie.answer,
            fx.ClaimLease: self.leases.claim,
            fx.OwnershipChanged: self.leases.changed,
            fx.HearReplicas: self.leases.subscribe_heartbeats,
        }

    def _control(self, token: str, msg: Msg) -> bool:
        if token.startswith(TRIE_PREFIX):
            self.trie.receive_answer(msg)
        elif token.startswith(LEASE_PREFIX):
            self.leases.receive_answer(msg)
        else:
            return self._on_control(token, msg)
        return True

    @property
    def open_requests(self) -> int:
        """Clients that have not been answered to the end."""
        return len(self.session)

    def models(self) -> tuple[ModelId, ...]:
        return self._core.models()

    def model_card(self, model: ModelId) -> ModelCard:
        return self._core.model_card(model)

    def not_ready_because(self) -> tuple[Fault, str] | None:
        if self._core.draining:
            return SHUTTING_DOWN
        if not self._bus.is_connected:
            return Fault.NO_REPLICA, UNREACHABLE
        if not self._core.models():
            return Fault.NO_REPLICA, "no replica of any region is ready"
        return None

    def residency(self, wanted: Labels, headers: Mapping[str, str]) -> Labels:
        try:
            return self._tenants.residency(wanted, headers)
        except RequestRefused as problem:
            if problem.fault is Fault.RESIDENCY:
                self._metrics.residency_refused.labels("client").inc()
            raise

    def owner(self, headers: Mapping[str, str]) -> str:
        """Whose files and batches a request makes and sees. Raises RequestRefused."""
        return self._tenants.owner(headers)

    def refuse_new(self) -> None:
        """Raise RequestRefused while the router is shutting down."""
        if self._core.draining:
            raise RequestRefused(*SHUTTING_DOWN)

    def readiness(self) -> Readiness:
        warmth = self._core.gossip.siblings.sync
        if warmth.warm_at is None:
            return Readiness(warm=False)
        warm_for_s = round(self._clock() - warmth.warm_at, 3)
        return Readiness(warm=True, warm_for_s=warm_for_s, warmed_by=warmth.source)

    def admit(
        self, parsed: ParsedRequest, headers: Mapping[str, str], changed: Callable[[], None]
    ) -> ClientRequest:
        """Take a client's request in and place it; see `FrontDoor`."""
        options, model = parsed.options, parsed.model
        residency: Labels = ()
        tenant: str | None = None
        try:
            if self._may_be_limited or options.residency:
                residency = self.residency(options.residency, headers)
                tenant = self._tenants.tenant(headers)
            models = self._core.known_models()
            if models and model not in models:
                message = f"the model {model!r} is not served here; known: {', '.join(models)}"
                raise RequestRefused(Fault.MODEL_UNKNOWN, message, "model")
            now = self._clock()
            spans = _spans(parsed.request_id, model, headers)
            answer_tokens: int | None = None
            if parsed.path in OPTIONAL_PATHS:
                model, answer_tokens = self._on_path(model, parsed.path), 0
            text = parsed.text
            request = Request(
                key=next(self.session.keys),
                request_id=parsed.request_id,
                model=model,
                prompt=self._prompts.read(model, text, options.salt, tenant or ""),
                arrived_at=now,
                deadline=now + (parsed.timeout_s or self._config.settings.request_s_max),
                hops=0,
                origin=self._config.region,
                priority=options.priority,
                slo_ttft_s=options.slo_ttft_s,
                session=options.session,
                answer_tokens=answer_tokens,
                residency=residency,
                wants_receipt=options.debug or spans.is_recording or self._reads_receipts(),
            )
        except BaseException as error:
            self.bodies.give_back(parsed.kept_bytes)
            if isinstance(error, RequestRefused):
                error.model = model
            raise
        admitted = ClientRequest(
            request=request,
            path=parsed.path,
            adds_usage=parsed.adds_usage,
            body=parsed.body,
            tenant=tenant,
            size=text.size,
            wants_decision=options.debug,
            spans=spans,
            kept_bytes=parsed.kept_bytes,
            changed=changed,
        )
        self.session.admit(admitted)
        return admitted

    def _on_path(self, model: ModelId, path: str) -> ModelId:
        """The model on that optional path. Raises RequestRefused if no replica serves it there."""
        name = served_name(model, path)
        if self._core.known_models() and not self._core.knows(name):
            message = f"no replica that serves the model {model!r} answers {path}"
            raise RequestRefused(Fault.PATH_UNSERVED, message, "model")
        return name

    def _reads_receipts(self) -> bool:
        """Whether the log or a recorder reads the candidates of every decision."""
        return self._config.record is not None or log.isEnabledFor(logging.DEBUG)

    def started(self, record: ClientRequest) -> None:
        record.first_byte_at = self._clock()
        if record.spans.is_recording and (receipt := record.receipt) is not None:
            record.spans.first_byte(receipt)
        answer = record.answer
        assert answer is not None
        if answer.is_event_stream:  # the first byte of any other comes with its last
            served = "local" if answer.region == self._config.region else "peer"
            ttft_s = record.first_byte_at - record.request.arrived_at
            labels = _labels(self._metrics, record)
            self._metrics.ttft_seen(served, labels, ttft_s, _exemplar(record))
        self.session.started(record)

    def finished(self, record: ClientRequest) -> None:
        assert record.answer is not None and record.answer.head is not None
        failure = record.answer.engine_failure
        status = record.answer.head.status
        if failure is None:
            self._close(record, "ok", status)
        elif self._close(record, ENGINE_FAILED, status, f"{ENGINE_FAILED}: {failure}"):
            log.warning("%s: %s: %s", record.request.request_id, ENGINE_FAILED, failure)

    def failed(self, record: ClientRequest) -> None:
        if record.failure is None:
            assert record.engine_error is not None
            status, message = record.engine_error.status, "the engine's own error"
            outcome = "failed"
        else:
            status, message = record.failure.fault.value.status, record.failure.message
            is_shed = record.failure.fault in SHED and record.first_byte_at is None
            outcome = "shed" if is_shed else "failed"
        if self._close(record, outcome, status, message):
            level = logging.INFO if outcome == "shed" else logging.WARNING
            log.log(level, "%s: %d: %s", record.request.request_id, status, message)

    def leave(self, record: ClientRequest) -> None:
        answer = record.answer
        if not self.session.is_open(record):
            return
        if answer is None or not answer.has_last_event:
            self.feed(ev.ClientGone(record.request.key))
            if record.failure is not None and record.failure.fault is Fault.INTERNAL:
                status, message = Fault.INTERNAL.value.status, record.failure.message
                self._close(record, "failed", status, message)
            else:
                self._close(record, "client_gone", STATUS_CLIENT_GONE, "the client hung up")
        elif answer.end is not None or record.failure is not None:
            self.finished(record)
        else:
            # OpenAI's clients hang up on [DONE]. The end of the answer, with its counts of tokens,
            # is still on its way, and a cancel would cost what is learned from it.
            asyncio.get_running_loop().call_later(END_S, self._end_after_last_event, record)

    def _end_after_last_event(self, record: ClientRequest) -> None:
        self.feed(ev.ClientGone(record.request.key))  # without effect if the end came
        self.finished(record)

    def _close(
        self, record: ClientRequest, outcome: str, status: int, error: str | None = None
    ) -> bool:
        """It is over, with that HTTP status. False if it was before."""
        if not self.session.close(record):
            return False
        self._metrics.ended(
            outcome,
            _labels(self._metrics, record),
            self._clock() - record.request.arrived_at,
            streamed=record.answer is not None and record.answer.is_event_stream,
            trace_id=_exemplar(record),
        )
        self.ended.of_client(record, outcome, status, error)
        if record.spans.is_recording:
            record.spans.end(status, error)
        return True


def _exemplar(record: OpenRequest) -> str | None:
    """The id of its trace, if that is exported."""
    return record.spans.trace_id if record.spans.is_recording else None


def _labels(metrics: RouterMetrics, record: ClientRequest) -> LabelSet:
    """Of a request's series; without a region until a byte of its answer came."""
    answer = record.answer
    region = answer.region if answer is not None and answer.head is not None else None
    return metrics.labels_of(record.request.model, record.tenant or "", region or "")


def _spans(request_id: RequestId, model: ModelId, headers: Mapping[str, str]) -> Trace:
    """A request's spans; none where tracing is off and the client sent no trace."""
    if not tracing.is_set_up and tracing.PARENT not in headers:
        return NO_TRACE
    return RequestSpans(request_id, model, tracing.extract(headers))
