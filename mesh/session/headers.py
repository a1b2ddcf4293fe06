"""The headers of the messages that carry a request, written and read.

A peer's message is believed only as far as it concerns that request: its place in the hold queue,
its deadline, its labels. This router decides what a hand-off costs and how it may queue.
"""

import re
from collections.abc import Callable, Mapping

from mesh.core.model.effects import Dispatch, Forward
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.model.served_names import keeper_name, model_of, served_name
from mesh.session.record import OpenRequest
from schemas import exchange, subjects
from schemas.engine_routes import GENERATING_PATHS, PLAIN_PATHS
from schemas.exchange import HOPS_MAX, Priority
from schemas.headers import HEADERS, TRACE
from schemas.http import RESPONSES
from schemas.ids import (
    UNLISTED_KEY,
    ModelId,
    NameInvalid,
    RegionId,
    ReplicaId,
    RequestId,
    RouterId,
    checked_name,
    is_path,
    is_request_id,
)
from schemas.residency import Labels, labels_text, parse_labels
from schemas.response_calls import RESPONSE, ResponseCall

# Honest routers send far lower numbers; higher ones are refused.
DEADLINE_MS_MAX = 10**12
WAITED_S_MAX = 60.0  # the longest hold; a higher claim gives no better place
PASSED_ON = {header.name: header for header in HEADERS["ingress"]}


class IngressInvalid(ValueError):
    """A peer's message that is no valid request."""


# Written.


def work_headers(
    record: OpenRequest, effect: Dispatch, home: RegionId, router: RouterId, now: float
) -> dict[str, str]:
    """Of a request that a router of `home` hands to a replica."""
    headers = _request_headers(record, effect.attempt, now)
    if record.path == RESPONSES and record.tenant:
        headers[exchange.H_TENANT] = record.tenant  # its response's id is for that tenant
    _add_handoff(headers, effect, home, router)
    return headers


def passed_on_headers(
    record: OpenRequest, effect: Dispatch, home: RegionId, router: RouterId, now: float
) -> dict[str, str]:
    """Of a peer's request that a router of `home` hands to a replica."""
    headers = {**record.received, exchange.H_DEADLINE_MS: _deadline_ms(record.request, now)}
    _add_handoff(headers, effect, home, router)
    return headers


def ingress_headers(
    record: OpenRequest, effect: Forward, origin: RegionId, now: float
) -> dict[str, str]:
    """Of a request that a peer is to place; no agent needs the last of them."""
    request = record.request
    headers = _request_headers(record, effect.attempt, now)
    if record.tenant:
        headers[exchange.H_TENANT] = record.tenant
    if request.key_id:
        headers[exchange.H_KEY_ID] = request.key_id
    headers[exchange.H_WAITED_MS] = str(max(0, round((now - request.arrived_at) * 1000)))
    headers[exchange.H_HELD_MS] = str(round(effect.held_s * 1000))
    headers[exchange.H_HOPS] = "1"
    headers[exchange.H_ORIGIN] = origin
    return headers


def _request_headers(record: OpenRequest, attempt: int, now: float) -> dict[str, str]:
    request = record.request
    path = record.path
    model = request.model if path in PLAIN_PATHS else model_of(request.model)
    headers = {
        exchange.H_DEADLINE_MS: _deadline_ms(request, now),
        exchange.H_REQUEST: request.request_id,
        exchange.H_MODEL: subjects.encode_model(model),
        exchange.H_PATH: path,
        exchange.H_ATTEMPT: str(attempt),
    }
    if record.adds_usage:
        headers[exchange.H_ADD_USAGE] = "1"
    if record.splice is not None and record.splice.is_turn:
        headers[exchange.H_CONTINUES] = "1"
    if record.keeper is not None:
        headers.update(_of_keeper(record.keeper, record.call))
    if record.for_engine:
        headers.update(record.for_engine)
    if request.priority is not Priority.NORMAL:
        headers[exchange.H_PRIORITY] = request.priority.value
    if request.slo_ttft_s is not None:
        headers[exchange.H_SLO_TTFT_MS] = str(round(request.slo_ttft_s * 1000))
    if request.session is not None:
        headers[exchange.H_SESSION] = request.session
    if request.residency:
        headers[exchange.H_RESIDENCY] = labels_text(request.residency)
    if request.offline:
        headers[exchange.H_OFFLINE] = "1"
    return headers


def _of_keeper(keeper: ReplicaId, call: ResponseCall | None) -> dict[str, str]:
    """What goes on with a response that is kept, or is about one. The path of the latter is one
    that agents know whatever is asked."""
    if call is None:
        return {exchange.H_KEEPER: keeper}
    about = {exchange.H_KEEPER: keeper, exchange.H_CALL: call.text}
    return {**about, exchange.H_PATH: RESPONSES}


def _deadline_ms(request: Request, now: float) -> str:
    """How long an answer is of use."""
    return str(max(1, round((request.deadline - now) * 1000)))


def _add_handoff(
    headers: dict[str, str], effect: Dispatch, home: RegionId, router: RouterId
) -> None:
    """Heartbeats report by these what was taken and what it costs; agents know the owner."""
    headers[exchange.H_FROM] = router
    headers[exchange.H_HANDOFF] = str(effect.handoff)
    headers[exchange.H_PREFILL_TOKENS] = str(effect.prefill_tokens)
    if effect.may_queue:
        headers[exchange.H_MAY_QUEUE] = "1"
    if effect.region is not None:
        headers[exchange.H_OWNER] = home
    if effect.term is not None:
        headers[exchange.H_TERM] = str(effect.term)


