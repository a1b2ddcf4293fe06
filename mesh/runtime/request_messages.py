"""Messages from the bus to a router: requests, answers, states of replicas and regions.

Each is read and checked; a malformed or forged one is dropped with a warning. The asking router
keeps the client, the answer and the body's parts of a peer's request; this region only says which
replica answers. So a peer's request is stored here only while it is being placed, and its bytes
count against the same budget as clients' bodies: what does not fit is refused before it is read.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import orjson
from nats.aio.msg import Msg
from prometheus_client import Counter

from infra import trace_context, tracing
from infra.process import LimitedLog
from mesh.adapters.bus import (
    HEADERS_BYTES_MAX,
    RouterBus,
    has_headers,
    header_bytes,
    is_no_responders,
)
from mesh.adapters.large_bodies import LARGE_BYTES
from mesh.adapters.read_request import BodyBudget, salt_of
from mesh.adapters.spans import ingress_trace
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt, PromptInvalid, PromptText
from mesh.core.model.prompt_shapes import CALL_TEXT, text_at
from mesh.core.offline.events import answer_tokens_max
from mesh.runtime.control_plane import ReplyGuard
from mesh.session.headers import (
    IngressInvalid,
    accepted_headers,
    read_forwarded,
    read_tenant,
)
from mesh.session.record import NO_TRACE, OpenRequest, Trace
from mesh.session.session import Session
from schemas import exchange, state, subjects, wire
from schemas.engine_routes import engine_route
from schemas.exchange import Refusal
from schemas.held import HeldDelta, HeldPart
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.parcels import PARCEL
from schemas.replies import PING_PREFIX
from schemas.request_headers import CONTENT_TYPE, ENGINE_HEADERS

log = logging.getLogger(__name__)

ReadPrompt = Callable[[ModelId, PromptText, str, str], Prompt]  # of model, text, salt and tenant


class Process(Protocol):
    """A router or batch runner."""

    @property
    def region(self) -> RegionId: ...
    @property
    def router(self) -> RouterId: ...
    @property
    def peers(self) -> tuple[RegionId, ...]: ...


class CountsRefusals(Protocol):
    """Metrics with a count of peers' requests that are not taken, by why."""

    ingress_refusals: Counter


class RequestMessages:
    """One router's or batch runner's. `bind` its session before anything is received."""

    session: Session
    _receive_frame: Callable[[str, bytes], bool]

    def __init__(
        self,
        config: Process,
        bus: RouterBus,
        metrics: CountsRefusals,
        read_prompt: ReadPrompt,
        bodies: BodyBudget,
        guard: ReplyGuard,
        clock: Callable[[], float],
        on_control: Callable[[str, Msg], bool] = lambda token, msg: False,
        reads_receipts: Callable[[], bool] = lambda: True,
        channel: str = "ingress",
    ) -> None:
        """`on_control` takes what comes to an inbox that is no answer's, by its last token; False
        if it is none of its own. `reads_receipts`: whether every decision's candidates are read.
        `channel`: of peers' requests without a label.
        """
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._read_prompt = read_prompt
        self._bodies = bodies
        self._guard = guard
        self._clock = clock
        self._on_control = on_control
        self._reads_receipts = reads_receipts
        self._channel = channel
        self._log = LimitedLog(log)
        self._parcels = subjects.inbox(config.region, config.router, PARCEL)

    def bind(self, session: Session) -> None:
        """What is received goes to that session."""
        self.session = session
        self._receive_frame = session.answers.receive_frame

    def receive_answer(self, msg: Msg) -> None:
        """Something for an inbox of this router: nearly always the bytes of some answer."""
        subject = msg.subject
        if msg.headers is None and self._receive_frame(subject, msg.data):
            return
        if subject == self._parcels:
            self.session.answers.receive_parcel(subject.removesuffix(PARCEL), msg.data)
            return
        answers = self.session.answers
        has_no_subscriber = is_no_responders(msg.headers)
        if has_no_subscriber:
            is_answer = answers.no_subscriber(subject)
        else:
            is_answer = answers.receive_frame(subject, msg.data)
        if is_answer:
            return
        token = subject.rpartition(".")[2]
        if token.startswith(PING_PREFIX):
            if has_no_subscriber:
                self._bus.paced_bodies.unanswered(token)
            elif self._bus.paced_bodies.passed(token, msg.data):
                return
        if not self._on_control(token, msg) and not has_no_subscriber:
            answers.receive_stray(subject, msg.data)

    def receive_heartbeat(self, msg: Msg) -> None:
        """A replica of this region, or of one that it has adopted."""
        if has_headers(msg):
            self._drop_with_headers("heartbeat", msg)
        else:
            self.read_heartbeat(msg.subject, msg.data)

    def read_heartbeat(self, subject: str, data: bytes) -> None:
        """A heartbeat and the subject that it was published on, which only its replica may."""
        try:
            beat = state.decode_heartbeat(data)
        except wire.WireError as error:
            self._log.warning("heartbeat", "unreadable", "heartbeat dropped: %.300s", error)
            return
        if subject != subjects.heartbeat(beat.region, beat.replica):
            text = "heartbeat on %s dropped: it names another replica"
            self._log.warning("heartbeat", "another", text, subject)
        elif beat.region == self._config.region or beat.region in self._config.peers:
            self.session.feed(ev.HeartbeatSeen(beat))

    def receive_held(self, msg: Msg) -> None:
        """What a replica's engine holds of prompts: the subject names the replica."""
        if has_headers(msg):
            self._drop_with_headers("held", msg)
            return
        try:
            message = wire.decode(msg.data)
        except wire.WireError as error:
            self._log.warning("held", "unreadable", "%s dropped: %.300s", msg.subject, error)
            return
        replica = ReplicaId(msg.subject.split(".")[3])
        if isinstance(message, HeldDelta):
            self.session.feed(ev.HeldDeltaSeen(replica, message))
        elif isinstance(message, HeldPart):
            self.session.feed(ev.HeldPartSeen(replica, message))

    def receive_digest(self, msg: Msg) -> None:
        """A router of a peer region, or of our own."""
        if has_headers(msg):
            self._drop_with_headers("digest", msg)
            return
        try:
            digest = state.decode_digest(msg.data)
        except wire.WireError as error:
            self._log.warning("digest", "unreadable", "digest dropped: %.300s", error)
            return
        if digest.region != subjects.owner(msg.subject):
            text = "digest on %s dropped: it names another region"
            self._log.warning("digest", "another", text, msg.subject)
        elif digest.region in self._config.peers:
            self.session.feed(ev.DigestSeen(digest))

    def _drop_with_headers(self, what: str, msg: Msg) -> None:
        text = "%s on %s dropped: it has headers, so no router or agent published it"
        self._log.warning(what, "headers", text, what, msg.subject)

    def receive_ingress(self, msg: Msg) -> None:
        """A request of a peer, to be placed in this region."""
        label = subjects.ingress_label(msg.subject)
        channel = self._channel if label is None else f"{self._channel}_within"
        asker = self._guard.inbox(channel, msg)
        if asker is None:
            return
        taken = len(msg.data) + header_bytes(msg.headers or {})
        if not self._bodies.take(taken):
            self._metrics.ingress_refusals.labels(Refusal.FULL).inc()
            self._refuse(msg.reply, Refusal.FULL)
            return
        try:
            key, now = next(self.session.keys), self._clock()
            wants_receipt = self._reads_receipts()
            record = read_ingress(msg, key, self._read_prompt, now, wants_receipt=wants_receipt)
            if record.request.origin != asker.region:
                raise IngressInvalid("its answer is not to go to its origin")
            if record.request.offline != (self._channel == "offline"):
                raise IngressInvalid("offline work and other work have channels of their own")
        except IngressInvalid as error:
            self._log.warning(channel, "invalid", "ingress refused: %.300s", error)
            self._bodies.give_back(taken)
            self._refuse(msg.reply, Refusal.BAD_WORK)
            return
        self._bodies.settle(taken, record.kept_bytes)
        self.session.admit_forwarded(record)

    def _refuse(self, inbox: str, reason: Refusal) -> None:
        self._bus.answer_peer(inbox, exchange.Refused(reason, self._config.region, "", -1, -1))


