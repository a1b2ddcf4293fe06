"""Reads a request for work: its headers and the fields of its body, as a `ParsedRequest`.

An option that can't be read is an error: ignored, it would leave a client without the deadline or
the residency that it asked for. Body fields are checked by the engine, so one that is no text is
passed on unread.

Headers that the router acts on are given once and spelled right. A proxy may join the lines of a
repeated header with a comma (RFC 9110, 5.3): two lines of labels, both required, would become a
list of alternatives. A misspelt `x-mesh-` header would be ignored, and a prompt that was to stay in
a region would go anywhere. Both are 400. Separators count as spelling, because proxies and CGI turn
hyphens into underscores and back.

A budget limits the bytes of all requests together. A body is kept until its client has been sent a
first byte, because until then the request may be placed again; so a full hold queue of large bodies
would be gigabytes. Bytes are charged as they arrive, those of peers' requests too; what does not
fit is shed. The last part of the budget is for small bodies alone, so that large ones can't shut
out everybody else.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from mesh.adapters.refused import RequestRefused
from mesh.core.model.prompt import PromptInvalid, PromptText, StateUnknown
from mesh.core.model.prompt_shapes import text_at
from mesh.http.form_parts import FORM, FormInvalid, form_model
from mesh.session.body_model import ModelPlace
from schemas.engine_routes import PLAIN_PATHS, STREAM_OPTIONS_PATHS, engine_route
from schemas.exchange import SESSION_PATTERN, SLO_MS_MAX, Priority
from schemas.http import (
    H_DEBUG,
    H_DECISION,
    H_PRIORITY,
    H_REGION,
    H_REQUEST_ID,
    H_RESIDENCY,
    H_SESSION,
    H_SLO_TTFT_MS,
    H_TIMEOUT_S,
    ONCE_ONLY,
    OWN_PREFIX,
    RESPONSES,
    SESSION_FIELD,
    SESSION_HEADERS,
    Fault,
)
from schemas.ids import MODEL_CHARS_MAX, ModelId, RequestId, is_request_id
from schemas.problems import did_you_mean
from schemas.request_headers import CONTENT_TYPE, ENGINE_HEADERS, fits
from schemas.residency import Labels, parse_labels
from schemas.response_calls import ResponseCall
from schemas.response_ids import ResponsePlace, place_of

BODIES_BYTES_MAX = 512 * 1024 * 1024
SMALL_BYTES = 1024 * 1024  # ten times what a prompt of 25,000 tokens takes
FOR_SMALL_BYTES = 64 * 1024 * 1024
PREVIOUS = "previous_response_id"
ADAPTER = "lora_path"  # SGLang's: adapters that answer in place of the model
# What is read of a body here.
IN_BODY = frozenset({"user", "cache_salt", SESSION_FIELD, PREVIOUS, ADAPTER})
SALT_CHARS_MAX = 256  # kept; a longer one is known by its hash
_FALSE = frozenset(("0", "false", "f", "no", "n", "off"))  # to pydantic, by which engines read
DIGITS_MAX = 7  # of SLO_MS_MAX; a longer text is not worth reading
_SESSION = re.compile(SESSION_PATTERN)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Read from headers and body. `salt`: shares prefixes only with prompts of the same one.

    `debug`: the answer is to bring the decision receipt.
    """

    priority: Priority = Priority.NORMAL
    slo_ttft_s: float | None = None
    session: str | None = None
    salt: str = ""
    debug: bool = False
    residency: Labels = ()  # what the request itself requires


DEFAULT_OPTIONS = RequestOptions()
OPTION_HEADERS = frozenset(
    {H_PRIORITY, H_SLO_TTFT_MS, H_SESSION, *SESSION_HEADERS, H_DEBUG, H_RESIDENCY, H_TIMEOUT_S}
)
TIMEOUT_S_MAX = 3600.0
REQUEST_ID_BYTES = 16  # of one that the router makes
LowerHeaders = Mapping[str, str]  # names in lower case


