"""The window: the lines that this runner has fetched and not finished; the states of each.

This is the only module that writes to a `LineRecord`; others read it. A line waits in the queue of
its job (`queues.py`), or an attempt of it is under way, or its result is being stored: one of
these. It leaves the window when its result is stored, or when it is put back to the store. The
window is bounded in number and in bytes of bodies; what is being fetched has its room reserved.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from mesh.core.offline.events import Line
from mesh.core.offline.queues import JobQueue, Queues
from mesh.core.requests.record import Failures, ImpossibleTransition
from schemas.exchange import Priority
from schemas.ids import ModelId, RegionId, ReplicaId

# A place that failed a line doesn't get it again for so long, and each time for longer: an engine
# that is away for minutes must not use up the attempts of every line.
AVOIDED_S, AVOIDED_MORE = 15.0, 4.0


class LineState(Enum):
    """Where a line is in its life."""

    WAITING = auto()  # in its job's queue
    ATTEMPTED = auto()  # an attempt is under way
    SETTLED = auto()  # it has a result, which the host is storing
    GONE = auto()  # stored, or put back


class LineStep(Enum):
    """What changes a line's state."""

    ATTEMPT = auto()
    RETURN = auto()  # refused, preempted, lost or failed: it waits at its old place
    SETTLE = auto()
    RELEASE = auto()
    STORED = auto()


TRANSITIONS: Mapping[tuple[LineState, LineStep], LineState] = {
    (LineState.WAITING, LineStep.ATTEMPT): LineState.ATTEMPTED,
    (LineState.ATTEMPTED, LineStep.RETURN): LineState.WAITING,
    (LineState.WAITING, LineStep.SETTLE): LineState.SETTLED,
    (LineState.ATTEMPTED, LineStep.SETTLE): LineState.SETTLED,
    (LineState.WAITING, LineStep.RELEASE): LineState.GONE,
    (LineState.ATTEMPTED, LineStep.RELEASE): LineState.GONE,
    (LineState.SETTLED, LineStep.STORED): LineState.GONE,
}


