"""The front door that the HTTP side calls, over one session: requests in, answers out.

`decide` is the core, or a recorder that calls the core.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

from nats.aio.msg import Msg

from infra import trace_context, tracing
from infra.tenant_table import Caller
from mesh.adapters.access_log import AccessLog
from mesh.adapters.adopted_heartbeats import AdoptedHeartbeats
from mesh.adapters.bus import RouterBus
from mesh.adapters.ended_requests import STATUS_CLIENT_GONE, EndedRequests
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.refused import RequestRefused
from mesh.adapters.spans import PassedOn, request_trace
from mesh.adapters.tail_rule import CLIENT_GONE, TailRule
from mesh.core.lifecycle.failed_attempts import KEEPER_DRAINS
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptReader
from mesh.core.model.prompt_shapes import NOT_KEPT
from mesh.core.model.request import Request
from mesh.core.model.served_names import keeper_name, kept_name, served_name
from mesh.core.requests.limits import Held
from mesh.core.router import RouterCore
from mesh.core.view.bus_status import UNREACHABLE
from mesh.http.answer_writer import ROUTER_FAILED
from mesh.http.callers import Callers, check_models
from mesh.http.connection import SHUTTING_DOWN
from mesh.http.read_request import ADAPTER, PREVIOUS, BodyBudget, ParsedRequest
from mesh.http.response_calls import unknown_response
from mesh.runtime.config import RouterConfig
from mesh.runtime.control_plane import LeaseClaims, PrefixGossip, ReplyGuard
from mesh.runtime.keys_in_force import KEYS_UNREAD, KeysInForce
from mesh.runtime.limits import Member, RouterLimits
from mesh.runtime.model_mapping import ModelMapping
from mesh.runtime.peer_requests import PeerRequests
from mesh.runtime.request_messages import RequestMessages
from mesh.runtime.request_observer import RequestObserver, exemplar_of, labels_of, logs_decisions
from mesh.runtime.routing_in_force import RouterRouting
from mesh.runtime.seen_regions import Regions
from mesh.runtime.shadow_copies import ShadowCopies
from mesh.runtime.stream_continuations import StreamContinuations
from mesh.runtime.token_signers import TokenSigners
from mesh.runtime.usage_writer import UsageWriter
from mesh.session.client_request import ClientRequest
from mesh.session.record import NO_TRACE, Decide, Failure, Home, Identifiers, Trace
from mesh.session.session import Session
from mesh.session.usage_book import UsageBook
from schemas import state, subjects, wire
from schemas.engine_routes import GENERATING_PATHS, PLAIN_PATHS
from schemas.exchange import Outcome
from schemas.held import HeldAsk
from schemas.http import Fault, Readiness
from schemas.http_statuses import OK, SERVER_ERROR
from schemas.ids import ModelId
from schemas.keys import KeyRecord
from schemas.replies import LEASE_PREFIX, TRIE_PREFIX
from schemas.residency import Labels
from schemas.response_ids import ResponsePlace
from schemas.state import ModelCard

log = logging.getLogger(__name__)

SHED = (Fault.SATURATED, Fault.TOO_LATE, Fault.NO_REPLICA, Fault.DRAINING)
ENGINE_FAILED = Outcome.ENGINE_FAILED.value
END_S = 1.0  # from the last event of an answer to its end
INBOX_SECRET_BYTES = 12


class RequestManager:
    """One router's requests. It is the HTTP face's front door: mesh.http.front_door.FrontDoor."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        bus: RouterBus,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        decide: Decide,
        access_log: AccessLog | None = None,
    ) -> None:
        self._config = config
        self.is_leaving = False  # no more connections are accepted
        kept_max = config.requests_kept
        self.ended = EndedRequests(config.region, config.router, clock, access_log, kept_max)
        self._core, self._bus, self._metrics = core, bus, metrics
        self._clock = clock
        self.callers = Callers(config.region)
        member = Member(config.region, config.router, config.epoch, config.peers)
        self.limits = RouterLimits(member, bus, clock, metrics.limited)
        self.keys = KeysInForce(config.region, self._know_made)
        self.signers = TokenSigners(self.callers)
        self._know_callers()
        prompts = self._prompts = PromptReader(config.hash_key, core.prompt_writing)
        self._tail, self.bodies = TailRule(config.slow), BodyBudget()
        known = config.region, *config.peers
        book = UsageBook(config.region, config.router, config.epoch, known)
        self.usage = UsageWriter(bus, book)
        self.session = session = Session(
            Home(config.region, config.router, config.settings.ground),
            decide=decide,
            clock=clock,
            bus=bus,
            ids=Identifiers(lambda: os.urandom(INBOX_SECRET_BYTES).hex(), count(1)),
            observer=RequestObserver(
                config, metrics, prompts, clock, self.ended, self.bodies, book
            ),
            keep_alive_s=config.sse_keep_alive_s,
        )
        self.guard = ReplyGuard(config.region, config.peers, metrics, clock)
        self.messages = RequestMessages(config, session, bus)
        self.messages.takers.append(self._control)
        self.from_peers = PeerRequests(
            session, self.guard, self.bodies, prompts.read, metrics, self._reads_receipts
        )
        self.mapping = ModelMapping(core, self.bodies, clock)
        self.copies = ShadowCopies(core, session, prompts, self.bodies, metrics)
        self.continuations = StreamContinuations(
            session, prompts, self.bodies, metrics, lambda: core.state.targets
        )
        session.grew = self.continuations.grew
        self.feed, self.passed = session.feed, session.passed
        self.buffered_bytes = session.buffered_bytes
        self.routing = RouterRouting(config.settings, self.feed)
        self._regions = regions = Regions(config, core.peers, bus, clock, self.routing.shown)
        self.regions = regions.seen
        self.beats = AdoptedHeartbeats(lambda: bus.client, self.messages.receive_heartbeat)
        common = config, bus, metrics, self.feed
        self.trie = PrefixGossip(*common, self.guard)
        self.leases = LeaseClaims(*common, core.ownership, self.beats, self.routing.order)
        session.performers.update(self._performers(regions))
        metrics.peer_requests_held.set_function(lambda: session.forwarded)
        metrics.buffered.set_function(self.buffered_bytes)
        metrics.bodies.set_function(lambda: self.bodies.taken_bytes)
        metrics.usage_unwritten.set_function(lambda: len(book))

    def reconfigure(self, config: RouterConfig) -> None:
        """Admit new requests by this; those under way go on as they began."""
        self._config = config
        self._know_callers()
        self._regions.reconfigure(config)
        self.routing.reconfigure(config.settings)

    def _know_callers(self) -> None:
        config, ground = self._config, self._config.settings.ground
        self.callers.know(ground, config.keys, config.tenants, is_required=config.auth.required)
        self.signers.know(config.auth.jwt)
        self.limits.know(self.callers.limits(), self.callers.own_limits())
        self._has_labels = bool(ground.labels)

    def _know_made(self, keys: tuple[KeyRecord, ...]) -> None:
        self.callers.know_made(keys)
        self.limits.know(self.callers.limits(), self.callers.own_limits())

    def _performers(self, regions: Regions) -> dict[type, Callable[[Any], None]]:
        """Of the effects that concern no request."""

        def publish_digest(effect: fx.PublishDigest) -> None:
            regions.published(effect.digest)
            subject = subjects.digest(self._config.region)
            self._bus.publish(subject, state.encode_state(effect.digest))

        def ask_held(effect: fx.AskHeld) -> None:
            subject = subjects.prompt_blocks(self._config.region, effect.replica)
            self._bus.publish(subject, wire.encode(HeldAsk(effect.epoch)))

        return {
            fx.MayMove: self.continuations.may_move,
            fx.Continue: self.continuations.go_on,
            fx.PublishDigest: publish_digest,
            fx.AskHeld: ask_held,
            fx.PublishTrie: self.trie.publish,
            fx.PublishToSiblings: self.trie.publish_to_siblings,
            fx.AskTrie: self.trie.ask,
            fx.AnswerTrie: self.trie.answer,
            fx.ClaimLease: self.leases.claim,
            fx.OwnershipChanged: self.leases.changed,
            fx.HearReplicas: self.leases.subscribe_heartbeats,
        }

    def _control(self, token: str, msg: Msg) -> bool:
        """Answers about prefixes and leases."""
        if token.startswith(TRIE_PREFIX):
            self.trie.receive_answer(msg)
        elif token.startswith(LEASE_PREFIX):
            self.leases.receive_answer(msg)
        else:
            return False
        return True

    @property
    def open_requests(self) -> int:
        """Clients that have not been answered to the end."""
        return len(self.session)

    def models(self) -> tuple[ModelId, ...]:
        return self._core.models()

    def model_card(self, model: ModelId) -> ModelCard:
        return self.mapping.card(model)

    def unknown_model(self, model: str, caller: Caller | None) -> str:
        return self.mapping.unknown(model, caller)

    def not_ready_because(self) -> tuple[Fault, str] | None:
        if self.is_leaving or self._core.draining:
            return SHUTTING_DOWN
        if not self._bus.is_connected:
            return Fault.NO_REPLICA, UNREACHABLE
        if self.callers.must_be_read and not self.keys.is_read:
            return Fault.KEYS_UNREAD, KEYS_UNREAD
        if not self._core.models():
            return Fault.NO_REPLICA, "no replica of any region is ready"
        return None

    def residency(self, wanted: Labels, caller: Caller | None) -> Labels:
        try:
            return self.callers.residency(wanted, caller)
        except RequestRefused as problem:
            if problem.fault is Fault.RESIDENCY:
                self._metrics.residency_refused.labels("client").inc()
            raise

    def refuse_new(self) -> None:
        """Raise RequestRefused while the router is shutting down."""
        if self._core.draining:
            raise RequestRefused(*SHUTTING_DOWN)

    def held_by_tenant(self) -> Counter[str]:
        """How many requests of each tenant wait."""
        return self._core.held.by_tenant()

    def has_listened(self) -> bool:
        return self._core.has_listened

    def may_hear_of(self, names: Collection[ModelId]) -> bool:
        return self._core.may_hear_of(names)

    def names_of(self, parsed: ParsedRequest) -> Collection[ModelId]:
        return self.mapping.names_of(parsed)

    def readiness(self) -> Readiness:
        warmth = self._core.gossip.siblings.sync
        problem = self.leases.problem or self.keys.problem or self.signers.problem
        if warmth.warm_at is None:
            return Readiness(warm=False, problem=problem)
        warm_for_s = round(self._clock() - warmth.warm_at, 3)
        return Readiness(warm=True, warm_for_s=warm_for_s, warmed_by=warmth.source, problem=problem)

    def admit(
        self,
        parsed: ParsedRequest,
        headers: Mapping[str, str],
        caller: Caller | None,
        changed: Callable[[], None],
    ) -> ClientRequest:
        """Take a client's request in and place it; see `FrontDoor`."""
        request, spans, held, limit_headers = self._request(parsed, headers, caller)
        admitted = ClientRequest(
            request=request,
            path=parsed.path,
            adds_usage=parsed.fields.adds_usage,
            for_engine=parsed.for_engine,
            keeper=None if parsed.previous is None else parsed.previous.replica,
            call=parsed.call,
            body=parsed.body,
            model_place=parsed.model_place,
            tenant=None if caller is None else caller.tenant,
            size=parsed.fields.text.size,
            wants_decision=parsed.options.debug,
            spans=spans,
            kept_bytes=parsed.kept_bytes,
            changed=changed,
            held=held,
            limit_headers=limit_headers,
        )
        try:
            self.session.admit(admitted)
            self.copies.of(parsed, admitted)
        except Exception as error:  # it is open: it must have an end, which tells its client
            log.error("request failed inside the router", exc_info=error)
            admitted.failure = Failure(Fault.INTERNAL, ROUTER_FAILED)
            try:
                self.feed(ev.ClientGone(request.key))
            except Exception:
                self.session.close(admitted)
                if held is not None:
                    held.settle(0, 0, 0)
                raise
        return admitted

    def _request(
        self, parsed: ParsedRequest, headers: Mapping[str, str], caller: Caller | None
    ) -> tuple[Request, Trace, Held | None, Mapping[str, str] | None]:
        """What the core is told, its trace, and what it takes of its limits. Raises RequestRefused;
        then nothing stays charged."""
        options, model, fields = parsed.options, parsed.model, parsed.fields
        tenant, key_id = ("", "") if caller is None else (caller.tenant, caller.key_id)
        residency: Labels = ()
        try:
            if caller is not None:
                check_models(caller, model, fields.options.get(ADAPTER))
            if self._has_labels or options.residency or (caller is not None and caller.residency):
                residency = self.residency(options.residency, caller)
            asked = None if parsed.call else self.mapping.apply(parsed, residency, caller)
            model, options = parsed.model, parsed.options
            now, spans = self._clock(), self._spans(headers)
            answer_tokens: int | None = None
            if parsed.path not in PLAIN_PATHS:
                model = self._on_path(model, parsed, tenant)
                answer_tokens = None if parsed.path in GENERATING_PATHS else 0
            request = Request(
                key=next(self.session.keys),
                request_id=parsed.request_id,
                model=model,
                prompt=self._prompts.read(model, fields.text, options.salt, tenant),
                arrived_at=now,
                deadline=now + (parsed.timeout_s or self._config.settings.request_s_max),
                hops=0,
                origin=self._config.region,
                priority=options.priority,
                slo_ttft_s=options.slo_ttft_s,
                session=options.session,
                asked=asked,
                answer_tokens=answer_tokens,
                streams=fields.streams,
                residency=residency,
                wants_receipt=options.debug or spans.is_recording or self._reads_receipts(),
                tenant=tenant,
                key_id=key_id,
            )
            if caller is None or not caller.limited:
                return request, spans, None, None
            request, held, told = self.limits.take(
                caller.limited, request, parsed.path, parsed.body
            )
            return request, spans, held, told
        except BaseException as error:
            self.bodies.give_back(parsed.kept_bytes)
            if isinstance(error, RequestRefused):
                error.asked_by(model, tenant, key_id)
            raise

    def _on_path(self, model: ModelId, parsed: ParsedRequest, tenant: str) -> ModelId:
        """The model on that optional path. Raises RequestRefused if no replica serves it there."""
        if parsed.call is not None:
            return self._keeping(parsed.previous, tenant)
        path = parsed.path
        name = served_name(model, path)
        if self._core.known_models() and not self._core.knows(name):
            message = f"no replica that serves the model {model!r} answers {path}"
            raise RequestRefused(Fault.PATH_UNSERVED, message, "model")
        previous = parsed.previous
        if previous is None:
            return name
        if not previous.is_of(tenant):
            raise RequestRefused(Fault.STATE_GONE, NOT_KEPT, PREVIOUS)
        region, replica = previous.region, previous.replica
        kept = self._served(keeper_name(name, region, replica), keeper_name(name, region))
        if kept is None:
            message = f"{replica} of {region}, which kept that response, is gone; send all as input"
            raise RequestRefused(Fault.STATE_GONE, message, PREVIOUS)
        return kept

    def _keeping(self, place: ResponsePlace | None, tenant: str) -> ModelId:
        """What a call about a response asks for. Raises RequestRefused if nobody keeps it."""
        if place is None or not place.is_of(tenant):
            raise unknown_response()
        region, replica = place.region, place.replica
        kept = self._served(kept_name(region, replica), kept_name(region))
        if kept is None:
            raise unknown_response(f"{replica} of {region}, which kept that response, is gone")
        return kept

    def _served(self, *names: ModelId) -> ModelId | None:
        """The first of them that somebody serves. Raises RequestRefused while nobody is known to
        serve anything (a router that has just started can't say what is gone), and where the
        keeper is drained."""
        name = next(filter(self._core.is_served, names), None)
        if name is None and (because := self.not_ready_because()) is not None:
            raise RequestRefused(*because)
        if name is not None and self._core.replicas.drains(name):
            raise RequestRefused(Fault.NO_REPLICA, KEEPER_DRAINS)
        return name

    def _reads_receipts(self) -> bool:
        """Whether the log or a recorder reads the candidates of every decision."""
        return self._config.record is not None or logs_decisions()

    def started(self, record: ClientRequest) -> None:
        self.continuations.begun(record)
        if record.first_byte_at is None:
            self._first_byte(record)
        self.session.started(record)

    def _first_byte(self, record: ClientRequest) -> None:
        record.first_byte_at = self._clock()
        answer = record.answer
        assert answer is not None
        if answer.is_event_stream:  # the first byte of any other comes with its last
            served = "local" if answer.region == self._config.region else "peer"
            ttft_s = record.first_byte_at - record.request.arrived_at
            labels = labels_of(self._metrics, record)
            self._metrics.ttft_seen(served, labels, ttft_s, exemplar_of(record))

    def finished(self, record: ClientRequest) -> None:
        assert record.answer is not None
        failure = record.answer.engine_failure
        head = record.answer.head  # None of an attempt that goes on with what has ended
        status = OK if head is None else head.status
        if failure is None:
            self.session.end(record, "ok", status)
        elif self.session.end(record, ENGINE_FAILED, status, ENGINE_FAILED, failure):
            log.warning("%s: %s: %s", record.request.request_id, ENGINE_FAILED, failure)

    def failed(self, record: ClientRequest) -> None:
        self.feed(ev.ClientGone(record.request.key))  # without effect unless the writer failed it
        if record.failure is not None and record.failure.held_since is not None:
            record.note_return(record.failure.held_since)
        record.count_last_hold(self._clock())
        if record.failure is None:
            assert record.engine_error is not None
            status, message = record.engine_error.status, "the engine's own error"
            outcome, kind = "failed", str(status)
        else:
            status, message = record.failure.fault.value.status, record.failure.message
            is_shed = record.failure.fault in SHED and record.first_byte_at is None
            outcome = "shed" if is_shed else "failed"
            kind = record.failure.fault.value.code
        if outcome == "failed" and status < SERVER_ERROR:
            kind = ""  # the client's mistake
        if self.session.end(record, outcome, record.sent_status or status, kind, message):
            level = logging.INFO if outcome == "shed" else logging.WARNING
            log.log(level, "%s: %d: %s", record.request.request_id, status, message)

    def leave(self, record: ClientRequest) -> None:
        answer = record.answer
        if not self.session.is_open(record):
            return
        if answer is None or not answer.has_last_event:
            core = self._core.inflight.get(record.request.key)
            if core is not None and core.held_since is not None:
                record.note_return(core.held_since)
            self.feed(ev.ClientGone(record.request.key))
            if record.failure is not None and record.failure.fault is Fault.INTERNAL:
                self.failed(record)
            else:
                record.count_last_hold(self._clock())
                gone = CLIENT_GONE, STATUS_CLIENT_GONE, CLIENT_GONE, "the client hung up"
                self.session.end(record, *gone)
        elif answer.end is not None or record.failure is not None:
            self.finished(record)
        else:
            # OpenAI's clients hang up on [DONE]. The end of the answer, with its counts of tokens,
            # is still on its way, and a cancel would cost what is learned from it.
            asyncio.get_running_loop().call_later(END_S, self._end_after_last_event, record)

    def _end_after_last_event(self, record: ClientRequest) -> None:
        self.feed(ev.ClientGone(record.request.key))  # without effect if the end came
        self.finished(record)

    def _spans(self, headers: Mapping[str, str]) -> Trace:
        """A request's spans; none where tracing is off and the client sent no trace."""
        tracer = tracing.active
        parent = trace_context.read(headers) if trace_context.PARENT in headers else None
        if tracer is not None:
            return request_trace(tracer, parent, self._tail, headers.get("host", ""))
        if parent is None:
            return NO_TRACE
        return PassedOn(trace_context.passed_on(headers), parent)