class BodyBudget:
    """Bytes of bodies and prompts in memory, against a limit."""

    def __init__(
        self, limit_bytes: int = BODIES_BYTES_MAX, for_small_bytes: int = FOR_SMALL_BYTES
    ) -> None:
        self._limit_bytes = limit_bytes
        self._for_small_bytes = for_small_bytes
        self.taken_bytes = 0

    def take(self, more: int, so_far: int = 0) -> bool:
        """Take room for `more` bytes of a body that has `so_far`. False, and nothing taken, if
        there is none."""
        limit = self._limit_bytes
        if so_far + more > SMALL_BYTES:
            limit -= self._for_small_bytes
        if self.taken_bytes + more > limit:
            return False
        self.taken_bytes += more
        return True

    def has_half(self, more: int) -> bool:
        """Whether half of it is free after so much more."""
        return self.taken_bytes + more <= self._limit_bytes // 2

    @property
    def is_full(self) -> bool:
        """Whether even a small body may be refused."""
        return self.taken_bytes + SMALL_BYTES > self._limit_bytes

    def settle(self, taken: int, actual: int) -> None:
        """Charge a request that is whole for what is kept of it, instead of what was taken."""
        self.taken_bytes += actual - taken

    def give_back(self, taken: int) -> None:
        """A body is not needed any more."""
        self.taken_bytes -= taken
        assert self.taken_bytes >= 0, "more was given back than taken"


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The fields that the router reads. Values are plain: they cross to another process.

    `adds_usage`: it asks for a stream (`streams`) without token counts, for which an agent may ask.
    `model_place`: of a large body alone, as others are searched at need.
    """

    model: str
    options: Mapping[str, str]  # the fields that options are read from, those that are text
    text: PromptText
    adds_usage: bool = False
    streams: bool = False
    model_place: ModelPlace | None = None


@dataclass(slots=True)
class ParsedRequest:
    """What a client sent, read and checked."""

    request_id: RequestId
    path: str
    body: bytes
    fields: BodyFields  # as the client wrote them
    model: ModelId  # that serves it
    timeout_s: float | None
    options: RequestOptions = DEFAULT_OPTIONS
    kept_bytes: int = 0  # of the budget
    for_engine: Mapping[str, str] | None = None  # headers, by their names on the bus
    previous: ResponsePlace | None = None  # of the response that it goes on with, or is about
    model_place: ModelPlace | None = None  # as in BodyFields
    call: ResponseCall | None = None  # about a response, with neither a model nor a body


def read_fields(path: str, body: bytes, content_type: str = "") -> BodyFields:
    """Read a whole body of that content-type, sent to that path.

    Raises RequestRefused for anything that an engine should not see. Holds the interpreter for up
    to seconds where a body is large.
    """
    route = engine_route(path)
    is_form = content_type[: len(FORM)].lower() == FORM
    if not (route.takes_form if is_form else route.takes_json):
        raise RequestRefused(
            Fault.INVALID, f"{path} takes {'a JSON object' if is_form else FORM}", CONTENT_TYPE
        )
    fields = _form(content_type, body) if is_form else _json_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        raise RequestRefused(
            Fault.INVALID, "model must be the name of a model, as a string", "model"
        )
    stream = fields.get("stream")
    if not isinstance(stream, bool | None):
        raise RequestRefused(Fault.INVALID, "stream must be true or false", "stream")
    try:
        text = text_at(path, fields, len(body))
    except PromptInvalid as error:
        fault = Fault.STATE_GONE if isinstance(error, StateUnknown) else Fault.INVALID
        raise RequestRefused(fault, str(error), error.param) from error
    there = IN_BODY.intersection(fields)  # mostly none
    options = {name: given for name in there if isinstance(given := fields[name], str)}
    if ADAPTER in there and (adapters := fields[ADAPTER]) and ADAPTER not in options:
        options[ADAPTER] = str(adapters)[:MODEL_CHARS_MAX]  # a list: no model's name
    adds_usage = (
        stream is True
        and path in STREAM_OPTIONS_PATHS
        and ("stream_options" not in fields or _wants_no_usage(fields["stream_options"]))
    )
    return BodyFields(model, options, text, adds_usage, stream is True)


def _wants_no_usage(options: object) -> bool:
    """Whether a stream with these options has no token counts, and one event more, no other change,
    if the engine is asked for them. Without `include_usage` that is up to the engine: vLLM has true
    for it, and reads words for true and false. `continuous_usage_stats` has SGLang put counts into
    other events."""
    if not isinstance(options, dict):
        return options is None
    others = (value for name, value in options.items() if name != "include_usage")
    wanted = options.get("include_usage", True)
    is_off = wanted in (None, False) or str(wanted).lower() in _FALSE
    return is_off and not any(others)


def _form(content_type: str, body: bytes) -> dict[str, Any]:
    try:
        return {"model": form_model(content_type, body)}
    except FormInvalid as error:
        raise RequestRefused(Fault.INVALID, str(error), error.param) from error


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(Fault.INVALID, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestRefused(Fault.INVALID, "the body must be a JSON object")
    return fields


class RequestReader:
    """Reads and checks requests that came whole."""

    def __init__(self, bodies: BodyBudget, count: Callable[[str], None] = lambda why: None) -> None:
        """`count` is called with why a request can't be read: the code of the fault."""
        self.bodies, self._count = bodies, count

    def read(
        self, path: str, headers: LowerHeaders, body: bytes, known_id: RequestId, charged: int = 0
    ) -> ParsedRequest:
        """Check a request, and charge the budget for what is kept of it.

        `charged`: bytes of it that the budget was charged before. Raises RequestRefused for
        anything that an engine should not see; then nothing stays charged.
        """
        try:
            if not charged:
                if not self.bodies.take(len(body)):
                    raise no_room()
                charged = len(body)
            fields = read_fields(path, body, headers.get(CONTENT_TYPE, ""))
            parsed = parsed_request(path, headers, body, fields, known_id)
        except BaseException as error:
            self.refused(error, charged)
            raise
        self.bodies.settle(charged, parsed.kept_bytes)
        return parsed

    def refused(self, error: BaseException, charged: int) -> None:
        """A request can't be read: give back what the budget was charged for it."""
        self.bodies.give_back(charged)
        if isinstance(error, RequestRefused):
            self._count(error.fault.value.code)


