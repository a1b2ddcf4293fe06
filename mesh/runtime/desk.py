"""The desk between clients, core and bus: it performs the core's effects and reports back.

Every message from the bus and every step of an HTTP handler becomes a core event; every effect
becomes a bus message or a woken handler. Nothing here waits and nothing here chooses.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nats.aio.msg import Msg
from opentelemetry.context import Context

from mesh.adapters import receipts
from mesh.adapters.answer import Answer
from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.bus import RouterBus, is_no_responders
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.spans import RequestSpans
from mesh.adapters.ticket import Ask, Failure, Ticket
from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.core.request import Request
from mesh.core.router import RouterCore
from mesh.runtime.config import RouterConfig
from mesh.runtime.ingress import Ingress
from mesh.runtime.prompts import PromptReader
from mesh.runtime.work import body_parts, handoff_headers, request_headers, sketch
from schemas import exchange, state, subjects, wire
from schemas.decision import Placement
from schemas.exchange import Frame
from schemas.http import Fault
from schemas.ids import ModelId, RegionId

log = logging.getLogger(__name__)

SHED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.DRAINING)
INBOX_SECRET_BYTES = 12
NOBODY_LISTENS = "nobody_listens"  # the bus's own answer, beside those of schemas.exchange.Refusal
STATUS_CLIENT_GONE = 499  # nobody receives it; traces and logs show it


class Desk:
    """One router's requests, from `admit` to `finished`, `failed` or `leave`."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        bus: RouterBus,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._core = core
        self._bus = bus
        self._metrics = metrics
        self._clock = clock
        self._prompts = PromptReader(config.hash_key)
        self._last_key = 0
        self.bodies = BodyBudget()
        self._kept: dict[int, int] = {}  # bytes of bodies and prompts, by key
        self._tickets: dict[int, Ticket] = {}
        self._requests: dict[int, Request] = {}
        self._streams: dict[str, Ticket] = {}  # last token of the inbox → its ticket
        self._ingress = Ingress(config, bus, metrics, self._prompts)
        metrics.buffered.set_function(self.buffered_bytes)
        self._performers: dict[type, Callable[[Any], None]] = {
            fx.Dispatch: self._dispatch,
            fx.Forward: self._forward,
            fx.CancelAttempt: self._cancel,
            fx.RefusePeer: self._ingress.refuse,
            fx.TellLost: self._ingress.tell_lost,
            fx.Fail: self._fail,
            fx.PassEngineError: self._pass_engine_error,
            fx.Decided: self._decided,
            fx.PublishDigest: self._publish_digest,
        }

    @property
    def open_requests(self) -> int:
        """Clients that have not been answered to the end."""
        return len(self._tickets)

    def buffered_bytes(self) -> int:
        """Bytes of answers that wait for their clients."""
        answers = (ticket.answer for ticket in self._tickets.values())
        return sum(answer.buffered_bytes for answer in answers if answer is not None)

    def feed(self, event: ev.Event) -> None:
        """Let the core decide about one event, and do what it says."""
        for effect in self._core.handle(event, self._clock()):
            self._performers[type(effect)](effect)

    # The HTTP face: see mesh.adapters.http_api.FrontDoor.

    def models(self) -> tuple[ModelId, ...]:
        """Models that somebody in the mesh serves."""
        return self._core.models()

    def not_ready_because(self) -> tuple[Fault, str] | None:
        """Why requests can't be placed at present."""
        if self._core.draining:
            return Fault.DRAINING, "this router is shutting down"
        if not self._bus.is_connected:
            return Fault.NO_REPLICA, "the bus can't be reached"
        if not self._core.models():
            return Fault.NO_REPLICA, "no replica has been heard of yet"
        return None

    def admit(self, ask: Ask, taken: int, parent: Context | None) -> Ticket:
        """Take a client's request in and place it; `taken`: what `bodies` set aside for it."""
        now = self._clock()
        key = self._new_key()
        deadline = now + (ask.timeout_s or self._config.settings.request_s_max)
        spans = RequestSpans(ask.request_id, ask.model, parent)
        ticket = Ticket(
            key=key,
            ask=ask,
            deadline=deadline,
            arrived_at=now,
            spans=spans,
            text_bytes=len(ask.text),
        )
        self._kept[key] = len(ask.body) + len(ask.text)
        self.bodies.settle(taken, self._kept[key])
        request = Request(
            key=key,
            request_id=ask.request_id,
            model=ask.model,
            prompt=self._prompts.read(ask.model, ask.text),
            arrived_at=now,
            deadline=deadline,
            hops=0,
            origin=self._config.region,
        )
        self._tickets[key], self._requests[key] = ticket, request
        self.feed(ev.RequestArrived(request))
        return ticket

    def started(self, ticket: Ticket) -> None:
        """Its client is being sent a first byte."""
        ticket.first_byte_at = self._clock()
        ticket.spans.first_byte()
        assert ticket.answer is not None
        here = ticket.answer.region == self._config.region
        self._metrics.ttft.labels("local" if here else "peer").observe(
            ticket.first_byte_at - ticket.arrived_at
        )
        self.feed(ev.AnswerStarted(ticket.key, ticket.answer.attempt))
        self._drop_body(ticket)

    def passed(self, ticket: Ticket) -> None:
        """Bytes have left for the client: the agent may send more."""
        answer = ticket.answer
        if answer is None or answer.region is None or answer.replica is None:
            return
        credit = answer.credit_due()
        if credit is not None:
            self._bus.send_credit(answer.region, answer.replica, credit)

    def finished(self, ticket: Ticket) -> None:
        """Its client has the whole answer."""
        if self._close(ticket, "ok"):
            assert ticket.answer is not None and ticket.answer.head is not None
            ticket.spans.end(ticket.answer.head.status)

    def failed(self, ticket: Ticket) -> None:
        """Its client has been told of the failure."""
        if ticket.failure is None:
            assert ticket.engine_error is not None
            status, message = ticket.engine_error.status, "the engine's own error"
            outcome = "failed"
        else:
            status, message = ticket.failure.fault.value.status, ticket.failure.message
            outcome = "shed" if ticket.failure.fault in SHED else "failed"
        if self._close(ticket, outcome):
            ticket.spans.end(status, message)

    def leave(self, ticket: Ticket) -> None:
        """Its client is gone, unless it had its answer already."""
        if ticket.key in self._tickets:
            self.feed(ev.ClientGone(ticket.key))
            self._close(ticket, "client_gone")
            ticket.spans.end(STATUS_CLIENT_GONE, "the client hung up")

    def _drop_body(self, ticket: Ticket) -> None:
        """It won't be placed again, so nobody needs its body any more."""
        self.bodies.give_back(self._kept.pop(ticket.key, 0))
        ticket.ask = replace(ticket.ask, body=b"", text=b"")

    def _new_key(self) -> int:
        self._last_key += 1
        return self._last_key

    def _close(self, ticket: Ticket, outcome: str) -> bool:
        if self._tickets.pop(ticket.key, None) is None:
            return False
        del self._requests[ticket.key]
        self._drop_body(ticket)
        self._forget_stream(ticket)
        self._metrics.ended(outcome, ticket.arrived_at, self._clock())
        return True

    def _forget_stream(self, ticket: Ticket) -> None:
        if ticket.answer is not None:
            self._streams.pop(_token(ticket.answer.inbox), None)

    # From the bus.

    def hear_heartbeat(self, data: bytes) -> None:
        """A replica of this region."""
        try:
            beat = state.decode_heartbeat(data)
        except wire.WireError as error:
            log.warning("heartbeat dropped: %s", error)
            return
        if beat.region == self._config.region:
            self.feed(ev.HeartbeatSeen(beat))

    def hear_digest(self, data: bytes) -> None:
        """A router of a peer region, or of our own."""
        try:
            digest = state.decode_digest(data)
        except wire.WireError as error:
            log.warning("digest dropped: %s", error)
            return
        if digest.region in self._config.peers:
            self.feed(ev.DigestSeen(digest))

    def hear_answer(self, msg: Msg) -> None:
        """A frame of some answer."""
        ticket = self._streams.get(_token(msg.subject))
        answer = ticket.answer if ticket is not None else None
        try:
            if ticket is None or answer is None:
                self._stray(msg)
            elif is_no_responders(msg.headers):
                self._attempt_over(ticket, _nobody_listens(answer, self._config.region))
            else:
                self._frame(ticket, answer, exchange.unpack_frame(msg.data))
        except wire.WireError as error:
            log.warning("frame on %s dropped: %s", msg.subject, error)

    def _frame(self, ticket: Ticket, answer: Answer, frame: exchange.FrameView) -> None:
        if frame.kind is Frame.BODY_WANTED:
            self._send_body(ticket, wire.decode_as(exchange.BodyWanted, frame.payload))
        event = answer.feed(frame, self._clock())
        if isinstance(event, ev.AttemptProgressed | ev.PlacedByPeer):
            self._count_placed(event, answer)
            self.feed(event)
        elif event is not None:
            self._attempt_over(ticket, event)
        if not answer.is_event_stream:
            self.passed(ticket)
        ticket.wake()

    def _attempt_over(self, ticket: Ticket, event: ev.Event) -> None:
        """Nothing more of this attempt is wanted."""
        answer = ticket.answer
        assert answer is not None
        self._forget_stream(ticket)
        if isinstance(event, ev.AnswerEnded):
            self._learn(ticket, answer)
        elif isinstance(event, ev.AttemptRefused):
            self._metrics.refusals.labels(event.reason).inc()
            if event.region != self._config.region:
                self._metrics.forwards.labels(event.region, "refused").inc()
        elif isinstance(event, ev.AttemptFailed):
            self._metrics.failures.inc()
            ticket.engine_error = answer.engine_error or ticket.engine_error
            log.info("%s: attempt %d: %s", ticket.ask.request_id, event.attempt, event.detail)
        self.feed(event)

    def _count_placed(self, event: ev.Event, answer: Answer) -> None:
        if isinstance(event, ev.PlacedByPeer) and answer.region is not None:
            self._metrics.forwards.labels(answer.region, "placed").inc()

    def _learn(self, ticket: Ticket, answer: Answer) -> None:
        end = answer.end
        if end is None or end.prompt_tokens < 0:
            return
        self._prompts.learn(ticket.ask.model, ticket.text_bytes, end.prompt_tokens)
        self._metrics.prompt_tokens.inc(end.prompt_tokens)
        self._metrics.cached_tokens.inc(max(0, end.cached_tokens))

    def _stray(self, msg: Msg) -> None:
        """A frame that nobody waits for: whoever sends it should stop."""
        frame = exchange.unpack_frame(msg.data)
        if frame.kind is Frame.PLACED:
            placed = wire.decode_as(exchange.Placed, frame.payload)
        elif frame.kind is Frame.HEAD:
            head = wire.decode_as(exchange.Head, frame.payload)
            placed = exchange.Placed(head.region, head.replica)
        else:
            return
        subject = subjects.cancel(placed.region, placed.replica)
        self._bus.publish(subject, wire.encode(exchange.Cancel(msg.subject)))

    def _send_body(self, ticket: Ticket, wanted: exchange.BodyWanted) -> None:
        assert ticket.answer is not None
        subject = subjects.body(wanted.region, wanted.replica)
        parts = body_parts(ticket.ask.body, ticket.answer.inbox, self._bus.payload_bytes_max)
        for payload, headers in parts:
            self._bus.publish(subject, payload, headers=headers)

    def hear_ingress(self, msg: Msg) -> None:
        """A peer asks this region to place a request."""
        request = self._ingress.read(msg, self._new_key(), self._clock())
        if request is not None:
            self.feed(ev.RequestArrived(request))

    # Effects.

    def _begin(self, key: int, attempt: int) -> tuple[Ticket, str]:
        ticket = self._tickets[key]
        self._forget_stream(ticket)
        # Who knows an inbox may answer there, cancel and credit: so nobody may guess one.
        token = f"{key:x}-{attempt}-{secrets.token_hex(INBOX_SECRET_BYTES)}"
        inbox = subjects.inbox(self._config.region, self._config.router, token)
        ticket.answer = Answer(key, attempt, inbox)
        self._streams[token] = ticket
        return ticket, inbox

    def _dispatch(self, effect: fx.Dispatch) -> None:
        if effect.answer_inbox is not None:
            self._ingress.dispatch(effect, effect.answer_inbox)
            return
        ticket, inbox = self._begin(effect.key, effect.attempt)
        assert ticket.answer is not None
        ticket.answer.region, ticket.answer.replica = self._config.region, effect.replica
        headers = request_headers(
            ticket, effect.attempt, 0, self._config.region, self._clock()
        ) | handoff_headers(self._config.router, effect.handoff)
        ticket.spans.dispatched(effect.replica, effect.attempt, headers)
        payload = ticket.ask.body
        if len(payload) > self._bus.payload_bytes_max:
            headers[exchange.H_BODY_BYTES] = str(len(payload))
            payload = b""
        subject = subjects.work(self._config.region, effect.replica)
        self._bus.publish(subject, payload, reply=inbox, headers=headers)

    def _forward(self, effect: fx.Forward) -> None:
        ticket, inbox = self._begin(effect.key, effect.attempt)
        headers = request_headers(ticket, effect.attempt, 1, self._config.region, self._clock())
        ticket.spans.dispatched(effect.peer, effect.attempt, headers)
        payload = ticket.ask.body
        if len(payload) > self._bus.payload_bytes_max:
            headers[exchange.H_BODY_BYTES] = str(len(payload))
            payload = sketch(self._requests[effect.key].prompt)
        self._bus.publish(subjects.ingress(effect.peer), payload, reply=inbox, headers=headers)

    def _cancel(self, effect: fx.CancelAttempt) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is None or ticket.answer is None:
            return
        self._forget_stream(ticket)  # an unknown replica is told when its first frame comes
        if effect.replica is not None:
            message = exchange.Cancel(ticket.answer.inbox)
            self._bus.send_cancel(effect.region, effect.replica, message)

    def _fail(self, effect: fx.Fail) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is not None:
            ticket.failure = Failure(effect.fault, effect.message, effect.retry_after_s)
            ticket.wake()

    def _pass_engine_error(self, effect: fx.PassEngineError) -> None:
        ticket = self._tickets.get(effect.key)
        if ticket is not None:
            ticket.pass_engine_error = True
            ticket.wake()

    def _decided(self, effect: fx.Decided) -> None:
        decision = effect.decision
        if log.isEnabledFor(logging.INFO):
            log.info("%s", receipts.line(decision))
        ticket = self._tickets.get(effect.key)
        if ticket is None:
            self._ingress.decided(effect)
            return
        ticket.decision = decision
        ticket.spans.decided(decision)
        self._metrics.placements.labels(decision.placement.value).inc()
        if decision.placement in (Placement.LOCAL, Placement.PEER):
            self._metrics.hold.observe(decision.held_s)

    def _publish_digest(self, effect: fx.PublishDigest) -> None:
        self._bus.publish(subjects.digest(self._config.region), state.encode_state(effect.digest))


def _token(inbox: str) -> str:
    return inbox.rpartition(".")[2]


def _nobody_listens(answer: Answer, home: RegionId) -> ev.AttemptRefused:
    # Nothing was begun, so it counts as a refusal: whoever was asked rests until it speaks.
    region, replica = answer.region or home, answer.replica
    return ev.AttemptRefused(answer.key, answer.attempt, NOBODY_LISTENS, region, replica, -1, -1)
