"""What a client's headers, and two fields of its body, say about how to serve the request.

An option that can't be read is an error: ignored, it would leave a client without the deadline or
the residency that it believes to have. Fields of the body are the engine's to judge, so one that
is no text is left to it.

Headers that the router acts on are given once and spelled right. A proxy may join the lines of a
repeated header with a comma (RFC 9110, 5.3): two lines of labels, both required, would become a
list of alternatives. A misspelt `x-mesh-` header would be ignored, and a prompt that was to stay in
a region would go anywhere. Both are 400. Separators count as spelling, because proxies and CGI turn
hyphens into underscores and back.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash
from multidict import MultiMapping

from mesh.core.model.geo import GeoLocation, parse_location
from schemas.exchange import SESSION_PATTERN, SLO_MS_MAX, Priority
from schemas.http import (
    H_CLIENT_LOCATION,
    H_DEBUG,
    H_DECISION,
    H_PRIORITY,
    H_REGION,
    H_REQUEST_ID,
    H_RESIDENCY,
    H_SESSION,
    H_SLO_TTFT_MS,
    H_TIMEOUT_S,
    NEAR,
    ONCE_ONLY,
    OWN_PREFIX,
    Fault,
)
from schemas.ids import RequestId, is_request_id
from schemas.problems import did_you_mean
from schemas.residency import Labels, parse_labels


class RequestRefused(Exception):
    """The router won't serve this request; `message` says what to change.

    `param` names the field or header at fault. `headers` go with the answer, beside those of every
    error.
    """

    def __init__(
        self,
        fault: Fault,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.fault, self.message, self.param = fault, message, param
        self.headers = dict(headers or {})


IN_BODY = ("user", "cache_salt")  # what of a body is read here
SALT_CHARS_MAX = 256  # kept; a longer one is known by its hash
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
    {H_PRIORITY, H_SLO_TTFT_MS, H_SESSION, H_DEBUG, H_RESIDENCY, H_TIMEOUT_S}
)
TIMEOUT_S_MAX = 3600.0
REQUEST_ID_BYTES = 16  # of one that the router makes


def read_options(headers: Mapping[str, str], fields: Mapping[str, Any]) -> RequestOptions:
    """The options of a request; names of headers in lower case. Raises RequestRefused."""
    user = fields.get("user")
    return RequestOptions(
        _priority(headers.get(H_PRIORITY)),
        _slo_s(headers.get(H_SLO_TTFT_MS)),
        _session(headers.get(H_SESSION) or (user if isinstance(user, str) else "")),
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


def check_given_once(headers: MultiMapping[str]) -> None:
    """Raise RequestRefused for a header that the router acts on and that is there twice."""
    for name in ONCE_ONLY:
        times = len(headers.getall(name, ()))
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


def client_location(query: MultiMapping[str], headers: Mapping[str, str]) -> GeoLocation | None:
    """Where the client is, by the query `near` or else by a header; None where neither says so.

    Raises RequestRefused for what is no location, and for a query of another name: ignored, it
    would make another region the nearest.
    """
    for name in query:
        if name != NEAR:
            words = f"unknown query parameter {name!r:.60}{did_you_mean(name, (NEAR,))}"
            raise RequestRefused(Fault.INVALID, words, name[:60])
    if len(query.getall(NEAR, ())) > 1:
        raise RequestRefused(Fault.INVALID, f"{NEAR} is given more than once", NEAR)
    for given, name in (
        (query.get(NEAR), NEAR),
        (headers.get(H_CLIENT_LOCATION), H_CLIENT_LOCATION),
    ):
        if given is not None:
            try:
                return parse_location(given)
            except ValueError as error:
                raise RequestRefused(Fault.INVALID, f"{name}: {error}", name) from error
    return None
