"""One request's life at the agent: the headers of its work message, its record, and its states.

The table is the only writer of records. Beside its state a record has `aborted`: its relay is
being stopped, and ends soon.

    state      entered by       then
    RECEIVING  `add`            its body comes in parts; `send`, or `remove` when one is missing
    ACCEPTED   `add`, `queue`   its body is whole; `send`, or `remove` when no time is left
    SENT       `send`           the engine has it; `begin`, or `settle` when it ends without a byte
    ANSWERING  `begin`          its first byte came
    SETTLED    `settle`         it no longer waits for the engine, and its body is released
    (gone)     `remove`         its END or REFUSED frame is out

Parts of a body come over one connection, so NATS keeps their order; a hole means that the bus
dropped a part, and the body is lost: the router still has all of it and places the request again.

Headers are read strictly: unreadable ones are refused as BAD_WORK, so that a router learns of its
mistake at once. The path must be in a fixed list, so that no bus user reaches an engine's
administrative endpoints through its agent: one of the table of routes, or one that the agent's
operator lists (`EngineLoad.serves`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TypeVar

from agents.core.effects import StartRelay
from agents.core.engine_load import PrefillLine, ScrapeCounters
from agents.core.events import RouterKey
from agents.core.kv_stages import KvStage, StageInvalid, parse_stage
from agents.core.routers import HandoffNumber
from schemas import subjects
from schemas.engine_routes import GENERATING_PATHS, PLAIN_PATHS
from schemas.exchange import (
    BODY_BYTES_MAX,
    H_BODY_BYTES,
    H_CALL,
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
    H_WARM,
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
DIGITS_MAX = 15  # any honest number is shorter; int() of a huge text is slow
BYTES_PER_TOKEN = 4  # of a prompt without an estimate
# Bodies of requests without a first byte are held in memory, here or in the HTTP client.
HELD_BYTES_MAX = 256 * 1024 * 1024
PART_TIMEOUT_S = 10.0  # since the part before; the slowest link moves a part in well under 1 s


class BadWork(ValueError):
    """A work message that can't be served; the message says which header is wrong."""


class BodyLost(ValueError):
    """The parts don't make the announced body; the message says why."""


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
    warm: bool = False  # a warm-up: no example of what clients request
    offline: bool = False  # a line of a batch job: takes what online requests leave
    owner: RegionId | None = None  # whose router hands it over, if it has adopted the replica
    term: int | None = None  # of the lease that it is handed over under, if there is one
    stage: KvStage | None = None  # of a pair's two, the one that this engine computes
    call: ResponseCall | None = None  # about a response that the engine keeps: of whatever model

    @property
    def generates(self) -> bool:
        """Whether its answer is tokens, and not only a computed prompt."""
        return self.path in GENERATING_PATHS

    @property
    def is_odd(self) -> bool:
        """Whether its answer is no example of what clients' answers take of the engine."""
        return self.warm or not self.generates or self.is_prefill

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
    call = _optional(headers, H_CALL, parse_call)
    path, parts = (path, _body_bytes(headers)) if call is None else (call.path, None)
    if parts is None and not body and call is None:
        raise BadWork("an empty body")
    request_id = headers.get(H_REQUEST, "")
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
        residency=_optional(headers, H_RESIDENCY, parse_labels) or (),
        warm=headers.get(H_WARM) == "1",
        offline=headers.get(H_OFFLINE) == "1",
        owner=_owner(headers),
        term=_number(headers.get(H_TERM, "")),
        stage=_stage(headers, path) if H_STAGE in headers else None,
        request_id=request_id if is_request_id(request_id) else "",
        call=call,
    )


def parse_handoff(headers: Mapping[str, str]) -> HandoffNumber | None:
    """The router's hand-off number, or None when the headers have none that is readable."""
    number = _number(headers.get(H_HANDOFF, ""))
    try:
        owner = _owner(headers)
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


class AgentRequestState(Enum):
    """Where a request is in its life."""

    RECEIVING = "receiving"
    ACCEPTED = "accepted"
    SENT = "sent"
    ANSWERING = "answering"
    SETTLED = "settled"


