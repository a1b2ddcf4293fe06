"""The headers of one work message, read strictly.

Whatever is unreadable is refused as BAD_WORK, so that a router learns of its mistake at once.
The path is checked against a fixed list: a bus user must not be able to reach an engine's
administrative endpoints through its agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas import subjects
from schemas.exchange import (
    BODY_BYTES_MAX,
    H_BODY_BYTES,
    H_DEADLINE_MS,
    H_FROM,
    H_HANDOFF,
    H_MAY_QUEUE,
    H_MODEL,
    H_OWNER,
    H_PATH,
    H_PREFILL_TOKENS,
    H_REQUEST,
    H_RESIDENCY,
    H_TERM,
    H_WARM,
)
from schemas.http import ENGINE_PATHS
from schemas.ids import ModelId, NameInvalid, RegionId, RouterId, checked_name, is_request_id
from schemas.residency import Labels, parse_labels

DEADLINE_S_DEFAULT = 600.0  # a work message without a deadline must not live for ever
DEADLINE_S_MAX = 3600.0
DIGITS_MAX = 15  # any honest number of ours is shorter; int() of a huge text is slow


class BadWork(ValueError):
    """A work message that can't be served; the message says which header is wrong."""


@dataclass(frozen=True, slots=True)
class Work:
    """One readable work message. `body_bytes` is set when the body is to be fetched in parts.

    `prefill_tokens`: of its prompt, to be computed here; None when the router did not say.
    """

    model: ModelId
    path: str
    request_id: str
    deadline_s: float  # time left on arrival; 0 means that none is left
    body_bytes: int | None
    prefill_tokens: int | None = None
    may_queue: bool = False  # to be taken though other work is pending
    residency: Labels = ()  # only where one of these is carried; empty: anywhere
    warm: bool = False  # nobody asks for it: it is no example of what is asked here


@dataclass(frozen=True, slots=True)
class Handoff:
    """Which router sent a work message, and its running number there."""

    router: RouterId
    number: int
    owner: RegionId | None = None  # its region, where it has adopted the replica


def parse_work(headers: Mapping[str, str], body: bytes) -> Work:
    """The work described by `headers`. Raises BadWork if it can't be served."""
    path = headers.get(H_PATH, "")
    if path not in ENGINE_PATHS:
        raise BadWork(f"{H_PATH} {path!r} is none of {', '.join(sorted(ENGINE_PATHS))}"[:300])
    parts = _body_bytes(headers)
    if parts is None and not body:
        raise BadWork("an empty body")
    request_id = headers.get(H_REQUEST, "")
    return Work(
        model=_model(headers),
        path=path,
        request_id=request_id if is_request_id(request_id) else "",
        deadline_s=_deadline_s(headers),
        body_bytes=parts,
        prefill_tokens=_number(headers.get(H_PREFILL_TOKENS, "")),
        may_queue=headers.get(H_MAY_QUEUE) == "1",
        residency=_residency(headers),
        warm=headers.get(H_WARM) == "1",
    )


def parse_handoff(headers: Mapping[str, str]) -> Handoff | None:
    """Who handed this over, or None when the headers don't say it legibly."""
    number = _number(headers.get(H_HANDOFF, ""))
    try:
        router = checked_name("router", headers.get(H_FROM, ""))
        owner = parse_owner(headers)
    except (NameInvalid, BadWork):
        return None
    return None if number is None else Handoff(RouterId(router), number, owner)


def parse_owner(headers: Mapping[str, str]) -> RegionId | None:
    """The region that hands this over by having adopted the replica; None for the replica's own.

    Raises BadWork for a name that is none.
    """
    owner = headers.get(H_OWNER)
    try:
        return None if owner is None else RegionId(checked_name("region", owner))
    except NameInvalid as error:
        raise BadWork(f"{H_OWNER}: {error}"[:300]) from error


def parse_term(headers: Mapping[str, str]) -> int | None:
    """The term of the lease that this is handed over under, if there is one."""
    return _number(headers.get(H_TERM, ""))


def _model(headers: Mapping[str, str]) -> ModelId:
    try:
        return subjects.decode_model(headers.get(H_MODEL, ""))
    except ValueError as error:
        raise BadWork(f"{H_MODEL}: {error}"[:300]) from error


def _residency(headers: Mapping[str, str]) -> Labels:
    text = headers.get(H_RESIDENCY)
    try:
        return () if text is None else parse_labels(text)
    except ValueError as error:  # whoever can't be understood may have wanted other ground
        raise BadWork(f"{H_RESIDENCY}: {error}"[:300]) from error


def _deadline_s(headers: Mapping[str, str]) -> float:
    text = headers.get(H_DEADLINE_MS)
    if text is None:
        return DEADLINE_S_DEFAULT
    if text.startswith("-") and _number(text[1:]) is not None:
        return 0.0
    left_ms = _number(text)
    if left_ms is None:
        raise BadWork(f"{H_DEADLINE_MS} {text[:40]!r} is not a number of milliseconds")
    return min(left_ms / 1000, DEADLINE_S_MAX)


def _body_bytes(headers: Mapping[str, str]) -> int | None:
    text = headers.get(H_BODY_BYTES)
    if text is None:
        return None
    size = _number(text)
    if size is None or not 0 < size <= BODY_BYTES_MAX:
        raise BadWork(f"{H_BODY_BYTES} {text[:40]!r} is not 1 to {BODY_BYTES_MAX}")
    return size


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        return None
    return int(text)
