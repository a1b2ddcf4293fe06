"""The headers of a work message, read strictly: unreadable ones are refused as BAD_WORK, so that a
router learns of its mistake at once. The path must be in a fixed list, so that no bus user reaches
an engine's administrative endpoints through its agent: one of the table of routes, or one that the
agent's operator lists (`EngineLoad.serves`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from agents.core.kv_stages import KvStage, StageInvalid, parse_stage
from agents.core.routers import HandoffNumber
from schemas import subjects
from schemas.engine_routes import GENERATING_PATHS, PLAIN_PATHS
from schemas.exchange import (
    BODY_BYTES_MAX,
    H_BODY_BYTES,
    H_CALL,
    H_CONTINUES,
    H_DEADLINE_MS,
    H_FROM,
    H_HANDOFF,
    H_MAY_QUEUE,
    H_MODEL,
    H_OFFLINE,
    H_OWNER,
    H_PATH,
    H_PREFILL_TOKENS,
    H_REQUEST,
    H_RESIDENCY,
    H_STAGE,
    H_TERM,
    H_WINDOW,
    WINDOW_BYTES,
    WINDOW_BYTES_MIN,
)
from schemas.ids import (
    ModelId,
    NameInvalid,
    RegionId,
    RouterId,
    checked_name,
    is_path,
    is_request_id,
)
from schemas.kv_transfer import KvRole
from schemas.residency import Labels, parse_labels
from schemas.response_calls import ResponseCall, parse_call

V = TypeVar("V")
DEADLINE_S_DEFAULT = 600.0  # a work message without a deadline must not live for ever
DEADLINE_S_MAX = 3600.0
# Any honest number is shorter; int() of a huge text is slow.
_is_number = re.compile("[0-9]{1,15}").fullmatch


class BadWork(ValueError):
    """A work message that can't be served; the message says which header is wrong."""


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """The headers of one readable work message. `body_bytes` is set when its body comes in parts.

    `prefill_tokens`: prompt tokens to be computed here, by the router's estimate, if it gave one.
    """

    model: ModelId
    path: str
    request_id: str
    deadline_s: float  # time left on arrival; 0 means that none is left
    body_bytes: int | None
    prefill_tokens: int | None = None
    may_queue: bool = False  # to be taken though other work is pending
    residency: Labels = ()  # only where one of these labels holds; empty: anywhere
    offline: bool = False  # a line of a batch job: takes what online requests leave
    owner: RegionId | None = None  # whose router hands it over, if it has adopted the replica
    term: int | None = None  # of the lease that it is handed over under, if there is one
    stage: KvStage | None = None  # of a pair's two, the one that this engine computes
    continues: bool = False  # goes on with its last message, which is the assistant's
    call: ResponseCall | None = None  # about a response that the engine keeps: of whatever model
    first_window: int = WINDOW_BYTES  # bytes of the answer that may go before the first credit

    @property
    def generates(self) -> bool:
        """Whether its answer is tokens, and not only a computed prompt."""
        return self.path in GENERATING_PATHS

    @property
    def is_odd(self) -> bool:
        """Whether its answer is no example of what clients' answers take of the engine."""
        return not self.generates or self.is_prefill

    @property
    def role(self) -> KvRole | None:
        """The stage that is computed here; None for all of it."""
        return None if self.stage is None else self.stage.role

    @property
    def is_prefill(self) -> bool:
        """Whether only its prompt is computed here, for a decode engine."""
        return self.role is KvRole.PREFILL

    @property
    def is_decode(self) -> bool:
        """Whether its prompt was computed elsewhere."""
        return self.role is KvRole.DECODE


def parse_work(headers: Mapping[str, str], body: bytes) -> WorkRequest:
    """The work described by `headers`. Raises BadWork if it can't be served."""
    path = headers.get(H_PATH, "")
    if not is_path(path):
        raise BadWork(f"{H_PATH} {path[:80]!r} is no path of an engine's route")
    request_id = headers.get(H_REQUEST, "")
    known_id = request_id if is_request_id(request_id) else ""
    call = _optional(headers, H_CALL, parse_call) if H_CALL in headers else None
    path, parts = (path, _body_bytes(headers)) if call is None else (call.path, None)
    if parts is None and not body and call is None:
        raise BadWork("an empty body")
    try:
        model = subjects.decode_model(headers.get(H_MODEL, ""))
    except ValueError as error:
        raise BadWork(f"{H_MODEL}: {error}"[:300]) from error
    return WorkRequest(
        model=model if call is None else ModelId(""),
        path=path,
        deadline_s=_deadline_s(headers),
        body_bytes=parts,
        prefill_tokens=_number(headers.get(H_PREFILL_TOKENS, "")),
        may_queue=headers.get(H_MAY_QUEUE) == "1",
        residency=_residency(headers) if H_RESIDENCY in headers else (),
        offline=headers.get(H_OFFLINE) == "1",
        continues=headers.get(H_CONTINUES) == "1",
        owner=_owner(headers) if H_OWNER in headers else None,
        term=_number(headers.get(H_TERM, "")),
        stage=_stage(headers, path) if H_STAGE in headers else None,
        request_id=known_id,
        call=call,
        first_window=_first_window(headers) if H_WINDOW in headers else WINDOW_BYTES,
    )


def parse_handoff(headers: Mapping[str, str]) -> HandoffNumber | None:
    """The router's hand-off number, or None when the headers have none that is readable."""
    number = _number(headers.get(H_HANDOFF, ""))
    try:
        owner = _owner(headers) if H_OWNER in headers else None
        router = checked_name("router", headers.get(H_FROM, ""))
    except (NameInvalid, BadWork):
        return None
    return None if number is None else HandoffNumber(RouterId(router), number, owner)


def _optional(headers: Mapping[str, str], name: str, read: Callable[[str], V]) -> V | None:
    """What `read` makes of that header, which raises ValueError; None if there is none."""
    text = headers.get(name)
    try:
        return None if text is None else read(text)
    except ValueError as error:
        raise BadWork(f"{name}: {error}"[:300]) from error


def _residency(headers: Mapping[str, str]) -> Labels:
    return _optional(headers, H_RESIDENCY, parse_labels) or ()


def _owner(headers: Mapping[str, str]) -> RegionId | None:
    return _optional(headers, H_OWNER, lambda name: RegionId(checked_name("region", name)))


def _stage(headers: Mapping[str, str], path: str) -> KvStage:
    if path not in PLAIN_PATHS:
        raise BadWork(f"{H_STAGE}: requests for {path[:80]!r} are not computed in stages")
    try:
        return parse_stage(headers)
    except StageInvalid as error:
        raise BadWork(str(error)) from error


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


def _first_window(headers: Mapping[str, str]) -> int:
    wanted = _number(headers[H_WINDOW])
    return WINDOW_BYTES if wanted is None else min(WINDOW_BYTES, max(WINDOW_BYTES_MIN, wanted))


def _body_bytes(headers: Mapping[str, str]) -> int | None:
    text = headers.get(H_BODY_BYTES)
    if text is None:
        return None
    size = _number(text)
    if size is None or not 0 < size <= BODY_BYTES_MAX:
        raise BadWork(f"{H_BODY_BYTES} {text[:40]!r} is not 1 to {BODY_BYTES_MAX}")
    return size


def _number(text: str) -> int | None:
    return int(text) if _is_number(text) else None
