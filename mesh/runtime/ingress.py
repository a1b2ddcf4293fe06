"""Requests of peer regions: from a bus message to a core request, and on to an agent.

The asking router keeps the client, the answer and the body's parts; this region only says which
replica answers. So nothing is stored here but what is still to be placed, and its bytes count like
those of own clients' bodies: what does not fit is refused before it is read.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from nats.aio.msg import Msg

from infra import tracing
from infra.limited_log import LimitedLog
from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.bus import HEADERS_BYTES_MAX, RouterBus, header_bytes
from mesh.adapters.large_bodies import LARGE_BYTES
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.reply_guard import ReplyGuard
from mesh.adapters.spans import IngressSpan
from mesh.adapters.wishes import salt_of
from mesh.core import effects as fx
from mesh.core.prefixes.prompt import Prompt, PromptInvalid, prompt_text
from mesh.core.requests.request import Request
from mesh.runtime.config import RouterConfig
from mesh.runtime.prompts import PromptReader
from mesh.runtime.work import handoff_headers, ingress_subject, onward_headers, sketch
from schemas import exchange, subjects, wire
from schemas.exchange import HOPS_MAX, Frame, Priority, Refusal
from schemas.headers import HEADERS, TRACE
from schemas.http import CHAT, ENGINE_PATHS
from schemas.ids import (
    ModelId,
    NameInvalid,
    RegionId,
    RequestId,
    checked_name,
    is_request_id,
)
from schemas.residency import Labels, parse_labels
from schemas.state import Digest, encode_state

log = logging.getLogger(__name__)

# What honest routers say is far below; what is beyond can't be reckoned with.
DEADLINE_MS_MAX = 10**12
WAITED_S_MAX = 60.0  # nobody is held longer; a peer's word for more gives no better place
DIGEST_CHARS_MAX = 32 * 1024  # in a refusal, half of what a control message may have
# The rest is not a peer's to say: what a hand-off costs and how it may queue is decided here.
PASSED_ON = {header.name: header for header in HEADERS["ingress"]}


class IngressInvalid(ValueError):
    """A peer's message that asks for nothing we could do."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A peer's request while it is being placed."""

    request: Request
    headers: dict[str, str]
    payload: bytes
    span: IngressSpan

    @property
    def kept_bytes(self) -> int:
        """What it takes of the memory for bodies."""
        return len(self.payload) + header_bytes(self.headers)


def read_ingress(msg: Msg, key: int, prompts: PromptReader, now: float) -> Foreign:
    """The request in a peer's message. Raises IngressInvalid, whatever the message holds."""
    if len(msg.data) > LARGE_BYTES:
        raise IngressInvalid(f"{len(msg.data)} bytes; a body beyond {LARGE_BYTES} comes in parts")
    headers = _headers(msg.headers or {})
    try:
        request = _request(msg, headers, key, prompts, now)
    except KeyError as error:
        raise IngressInvalid(f"no header {error}") from error
    span = IngressSpan(request.request_id, request.origin, tracing.extract(headers))
    in_parts = exchange.H_BODY_BYTES in headers
    return Foreign(request, headers, b"" if in_parts else msg.data, span)


def _headers(given: Mapping[str, str]) -> dict[str, str]:
    """Those that are passed on, each of its form, and small together."""
    headers = {}
    for name, text in given.items():
        header = PASSED_ON.get(name)
        if header is None or (header in TRACE and not header.fits(text)):
            continue
        if not header.fits(text):
            raise IngressInvalid(f"header {name} of {len(text)} characters: {text[:40]!r}")
        headers[name] = text
    if header_bytes(headers) > HEADERS_BYTES_MAX:
        raise IngressInvalid(f"more than {HEADERS_BYTES_MAX} bytes of headers")
    return headers


def _request(
    msg: Msg, headers: Mapping[str, str], key: int, prompts: PromptReader, now: float
) -> Request:
    path = headers[exchange.H_PATH]
    request_id = RequestId(headers[exchange.H_REQUEST])
    if path not in ENGINE_PATHS or not is_request_id(request_id):
        raise IngressInvalid("path or request id")
    try:
        model = subjects.decode_model(headers[exchange.H_MODEL])
        priority = Priority(headers.get(exchange.H_PRIORITY, Priority.NORMAL))
    except ValueError as error:
        raise IngressInvalid(f"header {error}") from error
    residency = _residency(msg.subject, headers)
    passed = _passed(headers, subjects.owner(msg.subject))
    return Request(
        key=key,
        request_id=request_id,
        model=model,
        prompt=_prompt(msg.data, headers, path, model, prompts),
        arrived_at=now - _waited_s(headers, exchange.H_WAITED_MS),
        held_before_s=_waited_s(headers, exchange.H_HELD_MS, exchange.H_WAITED_MS),
        deadline=now + _count(headers, exchange.H_DEADLINE_MS, DEADLINE_MS_MAX) / 1000,
        hops=len(passed),
        origin=passed[0],
        path=passed,
        answer_inbox=msg.reply,
        residency=residency,
        priority=priority,
        slo_ttft_s=_slo_s(headers),
        session=_session(headers),
        warm=exchange.H_WARM in headers,
    )