def parsed_request(
    path: str, headers: LowerHeaders, body: bytes, fields: BodyFields, known_id: RequestId
) -> ParsedRequest:
    """The request of these headers and fields. Raises RequestRefused for an unreadable option."""
    options, timeout = DEFAULT_OPTIONS, None
    if fields.options or not OPTION_HEADERS.isdisjoint(headers):  # mostly there are none
        options, timeout = read_options(headers, fields.options), timeout_s(headers)
    kept_bytes = len(body) + len(fields.text.data)
    previous = fields.options.get(PREVIOUS) if path == RESPONSES else None
    of_engine = None if path in PLAIN_PATHS else headers_for_engine(path, headers)
    return ParsedRequest(
        known_id,
        path,
        body,
        fields,
        ModelId(fields.model),
        timeout,
        options,
        kept_bytes,
        of_engine,
        None if previous is None else place_of(previous),
        fields.model_place,
    )


def headers_for_engine(path: str, headers: LowerHeaders) -> dict[str, str]:
    """Those of a client's headers that the engine is to have, by their names on the bus.

    Raises RequestRefused for one of another form: left out, the engine would answer otherwise.
    """
    route, found = engine_route(path), {}
    names = (CONTENT_TYPE, *route.headers) if route.takes_form else route.headers
    for name in names:
        text = headers.get(name)
        if text is None or (name == CONTENT_TYPE and not text.lower().startswith(FORM)):
            continue
        header = ENGINE_HEADERS[name]
        if not fits(name, text):
            message = f"{name} must have the form {header.pattern}, up to {header.chars_max} long"
            raise RequestRefused(Fault.INVALID, message, name)
        found[header.on_bus] = text
    return found


def no_room() -> RequestRefused:
    """The error for a body beyond the limit on all."""
    return RequestRefused(Fault.SATURATED, "this router holds as many bytes of requests as it may")


def read_options(headers: Mapping[str, str], fields: Mapping[str, Any]) -> RequestOptions:
    """The options of a request; names of headers in lower case. Raises RequestRefused."""
    return RequestOptions(
        _priority(headers.get(H_PRIORITY)),
        _slo_s(headers.get(H_SLO_TTFT_MS)),
        _session(_named_session(headers, fields)),
        salt_of(fields),
        _debug(headers.get(H_DEBUG)),
        _residency(headers.get(H_RESIDENCY)),
    )


def request_id(headers: Mapping[str, str]) -> RequestId:
    """The client's own id if it is fit to be kept, else a new one."""
    given = headers.get(H_REQUEST_ID)
    if given is not None and is_request_id(given):
        return RequestId(given)
    return RequestId(os.urandom(REQUEST_ID_BYTES).hex())


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """How long the request may take, in seconds; None for the router's limit."""
    given = headers.get(H_TIMEOUT_S)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not 0.0 < seconds <= TIMEOUT_S_MAX:
        message = f"{H_TIMEOUT_S} must be seconds, more than 0 and at most {TIMEOUT_S_MAX:g}"
        raise RequestRefused(Fault.INVALID, message, H_TIMEOUT_S)
    return seconds