def region_place(region: RegionId) -> str:
    """A peer region's name where replicas have theirs; no replica has a slash in it."""
    return f"{region}/"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where a line was handed, and as what."""

    began_at: float
    replica: ReplicaId | None = None  # of this region
    peer: RegionId | None = None
    handoff: int | None = None  # its number, on a replica of this region
    held_blocks: int = 0  # of its prompt, believed to be in that replica's cache
    offline: bool = True
    priority: Priority = Priority.LOW

    @property
    def place(self) -> str:
        """Its name among replicas of this region and peer regions."""
        return region_place(self.peer) if self.peer is not None else self.replica or ""


@dataclass(slots=True)
class LineRecord(Failures):
    """One line of the window."""

    line: Line
    queue: JobQueue
    fetched_at: float
    state: LineState = LineState.WAITING
    number: int = 0  # of the last attempt
    attempt: Attempt | None = None  # the one under way
    peer_replica: ReplicaId | None = None  # that a peer named
    avoided: str = ""  # the place that failed it last
    avoided_until: float = -inf

    def avoids(self, place: str, now: float) -> bool:
        return place == self.avoided and now < self.avoided_until


@dataclass(slots=True)
class _Reserved:
    """Room of the window for one fetch."""

    job: str
    lines: int
    bytes: int


@dataclass(slots=True)
class JobLines:
    """What the window has of one job."""

    by_number: dict[int, int] = field(default_factory=dict)  # key by the line's number
    waiting: int = 0


NO_LINES = JobLines()


class Window:
    """The lines, by key."""

    def __init__(self, lines_max: int, bytes_max: int, queues: Queues) -> None:
        self.lines_max, self.bytes_max = lines_max, bytes_max
        self._queues = queues
        self._records: dict[int, LineRecord] = {}
        self._jobs: dict[str, JobLines] = {}
        self._reserved: dict[int, _Reserved] = {}  # by the fetch's number
        self._reserved_for: dict[str, int] = {}  # lines, by job
        self._reserved_lines = self._reserved_bytes = 0
        self.body_bytes = 0
        self.attempted = 0
        self.waiting_tokens: dict[ModelId, int] = {}
        self.waiting_lines: dict[ModelId, int] = {}
        self.attempted_tokens: dict[ModelId, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[LineRecord]:
        return iter(list(self._records.values()))

    def get(self, key: int) -> LineRecord | None:
        return self._records.get(key)

    def current(self, key: int, attempt: int) -> LineRecord | None:
        """The line, if that attempt is under way."""
        record = self._records.get(key)
        is_current = record is not None and record.attempt is not None and record.number == attempt
        return record if is_current else None

    def of_job(self, job: str) -> list[LineRecord]:
        return [self._records[key] for key in self._jobs.get(job, NO_LINES).by_number.values()]

    def held(self, job: str) -> int:
        """Lines of the job that are here or on their way here."""
        here = len(self._jobs.get(job, NO_LINES).by_number)
        return here + self._reserved_for.get(job, 0)

    def waiting(self, job: str) -> int:
        return self._jobs.get(job, NO_LINES).waiting

    # Room.

    @property
    def free_lines(self) -> int:
        return self.lines_max - len(self._records) - self._reserved_lines

    @property
    def free_bytes(self) -> int:
        return self.bytes_max - self.body_bytes - self._reserved_bytes

    @property
    def is_fetching(self) -> bool:
        return bool(self._reserved)

    def reserve(self, fetch: int, job: str, lines: int, body_bytes: int) -> None:
        """Keep room for what is being fetched; `fetch`: its number."""
        self._reserved[fetch] = _Reserved(job, lines, body_bytes)
        self._reserved_for[job] = self._reserved_for.get(job, 0) + lines
        self._reserved_lines += lines
        self._reserved_bytes += body_bytes

    def unreserve(self, fetch: int) -> None:
        reserved = self._reserved.pop(fetch)
        self._reserved_lines -= reserved.lines
        self._reserved_bytes -= reserved.bytes
        left = self._reserved_for.pop(reserved.job) - reserved.lines
        if left:
            self._reserved_for[reserved.job] = left

    # Transitions.

    def enter(self, line: Line, queue: JobQueue, now: float) -> LineRecord | None:
        """A line was fetched. None if it is here already, or if there is no room."""
        job = self._jobs.get(line.job)
        known = line.key in self._records or (job is not None and line.number in job.by_number)
        if known or self.free_lines <= 0 or self.free_bytes < line.body_bytes:
            return None
        if job is None:
            job = self._jobs[line.job] = JobLines()
        record = self._records[line.key] = LineRecord(line, queue, now)
        job.by_number[line.number] = line.key
        self.body_bytes += line.body_bytes
        self._queues.add(queue, line)
        self._waits(record, 1)
        return record

    def attempt(self, record: LineRecord, attempt: Attempt) -> None:
        """An attempt begins."""
        self._step(record, LineStep.ATTEMPT)
        record.number += 1
        record.attempt, record.peer_replica, record.engine_status = attempt, None, None
        self._queues.take(record.queue, record.line)

    def placed_by_peer(self, record: LineRecord, replica: ReplicaId) -> None:
        record.peer_replica = replica

    def put_back(self, record: LineRecord) -> None:
        """The attempt is over without an answer: the line waits where it waited."""
        place = record.attempt.place if record.attempt is not None else ""
        self._step(record, LineStep.RETURN)
        self._queues.put_back(record.queue, record.line, place)

    def failed(self, record: LineRecord, status: int | None, now: float, *, avoid: bool) -> None:
        """Count a failed attempt, which is still under way."""
        assert record.attempt is not None, "only attempts fail"
        record.failures += 1
        record.engine_answered(status)
        if avoid:
            self.avoid(record, now)

    def avoid(self, record: LineRecord, now: float) -> None:
        """The place of this attempt is not to get the line again for a while."""
        assert record.attempt is not None, "an attempt is under way"
        avoided_s = AVOIDED_S * AVOIDED_MORE ** max(0, record.failures - 1)
        record.avoided, record.avoided_until = record.attempt.place, now + avoided_s

    def settle(self, record: LineRecord) -> None:
        self._step(record, LineStep.SETTLE)
        self._queues.forget(record.queue, record.line)

    def release(self, record: LineRecord) -> None:
        self._step(record, LineStep.RELEASE)
        self._queues.forget(record.queue, record.line)
        self._remove(record)

    def stored(self, key: int) -> None:
        """Its result is stored. A line that is not being stored is left as it is."""
        record = self._records.get(key)
        if record is not None and record.state is LineState.SETTLED:
            self._step(record, LineStep.STORED)
            self._remove(record)

    def _step(self, record: LineRecord, step: LineStep) -> None:
        state = TRANSITIONS.get((record.state, step))
        if state is None:
            raise ImpossibleTransition(f"{step.name} of a line that is {record.state.name}")
        self._waits(record, (state is LineState.WAITING) - (record.state is LineState.WAITING))
        self._runs(record, (state is LineState.ATTEMPTED) - (record.state is LineState.ATTEMPTED))
        record.state = state
        if state is not LineState.ATTEMPTED:
            record.attempt = None

    def _runs(self, record: LineRecord, more: int) -> None:
        model, tokens = record.line.model, more * record.line.tokens
        self.attempted += more
        tokens += self.attempted_tokens.pop(model, 0)
        if tokens:
            self.attempted_tokens[model] = tokens

    def _waits(self, record: LineRecord, more: int) -> None:
        line = record.line
        self._jobs[line.job].waiting += more
        lines = self.waiting_lines.get(line.model, 0) + more
        tokens = self.waiting_tokens.get(line.model, 0) + more * line.tokens
        if lines:
            self.waiting_lines[line.model], self.waiting_tokens[line.model] = lines, tokens
        else:
            self.waiting_lines.pop(line.model, None)
            self.waiting_tokens.pop(line.model, None)

    def _remove(self, record: LineRecord) -> None:
        line = record.line
        del self._records[line.key]
        self.body_bytes -= line.body_bytes
        job = self._jobs[line.job]
        del job.by_number[line.number]
        if not job.by_number:
            del self._jobs[line.job]