def _count(headers: Mapping[str, str], name: str, most: int) -> int:
    text = headers[name]
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not plain or int(text) > most:
        raise IngressInvalid(f"header {name} {text[:40]!r} is no number up to {most}")
    return int(text)


def _passed(headers: Mapping[str, str], home: RegionId | None) -> tuple[RegionId, ...]:
    """The regions that it has passed, its origin first: as many as its hops, each once, not here.

    So it never comes back, and wanders no further than HOPS_MAX, whoever sends it on.
    """
    hops = _count(headers, exchange.H_HOPS, HOPS_MAX)
    if not hops:
        raise IngressInvalid("a peer's request has passed a region, so its hops are not 0")
    origin = headers[exchange.H_ORIGIN]
    said = headers.get(exchange.H_REGIONS, origin).split(",", HOPS_MAX)
    try:
        path = tuple(RegionId(checked_name("region", name)) for name in said)
    except NameInvalid as error:
        raise IngressInvalid(f"header {exchange.H_REGIONS}: {error}"[:300]) from error
    if path[0] != origin or len(path) != hops or len({*path, home}) != hops + 1:
        raise IngressInvalid(f"regions {','.join(path)} of {hops} hops from {origin} to {home}")
    return path


def _waited_s(headers: Mapping[str, str], *names: str) -> float:
    """By the first of these headers that is there."""
    name = next(filter(headers.__contains__, names), None)
    return 0.0 if name is None else min(WAITED_S_MAX, _count(headers, name, DEADLINE_MS_MAX) / 1000)


def _slo_s(headers: Mapping[str, str]) -> float | None:
    if exchange.H_SLO_TTFT_MS not in headers:
        return None
    return _count(headers, exchange.H_SLO_TTFT_MS, exchange.SLO_MS_MAX) / 1000


def _session(headers: Mapping[str, str]) -> str | None:
    session = headers.get(exchange.H_SESSION)
    if session is not None and not re.fullmatch(exchange.SESSION_PATTERN, session):
        raise IngressInvalid(f"header {exchange.H_SESSION} {session[:40]!r}")
    return session


def _tenant(headers: Mapping[str, str]) -> str:
    tenant = headers.get(exchange.H_TENANT, "")
    try:
        return tenant and checked_name("tenant", tenant)
    except NameInvalid as error:
        raise IngressInvalid(f"header {exchange.H_TENANT}: {error}"[:300]) from error