_NEXT = {
    AgentRequestState.RECEIVING: (AgentRequestState.SENT, AgentRequestState.ACCEPTED),
    AgentRequestState.ACCEPTED: (AgentRequestState.SENT,),
    AgentRequestState.SENT: (AgentRequestState.ANSWERING, AgentRequestState.SETTLED),
    AgentRequestState.ANSWERING: (),
    AgentRequestState.SETTLED: (),
}


@dataclass(slots=True)
class AgentRequest:
    """One request. Times are None until they happen."""

    inbox: str
    router: RouterKey
    work: WorkRequest
    headers: Mapping[str, str]
    body_bytes: int
    taken_at: float
    state: AgentRequestState = AgentRequestState.ACCEPTED
    sent_at: float | None = None  # to the engine
    began_at: float | None = None  # its first byte
    alone: bool = False  # when it was sent, no other request waited for its first byte
    aborted: bool = False
    parts: list[bytes] = field(default_factory=list)
    part_bytes: int = 0  # of all parts that arrived
    last_part_at: float = -inf
    answer_tokens: int | None = None  # at most, of a plain answer; where cut ones count
    prompt_tokens: int = 0  # to be computed: the router's estimate, else by the size of its body

    def first_token_at(self, *, streamed: bool) -> float | None:
        """None where that doesn't show. The one token of a prefill stage is its first."""
        return self.began_at if streamed or self.work.is_prefill else None

    @property
    def waits_for_other(self) -> bool:
        """Whether its first byte may depend on another engine: it has no cache, or nobody has come
        for one."""
        stage = self.work.stage
        return stage is not None and (self.work.is_decode or stage.prefill_address is not None)

    def relay(self, body: bytes) -> StartRelay:
        """What sends it to the engine, with its whole body."""
        work = self.work
        about = self.headers, work.stage, work.call
        return StartRelay(self.inbox, work.path, work.request_id, body, *about)


