"""One request's life at the agent: its record and its states; and the tables of all requests, the
online ones and, apart from them, the offline ones.

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
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from operator import attrgetter

from agents.core.effects import StartRelay
from agents.core.events import RouterKey
from agents.core.prefill_speed import PrefillLine
from agents.core.work_message import WorkRequest
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import Outcome
from schemas.state import FirstWaiting, rounded

BYTES_PER_TOKEN = 4  # of a prompt without an estimate
# Bodies of requests without a first byte are held in memory, here or in the HTTP client.
HELD_BYTES_MAX = 256 * 1024 * 1024
PART_TIMEOUT_S = 10.0  # since the part before; the slowest link moves a part in well under 1 s
SETTLED_MAX = 4096  # remembered between two scrapes
WAITED_S_MAX = 3600.0
OTHER_S = 60.0  # far more than a prompt and its transfer take
_NO_FAILURES = (Outcome.DONE, Outcome.CANCELLED, Outcome.PREEMPTED)


class BodyLost(ValueError):
    """The parts don't make the announced body; the message says why."""


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
    begun_before: int = 0  # the table's `_begun_tokens` when it was sent

    def first_token_at(self, *, streamed: bool) -> float | None:
        """None where that doesn't show. The one token of a prefill stage is its first."""
        return self.began_at if streamed or self.work.is_prefill else None

    @property
    def waits_for_other(self) -> bool:
        """Whether its first byte may depend on another engine: it has no cache, or nobody has come
        for one."""
        stage = self.work.stage
        return stage is not None and (self.work.is_decode or stage.prefill_address is not None)

    @property
    def is_stream(self) -> bool:
        """Of an engine whose plain answers are counted: whether its tokens show as they come."""
        return self.work.generates and not self.work.offline and self.answer_tokens is None

    def relay(self, body: bytes) -> StartRelay:
        """What sends it to the engine, with its whole body."""
        return StartRelay(self.inbox, self.work, self.headers, body)


class ScrapeCounters:
    """Requests sent to the engine without a first byte, in relation to the last scrape.

    Counted as they change: every event needs these numbers, and a full agent has hundreds of
    requests. A scrape begins at one moment and arrives at a later one, with requests in between.
    """

    def __init__(self) -> None:
        self.began_at = self._arrived_at = -inf  # the scrape
        self.ended = 0  # requests at the engine that have ended since it arrived
        # Of requests that no longer wait: when they were sent, and when they ceased to wait.
        self._settled: deque[tuple[float, float]] = deque(maxlen=SETTLED_MAX)
        self.waiting = 0  # all that have no first byte
        self.sent_before = 0  # of them, before the scrape arrived
        self.sent_since = 0  # of them, after it began
        self.settled = 0  # sent before it arrived; first byte or end since it began

    def scraped(self, began_at: float, arrived_at: float, waiting: Iterable[float]) -> None:
        """A new scrape. `waiting`: when each request without a first byte was sent."""
        self.began_at, self._arrived_at = began_at, arrived_at
        self.waiting = self.sent_before = self.sent_since = self.ended = 0
        for sent_at in waiting:
            self.sent(sent_at)
        while self._settled and self._settled[0][1] <= began_at:
            self._settled.popleft()
        self.settled = sum(sent_at <= arrived_at for sent_at, _ in self._settled)

    def settled_after(self, began_at: float) -> Iterable[float]:
        """When each request was sent that a scrape which began then found without a first byte, and
        that has one now or has ended."""
        return (sent_at for sent_at, at in self._settled if sent_at <= began_at < at)

    def sent(self, at: float) -> None:
        self.waiting += 1
        if at <= self._arrived_at:
            self.sent_before += 1
        if at > self.began_at:
            self.sent_since += 1

    def settle(self, sent_at: float, at: float) -> None:
        """A request has its first byte, or has ended without one."""
        self.waiting -= 1
        if sent_at > self.began_at:
            self.sent_since -= 1
        if sent_at <= self._arrived_at:
            self.sent_before -= 1
            self.settled += at > self.began_at
        self._settled.append((sent_at, at))


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
        self._begun_tokens = 0  # of prompts, of all that ceased to wait
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
        record.sent_at, record.begun_before = now, self._begun_tokens
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
        if record.sent_at is not None:
            self.at_engine -= 1
            self.counters.ended += 1
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
    def not_sent(self) -> int:
        """Taken and not given to the engine."""
        return len(self.by_inbox) - self.at_engine

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

    def first_waiting(self, running: int, waiting: int, now: float) -> FirstWaiting | None:
        """The first of the `waiting` requests of the last scrape, by the order in which they were
        sent; None if it begins by now, or if the engine has requests that are not in this table.
        """
        counters = self.counters
        before = [
            record
            for record in self.by_inbox.values()
            if record.sent_at is not None and record.sent_at <= counters.began_at
        ]
        if waiting > len(before) or running + waiting > len(before) + counters.ended:
            return None
        before.sort(key=attrgetter("sent_at"))
        *ahead, first = before[: len(before) - waiting + 1]
        if first.state is not AgentRequestState.SENT or first.waits_for_other:
            return None
        tokens = first.prompt_tokens + self._begun_tokens - first.begun_before
        tokens += sum(one.prompt_tokens for one in ahead if one.state is AgentRequestState.SENT)
        assert first.sent_at is not None
        return FirstWaiting(rounded(min(now - first.sent_at, WAITED_S_MAX)), tokens)

    def _settle(self, record: AgentRequest, state: AgentRequestState, now: float) -> None:
        self._enter(record, state)
        self._settled_at = now
        self._begun_tokens += record.prompt_tokens
        del self._waiting[record.inbox]
        self.held_bytes -= record.body_bytes
        assert record.sent_at is not None
        self.counters.settle(record.sent_at, now)

    @staticmethod
    def _enter(record: AgentRequest, state: AgentRequestState) -> None:
        assert state in _NEXT[record.state], f"from {record.state} to {state}"
        record.state = state