def read_ingress(
    msg: Msg, key: int, read_prompt: ReadPrompt, now: float, *, wants_receipt: bool = True
) -> OpenRequest:
    """The request in a peer's message. Raises IngressInvalid, whatever the message holds."""
    if len(msg.data) > LARGE_BYTES:
        raise IngressInvalid(f"{len(msg.data)} bytes; a body beyond {LARGE_BYTES} comes in parts")
    headers = accepted_headers(msg.headers or {})
    if header_bytes(headers) > HEADERS_BYTES_MAX:
        raise IngressInvalid(f"more than {HEADERS_BYTES_MAX} bytes of headers")
    request = read_forwarded(
        headers,
        lambda model, path: _prompt(msg.data, headers, path, model, read_prompt),
        key=key,
        home=subjects.owner(msg.subject),
        label=subjects.ingress_label(msg.subject),
        inbox=msg.reply,
        now=now,
        wants_receipt=wants_receipt,
    )
    body = b"" if exchange.H_BODY_BYTES in headers else msg.data
    if request.offline and body and request.answer_tokens is None:
        request = replace(request, answer_tokens=answer_tokens_max(orjson.loads(body)))
    span: Trace = NO_TRACE
    if tracing.active is not None or trace_context.PARENT in headers:
        span = ingress_trace(headers, request.origin, msg.subject)
    if span.is_recording and not wants_receipt:
        request = replace(request, wants_receipt=True)
    kept_bytes = len(body) + header_bytes(headers)
    return OpenRequest(
        request=request,
        path=headers[exchange.H_PATH],
        body=body,
        spans=span,
        received=headers,
        kept_bytes=kept_bytes,
    )


def _prompt(
    data: bytes, headers: Mapping[str, str], path: str, model: ModelId, read_prompt: ReadPrompt
) -> Prompt:
    try:
        if exchange.H_CALL in headers:
            return read_prompt(model, CALL_TEXT, "", read_tenant(headers))
        if exchange.H_BODY_BYTES in headers:
            sketch = wire.decode_as(exchange.Sketch, data)
            if not 0 < sketch.prompt_tokens <= exchange.BODY_BYTES_MAX:
                raise IngressInvalid(f"a prompt of {sketch.prompt_tokens} tokens")
            return Prompt(sketch.prompt_tokens, sketch.block_hashes)
        is_form = ENGINE_HEADERS[CONTENT_TYPE].on_bus in headers and engine_route(path).takes_form
        fields = {} if is_form else orjson.loads(data)
        if not isinstance(fields, dict):
            raise IngressInvalid("the body is no JSON object")
        text = text_at(path, fields, len(data))
        return read_prompt(model, text, salt_of(fields), read_tenant(headers))
    except (wire.WireError, orjson.JSONDecodeError, PromptInvalid) as error:
        raise IngressInvalid(str(error)) from error