# Read. Everything raises IngressInvalid for what no honest router writes.


def accepted_headers(given: Mapping[str, str]) -> dict[str, str]:
    """Those of a peer's message that go on to the agent, each of its form."""
    headers = {}
    for name, text in given.items():
        header = PASSED_ON.get(name)
        if header is None or (header in TRACE and not header.fits(text)):
            continue
        if not header.fits(text):
            raise IngressInvalid(f"header {name} of {len(text)} characters: {text[:40]!r}")
        headers[name] = text
    return headers


def read_forwarded(
    headers: Mapping[str, str],
    prompt: Callable[[ModelId, str], Prompt],
    *,
    key: int,
    home: RegionId | None,
    label: str | None,
    inbox: str,
    now: float,
    wants_receipt: bool = True,
) -> Request:
    """The request that a peer's message asks `home` to place; its answer goes to `inbox`.

    `label`: the residency label in the message's subject. `prompt`: reads it, by model and path.
    A call about a response has the name that `kept_name` gives.
    """
    try:
        path = headers[exchange.H_PATH]
        request_id = RequestId(headers[exchange.H_REQUEST])
        if not is_path(path) or not is_request_id(request_id):
            raise IngressInvalid("path or request id")
        if exchange.H_CALL in headers:
            path = RESPONSE
        model, priority = served_name(_model(headers), path), _priority(headers)
        if exchange.H_KEEPER in headers and home is not None:
            model = keeper_name(model, home, _keeper(headers))
        return Request(
            key=key,
            request_id=request_id,
            model=model,
            residency=_residency(headers, label),
            hops=_hops(headers),
            origin=_origin(headers, home),
            prompt=prompt(model, path),
            arrived_at=now - _waited_s(headers, exchange.H_WAITED_MS),
            held_before_s=_waited_s(headers, exchange.H_HELD_MS, exchange.H_WAITED_MS),
            deadline=now + _count(headers, exchange.H_DEADLINE_MS, DEADLINE_MS_MAX) / 1000,
            answer_inbox=inbox,
            priority=priority,
            slo_ttft_s=_slo_s(headers),
            session=_session(headers),
            offline=exchange.H_OFFLINE in headers,
            wants_receipt=wants_receipt,
            answer_tokens=None if path in GENERATING_PATHS else 0,
            is_whole_here=exchange.H_BODY_BYTES not in headers,
            tenant=read_tenant(headers),
            key_id=_optional_name(headers, exchange.H_KEY_ID),
        )
    except KeyError as error:
        raise IngressInvalid(f"no header {error}") from error


def read_tenant(headers: Mapping[str, str]) -> str:
    """The tenant whose request it is, or the mark of a key on no list; empty for none."""
    return _optional_name(headers, exchange.H_TENANT, UNLISTED_KEY)


def _optional_name(headers: Mapping[str, str], header: str, mark: str = "") -> str:
    """A name, which `mark` may precede."""
    name = headers.get(header, "")
    try:
        if name:
            checked_name("name", name.removeprefix(mark))
        return name
    except NameInvalid as error:
        raise IngressInvalid(f"header {header}: {error}"[:300]) from error


def _model(headers: Mapping[str, str]) -> ModelId:
    try:
        return subjects.decode_model(headers[exchange.H_MODEL])
    except ValueError as error:
        raise IngressInvalid(f"header {error}") from error


def _keeper(headers: Mapping[str, str]) -> ReplicaId:
    try:
        return ReplicaId(checked_name("replica", headers[exchange.H_KEEPER]))
    except NameInvalid as error:
        raise IngressInvalid(f"header {exchange.H_KEEPER}: {error}"[:300]) from error


def _priority(headers: Mapping[str, str]) -> Priority:
    try:
        return Priority(headers.get(exchange.H_PRIORITY, Priority.NORMAL))
    except ValueError as error:
        raise IngressInvalid(f"header {error}") from error


def _count(headers: Mapping[str, str], name: str, most: int) -> int:
    text = headers[name]
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not plain or int(text) > most:
        raise IngressInvalid(f"header {name} {text[:40]!r} is no number up to {most}")
    return int(text)


def _hops(headers: Mapping[str, str]) -> int:
    """The regions that it has passed; more than one if an older router forwarded it again."""
    hops = _count(headers, exchange.H_HOPS, HOPS_MAX)
    if not hops:
        raise IngressInvalid("a peer's request has passed a region, so its hops are not 0")
    return hops


def _origin(headers: Mapping[str, str], home: RegionId | None) -> RegionId:
    try:
        origin = RegionId(checked_name("region", headers[exchange.H_ORIGIN]))
    except NameInvalid as error:
        raise IngressInvalid(f"header {exchange.H_ORIGIN}: {error}"[:300]) from error
    if origin == home:
        raise IngressInvalid(f"a request of {home} came back to it")
    return origin


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


def _residency(headers: Mapping[str, str], label: str | None) -> Labels:
    """The labels that it requires. One of them is in its subject, where servers check it.

    A label in only one of the two places is a mistake, and the request is refused.
    """
    text = headers.get(exchange.H_RESIDENCY, "")
    try:
        labels = parse_labels(text) if text else ()
    except ValueError as error:
        raise IngressInvalid(f"header {exchange.H_RESIDENCY}: {error}") from error
    if labels if label is None else label not in labels:
        raise IngressInvalid(f"residency {text!r:.100} does not fit the subject's label {label}")
    return labels