@dataclass(slots=True)
class WorkTotals:
    """Requests taken and ended since the agent started."""

    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    engine_s: float = 0.0  # of all of them, from sending to the last byte
    last_failure: Outcome | None = None

    def add(self, outcome: Outcome, engine_s: float = 0.0) -> None:
        """One more has ended; `engine_s`: 0 where the engine never had it."""
        self.ended += 1
        self.engine_s += engine_s
        if outcome is Outcome.CANCELLED:
            self.cancelled += 1
        elif outcome not in _NO_FAILURES:
            self.failed += 1
            self.last_failure = outcome


class RequestTables:
    """Two tables with one view on both. Every count of load is of `online` alone."""

    def __init__(self) -> None:
        self.online = RequestTable()
        self.offline = RequestTable()
        self.totals = WorkTotals()

    def __len__(self) -> int:
        return len(self.online.by_inbox) + len(self.offline.by_inbox)

    def of(self, record: AgentRequest) -> RequestTable:
        """The table that the record belongs to."""
        return self.offline if record.work.offline else self.online

    def end(self, record: AgentRequest, sent_at: float, outcome: Outcome, now: float) -> None:
        """The relay of a request is over."""
        table = self.of(record)
        table.settle(record, now)
        table.remove(record)
        self.totals.add(outcome, now - sent_at)

    def find(self, inbox: str) -> AgentRequest | None:
        """The request that is answered to this inbox."""
        return self.online.by_inbox.get(inbox) or self.offline.by_inbox.get(inbox)

    def all(self) -> list[AgentRequest]:
        """Online ones first."""
        return [*self.online.by_inbox.values(), *self.offline.by_inbox.values()]

    def waiting(self) -> list[AgentRequest]:
        """Those without a first byte."""
        return [*self.online.waiting(), *self.offline.waiting()]

    def overdue(self, now: float) -> list[AgentRequest]:
        """Those whose deadline has passed."""
        return [*self.online.overdue(now), *self.offline.overdue(now)]

    def without_next_part(self, now: float) -> Iterable[AgentRequest]:
        """Those whose next part is overdue."""
        return [*self.online.without_next_part(now), *self.offline.without_next_part(now)]

    def restart_clock(self, now: float) -> None:
        """No part could arrive until now."""
        self.online.restart_clock(now)
        self.offline.restart_clock(now)

    @property
    def at_engine(self) -> int:
        """Sent to the engine and not ended."""
        return self.online.at_engine + self.offline.at_engine

    def waiting_for_others(self, now: float) -> int:
        """Requests at the engine that are no sign of a hang: stages that wait for another engine,
        and what its HTTP server answers alone."""
        return sum(
            (record.waits_for_other and now - record.sent_at < OTHER_S)
            or record.work.path in SERVER_PATHS
            for record in self.online.waiting()
            if record.sent_at is not None
        )

    @property
    def longest_prompt_tokens(self) -> int:
        """Of those at the engine without a first byte."""
        return max(self.online.longest_prompt_tokens, self.offline.longest_prompt_tokens)