def _prompt(
    data: bytes, headers: Mapping[str, str], path: str, model: ModelId, prompts: PromptReader
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
        text = prompt_text(fields, chat=path == CHAT)
        return prompts.read(model, text, salt_of(fields), _tenant(headers))
    except (wire.WireError, orjson.JSONDecodeError, PromptInvalid) as error:
        raise IngressInvalid(str(error)) from error


def _residency(subject: str, headers: Mapping[str, str]) -> Labels:
    """The labels that it wants. One of them stands in its subject, where servers look for it.

    Only the two together count: a label in one place alone is somebody's mistake, and whose
    prompt it is can't be known any more.
    """
    text, label = headers.get(exchange.H_RESIDENCY, ""), subjects.ingress_label(subject)
    try:
        labels = parse_labels(text) if text else ()
    except ValueError as error:
        raise IngressInvalid(f"header {exchange.H_RESIDENCY}: {error}") from error
    if labels if label is None else label not in labels:
        raise IngressInvalid(f"residency {text!r:.100} does not fit the subject {subject}")
    return labels


class Ingress:
    """The peers' side of one router's desk."""

    def __init__(
        self,
        config: RouterConfig,
        bus: RouterBus,
        metrics: RouterMetrics,
        prompts: PromptReader,
        bodies: BodyBudget,
        guard: ReplyGuard,
    ) -> None:
        self._guard = guard
        self._log = LimitedLog(log)
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._prompts = prompts
        self._bodies = bodies
        self._waiting: dict[int, Foreign] = {}  # by key, until placed or refused
        metrics.guests.set_function(lambda: len(self._waiting))

    def read(self, msg: Msg, key: int, now: float) -> Request | None:
        """The request in a message; None when it was refused for what it holds, or dropped."""
        channel = "ingress" if subjects.ingress_label(msg.subject) is None else "ingress_within"
        asker = self._guard.inbox(channel, msg)
        if asker is None:
            return None
        taken = len(msg.data) + header_bytes(msg.headers or {})
        if not self._bodies.take(taken):
            self._metrics.ingress_refusals.labels(Refusal.FULL).inc()
            self._say_refused(msg.reply, Refusal.FULL)
            return None
        try:
            foreign = read_ingress(msg, key, self._prompts, now)
            if foreign.request.origin != asker.region:
                raise IngressInvalid("its answer is not to go to its origin")
        except IngressInvalid as error:
            self._log.warning(channel, "invalid", "ingress refused: %.300s", error)
            self._bodies.give_back(taken)
            self._say_refused(msg.reply, Refusal.BAD_WORK)
            return None
        self._bodies.settle(taken, foreign.kept_bytes)
        self._waiting[key] = foreign
        return foreign.request

    def _leave(self, key: int) -> Foreign:
        """It waits no more."""
        foreign = self._waiting.pop(key)
        self._bodies.give_back(foreign.kept_bytes)
        return foreign

    def decided(self, effect: fx.Decided) -> None:
        """A replica was found."""
        if (foreign := self._waiting.get(effect.key)) is not None:
            foreign.span.decided(effect.decision)

    def dispatch(self, effect: fx.Dispatch, inbox: str, now: float) -> None:
        """Hand the request to the replica and tell the asking router which one it is."""
        foreign = self._leave(effect.key)
        region = effect.region or self._config.region
        handoff = handoff_headers(self._config.region, self._config.router, effect)
        remaining_ms = max(1, round((foreign.request.deadline - now) * 1000))
        headers = foreign.headers | {exchange.H_DEADLINE_MS: str(remaining_ms)} | handoff
        foreign.span.dispatched(headers)
        # First of all, so that the agent can send nothing that would pass for this router's.
        placed = wire.encode(exchange.Placed(region, effect.replica))
        self._bus.publish(inbox, exchange.pack_frame(Frame.PLACED, 0, placed))
        subject = subjects.work(region, effect.replica)
        if not self._bus.publish(subject, foreign.payload, reply=inbox, headers=headers):
            self._not_sent(foreign, inbox)
            return
        if not foreign.request.warm:
            self._metrics.ingress.labels(foreign.request.origin, "placed").inc()
        foreign.span.end()

    def send_on(self, effect: fx.Forward, inbox: str, now: float) -> None:
        """Ask another region to place it; whoever answers says so to the asking router."""
        foreign = self._leave(effect.key)
        request, home = foreign.request, self._config.region
        headers = foreign.headers | onward_headers(request, home, effect.held_s, now)
        foreign.span.dispatched(headers)
        ground = self._config.settings.ground
        subject = ingress_subject(ground, home, effect.peer, request.residency)
        payload = foreign.payload or sketch(request.prompt)
        if not self._bus.publish(subject, payload, reply=inbox, headers=headers):
            self._not_sent(foreign, inbox)
            return
        self._metrics.ingress.labels(request.origin, "sent_on").inc()
        foreign.span.end()

    def _not_sent(self, foreign: Foreign, inbox: str) -> None:
        """The bus does not take it: its router is to look elsewhere."""
        self._say_refused(inbox, Refusal.FULL)
        foreign.span.end(Refusal.FULL)
        self._metrics.ingress_refusals.labels(Refusal.FULL).inc()

    def refuse(self, effect: fx.RefusePeer) -> None:
        """Tell the asking router to look elsewhere."""
        foreign = self._leave(effect.key)
        self._say_refused(effect.answer_inbox, effect.reason, effect.fresh)
        foreign.span.end(effect.reason)
        if foreign.request.warm:
            return
        self._metrics.ingress.labels(foreign.request.origin, "refused").inc()
        self._metrics.ingress_refusals.labels(effect.reason).inc()
        if effect.reason is Refusal.RESIDENCY:
            self._metrics.residency_refused.labels("peer").inc()

    def tell_held(self, effect: fx.TellHeld) -> None:
        """Tell the asking router that its request waits here."""
        self._bus.publish(effect.answer_inbox, exchange.pack_frame(Frame.HELD, effect.hops))

    def tell_lost(self, effect: fx.TellLost) -> None:
        """Tell an asking router that the replica that was answering is gone."""
        lost = wire.encode(exchange.Lost(effect.region or self._config.region, effect.replica))
        self._bus.publish(effect.answer_inbox, exchange.pack_frame(Frame.LOST, 0, lost))

    def _say_refused(self, inbox: str, reason: str, fresh: Digest | None = None) -> None:
        state = "" if fresh is None else encode_state(fresh).decode()
        if len(state) > DIGEST_CHARS_MAX:
            state = ""  # so many models that the next digest must do
        refused = exchange.Refused(reason, self._config.region, "", -1, -1, state)
        self._bus.publish(inbox, exchange.pack_frame(Frame.REFUSED, 0, wire.encode(refused)))
