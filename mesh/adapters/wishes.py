"""What a client may wish beside its prompt: to go first, to be in time, to stay together, to know.

A wish that can't be read is an error: served as if it had not been said, a client that believes
to have an objective would have none. Fields of the body are the engine's to judge, so one that is
no text is left to it.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from mesh.adapters.problem import Problem
from schemas.exchange import SESSION_PATTERN, SLO_MS_MAX, Priority
from schemas.http import (
    H_DEBUG,
    H_PRIORITY,
    H_RESIDENCY,
    H_SESSION,
    H_SLO_TTFT_MS,
    Fault,
)
from schemas.residency import Labels, parse_labels

IN_BODY = ("user", "cache_salt")  # what of a body is read here
SALT_CHARS_MAX = 256  # kept; a longer one is known by its hash
DIGITS_MAX = 7  # of SLO_MS_MAX; a longer text is not worth reading
_SESSION = re.compile(SESSION_PATTERN)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Read from headers and body. `salt`: shares prefixes only with prompts of the same one.

    `debug`: the answer is to bring the decision receipt.
    """

    priority: Priority = Priority.NORMAL
    slo_ttft_s: float | None = None
    session: str | None = None
    salt: str = ""
    debug: bool = False
    residency: Labels = ()  # what the request itself wants


NO_WISHES = Wishes()


def read_wishes(headers: Mapping[str, str], fields: Mapping[str, Any]) -> Wishes:
    """The wishes of a request. Raises Problem for a header that says nothing we know."""
    user = fields.get("user")
    return Wishes(
        _priority(headers.get(H_PRIORITY)),
        _slo_s(headers.get(H_SLO_TTFT_MS)),
        _session(headers.get(H_SESSION) or (user if isinstance(user, str) else "")),
        salt_of(fields),
        _debug(headers.get(H_DEBUG)),
        _residency(headers.get(H_RESIDENCY)),
    )


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
        raise Problem(Fault.INVALID, message, H_PRIORITY) from error


def _slo_s(given: str | None) -> float | None:
    if given is None:
        return None
    plain = given.isascii() and given.isdigit() and len(given) <= DIGITS_MAX
    if not plain or not 1 <= int(given) <= SLO_MS_MAX:
        message = f"{H_SLO_TTFT_MS} must be whole milliseconds, from 1 to {SLO_MS_MAX}"
        raise Problem(Fault.INVALID, message, H_SLO_TTFT_MS)
    return int(given) / 1000


def _debug(given: str | None) -> bool:
    if given not in (None, "0", "1"):
        message = f"{H_DEBUG} must be 1, for the decision receipt, or 0"
        raise Problem(Fault.INVALID, message, H_DEBUG)
    return given == "1"


def _residency(given: str | None) -> Labels:
    if given is None:
        return ()
    try:
        return parse_labels(given)
    except ValueError as error:
        raise Problem(Fault.INVALID, f"{H_RESIDENCY}: {error}", H_RESIDENCY) from error


def _session(given: str) -> str | None:
    """As given where that fits a header of ours, else a hash of it: equal names stay equal."""
    if not given or _SESSION.fullmatch(given):
        return given or None
    return xxhash.xxh3_128_hexdigest(given.encode("utf-8", "surrogatepass"))
