"""Peers' requests, to be placed in this region.

Each is read and checked; a malformed or forged one is dropped with a warning. The asking router
keeps the client, the answer and the body's parts of its request; this region only says which
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
from mesh.adapters.bus import HEADERS_BYTES_MAX, header_bytes
from mesh.adapters.spans import ingress_trace
from mesh.core.model.prompt import Prompt, PromptInvalid, PromptText
from mesh.core.model.prompt_shapes import CALL_TEXT, text_at
from mesh.core.offline.events import answer_tokens_max
from mesh.http.read_request import BodyBudget, salt_of
from mesh.runtime.control_plane import ReplyGuard
from mesh.session.headers import IngressInvalid, accepted_headers, read_forwarded, read_tenant
from mesh.session.record import NO_TRACE, OpenRequest, Trace
from mesh.session.session import Session
from schemas import exchange, subjects, wire
from schemas.engine_routes import engine_route
from schemas.exchange import LARGE_BYTES, Refusal
from schemas.ids import ModelId
from schemas.request_headers import CONTENT_TYPE, ENGINE_HEADERS

log = logging.getLogger(__name__)

ReadPrompt = Callable[[ModelId, PromptText, str, str], Prompt]  # of model, text, salt and tenant


class CountsRefusals(Protocol):
    """Metrics with a count of peers' requests that are not taken, by why."""

    ingress_refusals: Counter


class PeerRequests:
    """Those that one router or batch runner takes in."""

    def __init__(
        self,
        session: Session,
        guard: ReplyGuard,
        bodies: BodyBudget,
        read_prompt: ReadPrompt,
        metrics: CountsRefusals,
        reads_receipts: Callable[[], bool] = lambda: True,
        channel: str = "ingress",
    ) -> None:
        """`reads_receipts`: whether every decision's candidates are read. `channel`: of requests
        without a label."""
        self._session, self._guard = session, guard
        self._bodies, self._read_prompt, self._metrics = bodies, read_prompt, metrics
        self._reads_receipts, self._channel = reads_receipts, channel
        self._log = LimitedLog(log)

    def receive(self, msg: Msg) -> None:
        """A request of a peer, to be placed in this region."""
        label = subjects.ingress_label(msg.subject)
        channel = self._channel if label is None else f"{self._channel}_within"
        asker = self._guard.inbox(channel, msg)
        if asker is None:
            return
        taken = len(msg.data) + header_bytes(msg.headers or {})
        if not self._bodies.take(taken):
            self._metrics.ingress_refusals.labels(Refusal.FULL).inc()
            self._session.refuse(msg.reply, Refusal.FULL)
            return
        try:
            key, now = next(self._session.keys), self._session.clock()
            wants_receipt = self._reads_receipts()
            record = read_ingress(msg, key, self._read_prompt, now, wants_receipt=wants_receipt)
            if record.request.origin != asker.region:
                raise IngressInvalid("its answer is not to go to its origin")
            if record.request.offline != (self._channel == "offline"):
                raise IngressInvalid("offline work and other work have channels of their own")
        except IngressInvalid as error:
            self._log.warning(channel, "invalid", "ingress refused: %.300s", error)
            self._bodies.give_back(taken)
            self._session.refuse(msg.reply, Refusal.BAD_WORK)
            return
        self._bodies.settle(taken, record.kept_bytes)
        self._session.admit_forwarded(record)


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