class RequestTable:
    """Requests taken from the bus and not ended, by inbox. The caller bounds their number."""

    def __init__(self) -> None:
        self.by_inbox: dict[str, AgentRequest] = {}  # only this class writes it
        # Beside the whole table, because they are few and every event needs them.
        self._waiting: dict[str, AgentRequest] = {}  # without a first byte, oldest first
        self._receiving: dict[str, AgentRequest] = {}
        self.counters = ScrapeCounters()
        self.held_bytes = 0
        self.at_engine = 0  # sent and not ended
        self._settled_at = -inf  # when one last ceased to wait
        self._due_at = inf  # no deadline passes before it

    def add(self, record: AgentRequest, now: float) -> None:
        inbox = record.inbox
        self.by_inbox[inbox] = self._waiting[inbox] = record
        self.held_bytes += record.body_bytes
        estimate = record.work.prefill_tokens
        record.prompt_tokens = (
            record.body_bytes // BYTES_PER_TOKEN if estimate is None else estimate
        )
        self._due_at = min(self._due_at, record.taken_at + record.work.deadline_s)
        if record.work.body_bytes is not None:
            record.state, record.last_part_at = AgentRequestState.RECEIVING, now
            self._receiving[inbox] = record

    def add_part(self, inbox: str, offset: int, data: bytes, now: float) -> bytes | None:
        """A part of a body arrived; returns the body once it is whole.

        Repeated parts, and parts that no request waits for, are ignored. Raises BodyLost for a hole
        and for more bytes than announced.
        """
        record = self._receiving.get(inbox)
        if record is None or offset < record.part_bytes:
            return None
        total, arrived = record.body_bytes, record.part_bytes
        if offset > arrived or offset + len(data) > total:
            raise BodyLost(f"part of {len(data)} bytes at {offset}, expected {arrived} of {total}")
        record.parts.append(data)
        record.part_bytes += len(data)
        record.last_part_at = now
        if record.part_bytes < total:
            return None
        body = b"".join(record.parts)
        record.parts.clear()
        return body

    def queue(self, record: AgentRequest) -> None:
        """Its body is whole and it is not sent yet."""
        if record.state is AgentRequestState.RECEIVING:
            self._enter(record, AgentRequestState.ACCEPTED)
            del self._receiving[record.inbox]

    def send(self, record: AgentRequest, now: float) -> None:
        self._enter(record, AgentRequestState.SENT)
        self._receiving.pop(record.inbox, None)
        record.sent_at = now
        record.alone = self.counters.waiting == 0
        self.at_engine += 1
        self.counters.sent(now)

    def begin(self, record: AgentRequest, now: float) -> None:
        if record.state is AgentRequestState.SENT:
            record.began_at = now
            self._settle(record, AgentRequestState.ANSWERING, now)

    def settle(self, record: AgentRequest, now: float) -> None:
        if record.state is AgentRequestState.SENT:
            self._settle(record, AgentRequestState.SETTLED, now)

    def abort(self, record: AgentRequest) -> bool:
        """Its relay is to be stopped; False if it was already."""
        was, record.aborted = record.aborted, True
        return not was

    def remove(self, record: AgentRequest) -> None:
        """Forget it, in any state but SENT: `settle` that first."""
        assert record.state is not AgentRequestState.SENT, "its relay has not ended"
        del self.by_inbox[record.inbox]
        self.at_engine -= record.sent_at is not None
        self._receiving.pop(record.inbox, None)
        if self._waiting.pop(record.inbox, None) is not None:
            self.held_bytes -= record.body_bytes

    def scraped(self, began_at: float, now: float) -> None:
        """A scrape of the engine that began then has arrived."""
        sent = (record.sent_at for record in self._waiting.values())
        self.counters.scraped(began_at, now, (at for at in sent if at is not None))

    def restart_clock(self, now: float) -> None:
        """No part could arrive until now: the wait for the next one counts from here on."""
        for record in self._receiving.values():
            record.last_part_at = now

    def overdue(self, now: float) -> list[AgentRequest]:
        if now < self._due_at:
            return []
        due = {
            inbox: record.taken_at + record.work.deadline_s
            for inbox, record in self.by_inbox.items()
        }
        self._due_at = min(due.values(), default=inf)
        return [self.by_inbox[inbox] for inbox, due_at in due.items() if due_at <= now]

    def without_next_part(self, now: float) -> list[AgentRequest]:
        """Those whose next part is overdue."""
        if not self._receiving:
            return []
        receiving = self._receiving.values()
        return [record for record in receiving if now - record.last_part_at >= PART_TIMEOUT_S]

    def waiting(self) -> Iterable[AgentRequest]:
        """Those without a first byte, in the order they were taken."""
        return self._waiting.values()

    def unanswered(self, at: float) -> list[float]:
        """When each request was sent that the engine had at that time, before its first byte. `at`:
        not before the last scrape began."""
        sent = (record.sent_at for record in self._waiting.values())
        waiting = [sent_at for sent_at in sent if sent_at is not None and sent_at <= at]
        return [*waiting, *self.counters.settled_after(at)]

    @property
    def longest_prompt_tokens(self) -> int:
        """Of those at the engine without a first byte."""
        if not self._waiting:
            return 0  # mostly, at a scrape
        sent = (record for record in self._waiting.values() if record.sent_at is not None)
        return max((record.prompt_tokens for record in sent), default=0)

    def prefill_queued_tokens(self, line: PrefillLine | None, now: float) -> int | None:
        """Prompt tokens that the engine still has to compute of requests taken: "two pending" may
        be a hundred tokens or a hundred thousand. None if a router gave no estimate.

        Engines compute prompts in order of arrival and don't report how far they are, so the
        progress of the oldest is estimated from the learned speed.
        """
        total, front = 0, None
        for record in self._waiting.values():
            if record.work.prefill_tokens is None:
                return None
            total += record.work.prefill_tokens
            if (
                front is None and record.sent_at is not None
            ):  # others wait for an adapter, or a body
                front = record
        if front is None or front.sent_at is None or line is None or line.s_per_token <= 0.0:
            return total
        done = (now - max(front.sent_at, self._settled_at)) / line.s_per_token
        assert front.work.prefill_tokens is not None
        return total - min(front.work.prefill_tokens, max(0, round(done)))

    def _settle(self, record: AgentRequest, state: AgentRequestState, now: float) -> None:
        self._enter(record, state)
        self._settled_at = now
        del self._waiting[record.inbox]
        self.held_bytes -= record.body_bytes
        assert record.sent_at is not None
        self.counters.settle(record.sent_at, now)

    @staticmethod
    def _enter(record: AgentRequest, state: AgentRequestState) -> None:
        assert state in _NEXT[record.state], f"from {record.state} to {state}"
        record.state = state