def salt_of(fields: Mapping[str, Any]) -> str:
    """vLLM's `cache_salt` in a body; empty for none. A hash of one that is too long to keep."""
    salt = fields.get("cache_salt")
    if not isinstance(salt, str):
        return ""
    if len(salt) <= SALT_CHARS_MAX:
        return salt
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()


PRIORITIES = tuple(Priority)


def _priority(given: str | None) -> Priority:
    if given is None:
        return Priority.NORMAL
    try:
        return Priority(given)
    except ValueError as error:
        message = f"{H_PRIORITY} must be {', '.join(PRIORITIES[:-1])} or {PRIORITIES[-1]}"
        raise RequestRefused(Fault.INVALID, message, H_PRIORITY) from error


def _slo_s(given: str | None) -> float | None:
    if given is None:
        return None
    plain = given.isascii() and given.isdigit() and len(given) <= DIGITS_MAX
    if not plain or not 1 <= int(given) <= SLO_MS_MAX:
        message = f"{H_SLO_TTFT_MS} must be whole milliseconds, from 1 to {SLO_MS_MAX}"
        raise RequestRefused(Fault.INVALID, message, H_SLO_TTFT_MS)
    return int(given) / 1000


def _debug(given: str | None) -> bool:
    if given not in (None, "0", "1"):
        message = f"{H_DEBUG} must be 1, for the decision receipt, or 0"
        raise RequestRefused(Fault.INVALID, message, H_DEBUG)
    return given == "1"


def _residency(given: str | None) -> Labels:
    if given is None:
        return ()
    try:
        return parse_labels(given)
    except ValueError as error:
        raise RequestRefused(Fault.INVALID, f"{H_RESIDENCY}: {error}", H_RESIDENCY) from error


def _named_session(headers: Mapping[str, str], fields: Mapping[str, Any]) -> str:
    """The first name of a conversation that is given; empty without one."""
    if named := headers.get(H_SESSION):
        return named
    if isinstance(key := fields.get(SESSION_FIELD), str) and key:
        return key
    for name in SESSION_HEADERS:
        if named := headers.get(name):
            return named
    return user if isinstance(user := fields.get("user"), str) else ""


def _session(given: str) -> str | None:
    """As given where that fits a header of ours, else a hash of it: equal names stay equal."""
    if not given or _SESSION.fullmatch(given):
        return given or None
    return xxhash.xxh3_128_hexdigest(given.encode("utf-8", "surrogatepass"))


_KNOWN = tuple(name for name in ONCE_ONLY if name.startswith(OWN_PREFIX))
_OF_ANSWERS = frozenset({H_REGION, H_DECISION})
may_be_own = re.compile(r"x?[^a-z0-9]*mesh", re.IGNORECASE).match  # for every header: cheap
_OWN = re.compile(r"x[^a-z0-9]*mesh[^a-z0-9]+(.*)")
_SEPARATORS = re.compile(r"[^a-z0-9]+")


def are_known(names: Iterable[str]) -> bool:
    """Whether no header looks like one of the mesh's without being one."""
    return all(name in _KNOWN for name in filter(may_be_own, names))


def check_header_names(names: Iterable[str]) -> None:
    """Raise RequestRefused for a header that looks like one of the mesh's and is none."""
    for given in filter(may_be_own, names):
        if (meant := _meant(name := given.lower())) is not None:
            raise RequestRefused(Fault.INVALID, _unknown(name, meant), name)


def check_given_once(lines: Mapping[str, list[str]]) -> None:
    """Raise RequestRefused for a header that the router acts on and that is there twice. `lines`:
    all values of each, by names in lower case."""
    for name in ONCE_ONLY:
        times = len(lines.get(name, ()))
        if times > 1:
            message = f"{name} is given {times} times; give it once"
            raise RequestRefused(Fault.INVALID, message, name)


def _meant(name: str) -> str | None:
    """The header of ours that this unknown name looks like, whatever its separators; else None."""
    if name in _KNOWN:
        return None
    if (own := _OWN.match(name)) is not None:
        return OWN_PREFIX + _SEPARATORS.sub("-", own[1]).strip("-")
    squeezed = "x" + _SEPARATORS.sub("", name).removeprefix("x")
    return next((known for known in _KNOWN if known.replace("-", "") == squeezed), None)


def _unknown(name: str, meant: str) -> str:
    if name in _OF_ANSWERS:
        return f"{name} is a header of answers; leave it out"
    return f"unknown header {name:.60}{did_you_mean(meant, _KNOWN, prefix=OWN_PREFIX)}"
