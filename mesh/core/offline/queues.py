"""Whose line is next: the job with the earliest deadline, and by turns each of the others.

A job has a queue for each model that its lines name. A share of the hand-outs (`fair_share`) goes
to the job that has been given the fewest tokens, so that a stream of urgent jobs can't keep the
others from all work. Inside a job the order is by prefix (`prefixes.py`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

from sortedcontainers import SortedSet

from mesh.core.offline.events import Line
from mesh.core.offline.offline_queue import OfflineQueue
from mesh.core.offline.prefixes import PrefixRanges
from schemas.ids import ModelId
from schemas.residency import Label

QUEUES_LOOKED_AT = 32  # for one hand-out

Wanted = frozenset[Label] | None
"""The labels of which a place must carry one; None: any place."""


@dataclass(slots=True, eq=False)
class JobQueue:
    """A job's lines of one model."""

    job: str
    model: ModelId
    wanted: Wanted
    deadline: float
    needed_by: float  # for a choice between now and later
    order: OfflineQueue
    ranges: PrefixRanges = field(init=False)
    given_tokens: int = 0
    lines: int = 0  # that wait or are attempted

    def __post_init__(self) -> None:
        self.ranges = PrefixRanges(self.order)


class _Kind:
    """The queues, of one model and the same wanted labels, in which lines wait."""

    def __init__(self) -> None:
        self.by_deadline: SortedSet[tuple[float, str]] = SortedSet()
        self.by_given: SortedSet[tuple[int, str]] = SortedSet()
        self.queues: dict[str, JobQueue] = {}

    def enter(self, queue: JobQueue) -> None:
        self.queues[queue.job] = queue
        self.by_deadline.add((queue.deadline, queue.job))
        self.by_given.add((queue.given_tokens, queue.job))

    def leave(self, queue: JobQueue) -> None:
        del self.queues[queue.job]
        self.by_deadline.remove((queue.deadline, queue.job))
        self.by_given.remove((queue.given_tokens, queue.job))

    def least_given(self) -> int:
        return self.by_given[0][0] if self.by_given else 0


class Queues:
    """All queues of the window."""

    def __init__(self, dice: random.Random, *, utility_ratio: float, fair_share: float) -> None:
        self._dice = dice
        self._utility_ratio = utility_ratio
        self._fair_share = fair_share
        self._fair_turns = 0.0  # that are due
        self._queues: dict[tuple[str, ModelId], JobQueue] = {}
        self._kinds: dict[ModelId, dict[Wanted, _Kind]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def get(self, job: str, model: ModelId) -> JobQueue | None:
        return self._queues.get((job, model))

    def models(self) -> list[ModelId]:
        """Models for which lines wait."""
        return list(self._kinds)

    def first_deadline(self, model: ModelId) -> float:
        """The earliest of jobs whose lines of this model wait; infinite if none waits."""
        kinds = self._kinds.get(model, {}).values()
        return min((kind.by_deadline[0][0] for kind in kinds), default=inf)

    def some_waiting(self, model: ModelId, most: int) -> list[int]:
        """Keys of lines of this model that wait, so many at most."""
        kinds = self._kinds.get(model, {}).values()
        orders = (queue.order for kind in kinds for queue in kind.queues.values())
        return list(islice(chain.from_iterable(one.waiting(None, None) for one in orders), most))

    def open(
        self, job: str, model: ModelId, wanted: Wanted, deadline: float, needed_by: float
    ) -> JobQueue:
        """The queue for a line of that job and model."""
        queue = self._queues.get((job, model))
        if queue is None:
            order = OfflineQueue(self._dice, utility_ratio=self._utility_ratio)
            queue = JobQueue(job, model, wanted, deadline, needed_by, order)
            self._queues[job, model] = queue
            kind = self._kinds.get(model, {}).get(wanted)
            queue.given_tokens = kind.least_given() if kind is not None else 0
        return queue

    def close_if_empty(self, queue: JobQueue) -> None:
        if not queue.lines:
            self._queues.pop((queue.job, queue.model), None)

    def add(self, queue: JobQueue, line: Line) -> None:
        queue.order.add(line.key, line.prompt.hashes)
        queue.lines += 1
        self._waits(queue)

    def take(self, queue: JobQueue, line: Line) -> None:
        """An attempt begins."""
        kind = self._kinds[queue.model][queue.wanted]
        kind.by_given.remove((queue.given_tokens, queue.job))
        queue.given_tokens += line.tokens
        kind.by_given.add((queue.given_tokens, queue.job))
        queue.order.take(line.key)
        self._waits_no_more(queue)

    def put_back(self, queue: JobQueue, line: Line, place: str) -> None:
        """The attempt at that place is over."""
        queue.order.put_back(line.key)
        queue.ranges.came_back(place, line.key)
        self._waits(queue)

    def forget(self, queue: JobQueue, line: Line) -> None:
        """The line waits no more, or its attempt is over for good."""
        was_waiting = line.key in queue.order
        queue.order.forget(line.key)
        queue.lines -= 1
        if was_waiting:
            self._waits_no_more(queue)
        self.close_if_empty(queue)

    def leave(self, owner: str) -> None:
        """A replica or region is gone: its ranges go to others."""
        for queue in self._queues.values():
            queue.ranges.leave(owner)

    def choose(
        self,
        model: ModelId,
        owner: str,
        takes: Callable[[Wanted], bool],
        may_go: Callable[[JobQueue], bool],
        accepts: Callable[[int], bool],
    ) -> int | None:
        """The key of the line that a place should be given next; None if there is none.

        `takes`: whether the place carries one of these labels. `may_go`: whether a job's lines are
        to go there now. `accepts`: whether that line fits.
        """
        kinds = [kind for wanted, kind in self._kinds.get(model, {}).items() if takes(wanted)]
        if not kinds:
            return None
        is_fair_turn = self._fair_turns >= 1.0
        for queue in _in_turn(kinds, by_given=is_fair_turn):
            if may_go(queue) and (key := queue.ranges.next_for(owner, accepts)) is not None:
                self._fair_turns += self._fair_share - is_fair_turn
                return key
        return None

    def _waits(self, queue: JobQueue) -> None:
        kind = self._kinds.setdefault(queue.model, {}).setdefault(queue.wanted, _Kind())
        if queue.job not in kind.queues:
            kind.enter(queue)

    def _waits_no_more(self, queue: JobQueue) -> None:
        """If no line waits any more."""
        if len(queue.order):
            return
        kinds = self._kinds[queue.model]
        kind = kinds[queue.wanted]
        kind.leave(queue)
        if not kind.queues:
            del kinds[queue.wanted]
            if not kinds:
                del self._kinds[queue.model]


def _in_turn(kinds: list[_Kind], *, by_given: bool) -> Iterator[JobQueue]:
    """Queues of all these kinds, the next one first; at most QUEUES_LOOKED_AT of each kind."""
    entries = []
    for kind in kinds:
        order = kind.by_given if by_given else kind.by_deadline
        entries += [(key, job, kind) for key, job in order.islice(0, QUEUES_LOOKED_AT)]
    entries.sort(key=lambda entry: entry[:2])
    for _, job, kind in entries[:QUEUES_LOOKED_AT]:
        yield kind.queues[job]
