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

from infra import trace_context, tracing
from infra.process import LimitedLog
from mesh.adapters.adopted_heartbeats import AdoptedHeartbeats
from mesh.adapters.bus import RouterBus
from mesh.adapters.client_request import ClientRequest
from mesh.adapters.kept_prefixes import KeptPrefixes
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.read_request import BodyBudget, ParsedRequest, RequestRefused
from mesh.adapters.spans import CLIENT_GONE, PassedOn, RequestSpans, TailRule, receipt_line
from mesh.adapters.tenants import Tenants
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptReader
from mesh.core.model.request import Request
from mesh.core.router import RouterCore
from mesh.core.view.bus_status import UNREACHABLE
from mesh.runtime.config import RouterConfig
from mesh.runtime.control_plane import LeaseClaims, PrefixGossip, ReplyGuard
from mesh.runtime.regions import Regions
from mesh.runtime.request_messages import RequestMessages
from mesh.session.answer import AnswerReceiver
from mesh.session.bus_receiver import NOBODY_LISTENS
from mesh.session.record import NO_TRACE, Decide, Ending, Observer, OpenRequest, Trace
from mesh.session.session import Session
from schemas import exchange, state, subjects
from schemas.decision import Placement
from schemas.exchange import Outcome
from schemas.http import Fault, Readiness
from schemas.ids import ModelId, RegionId
from schemas.replies import LEASE_PREFIX, TRIE_PREFIX
from schemas.residency import Labels
from schemas.state import ModelCard

log = logging.getLogger(__name__)

SHED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.DRAINING)
SHUTTING_DOWN = Fault.DRAINING, "this router is shutting down"
ENGINE_FAILED = Outcome.ENGINE_FAILED.value
END_S = 1.0  # from the last event of an answer to its end
STATUS_SERVER_ERROR = 500
STATUS_CLIENT_GONE = 499  # not sent; for traces and logs
INBOX_SECRET_BYTES = 12
OTHER = "other"  # label of an unknown name
_REASONS = frozenset((*exchange.Refusal, NOBODY_LISTENS))


