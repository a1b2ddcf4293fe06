"""Requests of peer regions: from a bus message to a core request, and on to an agent.

The asking router keeps the client, the answer and the body's parts; this region only says which
replica answers. So nothing is stored here beyond the moment of placing.
"""

import logging
from dataclasses import dataclass

import orjson
from nats.aio.msg import Msg

from infra import tracing
from mesh.adapters.bus import RouterBus
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.spans import IngressSpan
from mesh.core import effects as fx
from mesh.core.prompt import Prompt, PromptInvalid, prompt_text
from mesh.core.request import Request
from mesh.runtime.config import RouterConfig
from mesh.runtime.prompts import PromptReader
from mesh.runtime.work import handoff_headers
from schemas import exchange, subjects, wire
from schemas.exchange import Frame, Refusal
from schemas.http import CHAT, ENGINE_PATHS
from schemas.ids import ModelId, RegionId, RequestId, is_request_id

log = logging.getLogger(__name__)


class IngressInvalid(ValueError):
    """A peer's message that asks for nothing we could do."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A peer's request while it is being placed."""

    request: Request
    headers: dict[str, str]
    payload: bytes
    span: IngressSpan


def read_ingress(msg: Msg, key: int, prompts: PromptReader, now: float) -> Foreign:
    """The request in a peer's message. Raises IngressInvalid, whatever the message holds."""
    headers = dict(msg.headers or {})
    try:
        model = subjects.decode_model(headers[exchange.H_MODEL])
        path = headers[exchange.H_PATH]
        request_id = RequestId(headers[exchange.H_REQUEST])
        hops = int(headers[exchange.H_HOPS])
        remaining_s = int(headers[exchange.H_DEADLINE_MS]) / 1000.0
        origin = RegionId(headers[exchange.H_ORIGIN])
    except (KeyError, ValueError) as error:
        raise IngressInvalid(f"header {error}") from error
    address = subjects.parse_inbox(msg.reply)
    if path not in ENGINE_PATHS or not is_request_id(request_id) or address is None:
        raise IngressInvalid("path, request id or reply subject")
    request = Request(
        key=key,
        request_id=request_id,
        model=model,
        prompt=_prompt(msg.data, headers, path, model, prompts),
        arrived_at=now,
        deadline=now + remaining_s,
        hops=hops,
        origin=origin,
        answer_inbox=msg.reply,
    )
    span = IngressSpan(request_id, origin, tracing.extract(headers))
    in_parts = exchange.H_BODY_BYTES in headers
    return Foreign(request, headers, b"" if in_parts else msg.data, span)


def _prompt(
    data: bytes, headers: dict[str, str], path: str, model: ModelId, prompts: PromptReader
) -> Prompt:
    try:
        if exchange.H_BODY_BYTES in headers:
            sketch = wire.decode_as(exchange.Sketch, data)
            if not 0 < sketch.prompt_tokens <= exchange.BODY_BYTES_MAX:
                raise IngressInvalid(f"a prompt of {sketch.prompt_tokens} tokens")
            return Prompt(sketch.prompt_tokens, sketch.block_hashes)
        fields = orjson.loads(data)
        if not isinstance(fields, dict):
            raise IngressInvalid("the body is no JSON object")
        return prompts.read(model, prompt_text(fields, chat=path == CHAT))
    except (wire.WireError, orjson.JSONDecodeError, PromptInvalid) as error:
        raise IngressInvalid(str(error)) from error


class Ingress:
    """The peers' side of one router's desk."""

    def __init__(
        self, config: RouterConfig, bus: RouterBus, metrics: RouterMetrics, prompts: PromptReader
    ) -> None:
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._prompts = prompts
        self._placing: Foreign | None = None  # the core decides at once, one after another

    def read(self, msg: Msg, key: int, now: float) -> Request | None:
        """The request in a message; None when it was refused for what it holds."""
        try:
            self._placing = read_ingress(msg, key, self._prompts, now)
        except IngressInvalid as error:
            log.warning("ingress refused: %s", error)
            self._say_refused(msg.reply, Refusal.BAD_WORK)
            return None
        return self._placing.request

    def decided(self, effect: fx.Decided) -> None:
        """A replica was found."""
        self._current(effect.key).span.decided(effect.decision)

    def dispatch(self, effect: fx.Dispatch, inbox: str) -> None:
        """Hand the request to the replica and tell the asking router which one it is."""
        foreign = self._current(effect.key)
        headers = foreign.headers | handoff_headers(self._config.router, effect)
        foreign.span.dispatched(headers)
        subject = subjects.work(self._config.region, effect.replica)
        self._bus.publish(subject, foreign.payload, reply=inbox, headers=headers)
        placed = wire.encode(exchange.Placed(self._config.region, effect.replica))
        self._bus.publish(inbox, exchange.pack_frame(Frame.PLACED, 0, placed))
        self._metrics.ingress.labels(foreign.request.origin, "placed").inc()
        foreign.span.end()

    def refuse(self, effect: fx.RefusePeer) -> None:
        """Tell the asking router to look elsewhere."""
        foreign = self._current(effect.key)
        self._say_refused(effect.answer_inbox, effect.reason)
        self._metrics.ingress.labels(foreign.request.origin, "refused").inc()
        foreign.span.end(effect.reason)

    def tell_lost(self, effect: fx.TellLost) -> None:
        """Tell an asking router that the replica that was answering is gone."""
        lost = wire.encode(exchange.Lost(self._config.region, effect.replica))
        self._bus.publish(effect.answer_inbox, exchange.pack_frame(Frame.LOST, 0, lost))

    def _say_refused(self, inbox: str, reason: str) -> None:
        refused = exchange.Refused(reason, self._config.region, "", -1, -1)
        self._bus.publish(inbox, exchange.pack_frame(Frame.REFUSED, 0, wire.encode(refused)))

    def _current(self, key: int) -> Foreign:
        assert self._placing is not None and self._placing.request.key == key
        return self._placing
