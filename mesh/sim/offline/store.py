"""A region's batch jobs as its JetStream keeps them: lines until acknowledged, results for ever.

It outlives every batch runner. A line that a runner has and does not acknowledge is delivered again
once that runner has been silent for ACK_WAIT_S; the first result of a line stays, and later ones
are counted. What the account BATCH of a live region does besides (files, tasks, disk) takes no part
in placing lines and is left out.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from mesh.sim.offline.jobs import SimJob
from mesh.sim.workload import RequestNode, keys_of
from schemas.ids import RegionId, ReplicaId

ACK_WAIT_S = 30.0
HASHES_COMPARED = 512  # of a prompt, where lines are ordered


class LineOutcome(StrEnum):
    """What a line's result is."""

    ANSWERED = "answered"
    FAILED = "failed"
    EXPIRED = "expired"  # its window was over


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The one result of a line. Times are the world's."""

    outcome: LineOutcome
    at: float
    detail: str = ""
    replica: ReplicaId | None = None
    region: RegionId | None = None  # where that is
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 0


@dataclass(slots=True)
class StoredJob:
    """One job of a region. Lines are named by their number in the job's order, from 1."""

    job: SimJob
    submitted_at: float
    lines: tuple[RequestNode, ...]
    results: dict[int, LineResult] = field(default_factory=dict)
    repeated: int = 0  # results that came for lines that had one
    _waiting: deque[int] = field(default_factory=deque)
    _owners: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._waiting.extend(range(1, len(self.lines) + 1))

    @property
    def deadline(self) -> float:
        return self.submitted_at + self.job.window_s

    @property
    def is_over(self) -> bool:
        return len(self.results) == len(self.lines)

    @property
    def waiting(self) -> int:
        """Lines that no runner has."""
        return len(self._waiting)

    def deliver(self, most: int, owner: str) -> list[int]:
        """Up to so many lines, which that runner now has."""
        found = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._owners |= dict.fromkeys(found, owner)
        return found

    def keep(self, number: int, result: LineResult) -> bool:
        """Keep a line's result and acknowledge it. False: it has one already."""
        self._owners.pop(number, None)
        if number in self.results:
            self.repeated += 1
            return False
        self.results[number] = result
        return True

    def put_back(self, number: int, owner: str) -> None:
        """A runner gives a line back: it is delivered again at once."""
        if self._owners.get(number) == owner:
            del self._owners[number]
            if number not in self.results:
                self._waiting.append(number)

    def abandon(self, owner: str) -> None:
        """That runner has been silent for too long: others get its lines, oldest first."""
        lost = sorted(number for number, its in self._owners.items() if its == owner)
        for number in lost:
            del self._owners[number]
        self._waiting.extendleft(reversed([n for n in lost if n not in self.results]))

    def expire(self, now: float) -> int:
        """Answer all that is left: the window is over. Returns how many lines that were."""
        left = [n for n in range(1, len(self.lines) + 1) if n not in self.results]
        for number in left:
            self.results[number] = LineResult(outcome=LineOutcome.EXPIRED, at=now)
        self._waiting.clear()
        self._owners.clear()
        return len(left)


class JobStore:
    """The jobs of one region."""

    def __init__(self, *, is_ordered: bool = True) -> None:
        """`is_ordered`: lines are queued so that neighbours share what they begin with."""
        self._is_ordered = is_ordered
        self.jobs: dict[str, StoredJob] = {}

    def submit(self, job: SimJob, now: float) -> StoredJob:
        """A client's job is there and checked, and its lines are queued."""
        lines = job.lines
        if self._is_ordered:
            lines = tuple(sorted(lines, key=lambda node: keys_of(node).hashes[:HASHES_COMPARED]))
        stored = self.jobs[job.name] = StoredJob(job, now, lines)
        return stored

    def open_jobs(self) -> Iterator[StoredJob]:
        """Those with a line without result."""
        return (stored for stored in self.jobs.values() if not stored.is_over)

    def abandon(self, owner: str) -> None:
        """What that runner has of every job is delivered to others."""
        for stored in self.jobs.values():
            stored.abandon(owner)