class RequestObserver(Observer):
    """Metrics and log lines of one router's requests. Warm-ups are not counted as a client's."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics, prompts: PromptReader) -> None:
        self._home = config.region
        self._regions = frozenset((*config.peers, config.region))
        self._metrics = metrics
        self._prompts = prompts
        self._log = LimitedLog(log)

    def decided(self, record: OpenRequest, effect: fx.Decided) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("%s", receipt_line(effect.decision))
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
        log.info(
            "%s placed by %s on %s after %.3f s in its hold queue",
            *(record.request.request_id, region, answer.replica, answer.peer_held_s),
        )

    def refused(self, record: OpenRequest, event: ev.AttemptRefused) -> None:
        self._metrics.refusals.labels(event.reason if event.reason in _REASONS else OTHER).inc()
        if event.region != self._home:
            self._metrics.forwards.labels(self._known(event.region), "refused").inc()

    def attempt_failed(self, record: OpenRequest, event: ev.AttemptFailed) -> None:
        self._metrics.failures.inc()
        log.info("%s: attempt %d: %s", record.request.request_id, event.attempt, event.detail)

    def served(self, record: OpenRequest, end: exchange.End) -> None:
        if end.prompt_tokens < 0:
            return
        assert isinstance(record, ClientRequest)
        self._prompts.learn(record.request.model, record.size, end.prompt_tokens)
        self._metrics.prompt_tokens.inc(end.prompt_tokens)
        self._metrics.cached_tokens.inc(max(0, end.cached_tokens))

    def frames_missing(self) -> None:
        self._metrics.frames_missing.inc()

    def residency_refused(self, asker: str) -> None:
        self._metrics.residency_refused.labels(asker).inc()

    def forwarded(self, record: OpenRequest, refusal: str | None = None) -> None:
        if record.request.warm:
            return
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
    ) -> None:
        """`on_control` takes what comes to inboxes of the router that are no answer's."""
        self._config = config
        self._core = core
        self._bus = bus
        self._metrics = metrics
        self._clock = clock
        self._on_control = on_control
        ground = config.settings.ground
        self._tenants = Tenants(config.region, ground, config.keys)
        self._may_be_limited = bool(config.keys or ground.labels)  # by a key or a label
        self._prompts = PromptReader(config.hash_key)
        self._tail = TailRule(config.slow)
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
            observer=RequestObserver(config, metrics, self._prompts),
            ground=ground,
            give_back=self.bodies.give_back,
        )
        self.messages.bind(self.session)
        self.feed, self.passed = self.session.feed, self.session.passed
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
            spans = self._spans(headers)
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
                residency=residency,
                wants_receipt=options.debug or spans.is_recording or self._reads_receipts(),
            )
        except BaseException:
            self.bodies.give_back(parsed.kept_bytes)
            raise
        admitted = ClientRequest(
            request=request,
            path=parsed.path,
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

    def _reads_receipts(self) -> bool:
        """Whether the log or a recorder reads the candidates of every decision."""
        return self._config.record is not None or log.isEnabledFor(logging.INFO)

    def started(self, record: ClientRequest) -> None:
        record.first_byte_at = self._clock()
        assert record.answer is not None
        here = record.answer.region == self._config.region
        self._metrics.ttft_by_server("local" if here else "peer").observe(
            record.first_byte_at - record.request.arrived_at
        )
        self.session.started(record)

    def finished(self, record: ClientRequest) -> None:
        assert record.answer is not None and record.answer.head is not None
        failure = record.answer.engine_failure
        status = record.answer.head.status
        if failure is None:
            self._close(record, "ok", status)
        elif self._close(record, ENGINE_FAILED, status, ENGINE_FAILED, failure):
            log.warning("%s: %s: %s", record.request.request_id, ENGINE_FAILED, failure)

    def failed(self, record: ClientRequest) -> None:
        if record.failure is None:
            assert record.engine_error is not None
            status, message = record.engine_error.status, "the engine's own error"
            outcome, kind = "failed", str(status)
        else:
            status, message = record.failure.fault.value.status, record.failure.message
            is_shed = record.failure.fault in SHED and record.first_byte_at is None
            outcome = "shed" if is_shed else "failed"
            kind = record.failure.fault.value.code
        if outcome == "failed" and status < STATUS_SERVER_ERROR:
            kind = ""  # the client's mistake
        if self._close(record, outcome, status, kind, message):
            level = logging.INFO if outcome == "shed" else logging.WARNING
            log.log(level, "%s: %d: %s", record.request.request_id, status, message)

    def leave(self, record: ClientRequest) -> None:
        answer = record.answer
        if not self.session.is_open(record):
            return
        if answer is None or not answer.has_last_event:
            self.feed(ev.ClientGone(record.request.key))
            self._close(record, CLIENT_GONE, STATUS_CLIENT_GONE, CLIENT_GONE, "the client hung up")
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
        self,
        record: ClientRequest,
        outcome: str,
        status: int,
        error_type: str = "",
        message: str = "",
    ) -> bool:
        """It is over, with that HTTP status. False if it was before."""
        if not self.session.close(record):
            return False
        self._metrics.ended(outcome, record.request.arrived_at, self._clock())
        if record.spans.is_traced:
            record.spans.end(record, Ending(outcome, status, error_type, message))
        return True

    def _spans(self, headers: Mapping[str, str]) -> Trace:
        """A request's spans; none where tracing is off and the client sent no trace."""
        tracer = tracing.active
        parent = trace_context.read(headers) if trace_context.PARENT in headers else None
        if tracer is not None:
            return RequestSpans(tracer, parent, self._tail, headers.get("host", ""))
        return NO_TRACE if parent is None else PassedOn(trace_context.passed_on(headers))
