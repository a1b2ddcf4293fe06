"""In which order held requests are tried: by class and time, or Preble's priority groups.

Preble 3.3: a request's group is the tenth of its prompt that is cached, and a batch takes from
each group in proportion to its number, "ten from priority group 10, nine from priority 9". What
its engine does for a batch we do over time: a round gives group g g releases, the highest group
first, and the next round begins when nobody who waits has any left. So prompts that are cached
go first and reuse what is there, and nobody starves: every round releases from every group.

Classes of requests: a class is worth HEAD_START_S of waiting. Whoever waits stands as if it had
come so much earlier or later: a higher class goes first, and nobody starves, because all who go
before a request came at most two head starts after it. It is one number, settled at arrival; an
age rule would order the line anew as time passes. Where there are groups, high goes into the
highest and low into the lowest, whatever is cached: the shares see to it that low is served.

Rejected: the longest match first (SGLang's `lpm`), which lets a steady stream of cached prompts
keep a new one waiting for ever. A prompt that is hardly cached would be in group 0 by the
paper's formula and have no share at all; here it is in group 1.

The ratio is asked for once, when the request is held: asking at every try would cost a walk of
the index for each one in line.
"""

from collections.abc import Callable, Iterator, MutableMapping
from enum import StrEnum
from typing import Protocol

from mesh.core.requests.request import Request
from schemas.exchange import Priority

GROUPS = 10  # Preble's P
# A sixth of the longest hold: low has its turn long before it would be shed for its age.
HEAD_START_S = 10.0
_CLASSES_BEFORE = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
EVERYBODY = 1  # the one group of those who come first


def standing(request: Request) -> float:
    """The arrival time that a request is treated as having, in seconds: its class in seconds."""
    return request.arrived_at + HEAD_START_S * _CLASSES_BEFORE[request.priority]


class HoldOrder(StrEnum):
    """FIRST_COME: by standing. HIT_RATIO: Preble's priority groups by hit ratio."""

    FIRST_COME = "first-come"
    HIT_RATIO = "hit-ratio"

    def turns(self, hit_ratio: Callable[[Request], float]) -> "Turns":
        """A new instance of that order. `hit_ratio`: part of a prompt that is cached, 0 to 1."""
        return FirstCome() if self is HoldOrder.FIRST_COME else PriorityGroups(hit_ratio)


class Turns(Protocol):
    """Whose turn it is among groups of held requests; inside a group it is `standing`."""

    def group(self, request: Request) -> int:
        """The group that a request waits in."""
        ...

    def walk(self, waiting: MutableMapping[int, int]) -> Iterator[int]:
        """The group of each next one to try, until all `waiting` (group: requests) were."""
        ...

    def released(self, group: int) -> None:
        """One of that group has got a place."""
        ...


class FirstCome:
    """One group, so `standing` alone decides."""

    def group(self, request: Request) -> int:
        """Everybody's."""
        return EVERYBODY

    def walk(self, waiting: MutableMapping[int, int]) -> Iterator[int]:
        """Everybody, one after the other."""
        for group, length in waiting.items():
            for _ in range(length):
                yield group

    def released(self, group: int) -> None:
        """Nothing changes for the others."""


class PriorityGroups:
    """Groups 1 to P; in every round of releases, group g has g of them."""

    def __init__(self, hit_ratio: Callable[[Request], float], groups: int = GROUPS) -> None:
        self._hit_ratio = hit_ratio
        self._groups = groups
        self._left = self._full_round()

    def group(self, request: Request) -> int:
        """63 of 100 tokens cached and ten groups: group 6; high and low have theirs."""
        if request.priority is Priority.HIGH:
            return self._groups
        if request.priority is Priority.LOW:
            return 1
        return min(self._groups, max(1, int(self._hit_ratio(request) * self._groups)))

    def walk(self, waiting: MutableMapping[int, int]) -> Iterator[int]:
        """As if each one tried were released; only `released` counts, for some are stuck."""
        left = self._left.copy()
        while waiting:
            for group in sorted(waiting, reverse=True):
                for _ in range(min(left[group], waiting[group])):
                    yield group
                waiting[group] -= min(left[group], waiting[group])
                if not waiting[group]:
                    del waiting[group]
            left = self._full_round()

    def released(self, group: int) -> None:
        """A group that had none left was tried last: all others are stuck or done as well."""
        if not self._left[group]:
            self._left = self._full_round()
        self._left[group] -= 1

    def _full_round(self) -> dict[int, int]:
        return {group: group for group in range(1, self._groups + 1)}
