"""Who is best in a cell, by how much, and whether the difference means anything.

Ratios are written so that more is better: of times theirs over ours, of rates ours over theirs. A
rival that loses over `LOST_BEYOND` of the requests more than `mesh` is left out of a cell: what it
answers quickly, it answers because others are refused. The rival that is compared is the best of
each metric, which favours it: the best of several is partly luck.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from tests.programs.studies.mesh.samples import (
    Figure,
    Interval,
    Rows,
    Sample,
    geomean,
    interval,
    percentile,
)

LOST_BEYOND = 0.01
KV_SATURATED = 0.9  # mean occupancy from which a cell's memory counts as full
FULL_LOAD = 1.0
FAIREST_OF = 3
MEAN: Figure = lambda sample: sample.mean  # noqa: E731
P99 = percentile(0.99)


class Verdict(StrEnum):
    """Of a target, or of a target in one cell."""

    HIT = "hit"
    INCONCLUSIVE = "inconclusive"
    MISS = "**miss**"


class Place(NamedTuple):
    """A workload on a fleet at a load."""

    workload: str
    engines: str
    load: float


class Compared(NamedTuple):
    """A ratio to one other policy."""

    name: str
    rows: Rows


@dataclass(frozen=True)
class Cell:
    """All policies of one place. `rivals`: all that were played; `central`: names of some."""

    place: Place
    ours: Sample
    rivals: Mapping[str, Sample]
    central: frozenset[str]
    oracles: Mapping[str, Sample]
    everywhere: Sample | None = None

    @cached_property
    def eligible(self) -> dict[str, Sample]:
        """Rivals that lose no more than one point beyond us."""
        most = float(self.ours.lost[0]) + LOST_BEYOND
        return {name: one for name, one in self.rivals.items() if float(one.lost[0]) <= most}

    @property
    def kv_saturated(self) -> bool:
        """Whether the engines' memory is full while they work."""
        return self.ours.occupancy >= KV_SATURATED

    def time(self, figure: Figure, *, central: bool = False) -> Compared | None:
        """The least time of any rival over ours; None if no rival may be compared."""
        found = {
            name: figure(one)
            for name, one in self.eligible.items()
            if not central or name in self.central
        }
        if not found:
            return None
        name = min(found, key=lambda one: float(found[one][0]))
        return Compared(name, found[name] / figure(self.ours))

    def rate(self, figure: Figure) -> Compared | None:
        """Our rate over the highest of any rival."""
        found = {name: figure(one) for name, one in self.eligible.items()}
        if not found:
            return None
        name = max(found, key=lambda one: float(found[one][0]))
        if not found[name][0]:
            return None
        return Compared(name, figure(self.ours) / found[name])

    def over_oracle(self) -> Compared | None:
        """Our mean time over that of the better oracle; more is worse."""
        if not self.oracles:
            return None
        name = min(self.oracles, key=lambda one: float(self.oracles[one].mean[0]))
        return Compared(name, self.ours.mean / self.oracles[name].mean)

    def federation(self) -> Compared | None:
        """Our mean time over that with one view of all regions; more is worse."""
        if self.everywhere is None:
            return None
        return Compared("mesh-everywhere", self.ours.mean / self.everywhere.mean)

    def unfairness(self) -> Compared | None:
        """Ours over that of the fairest of the three rivals with the least mean; more is worse."""
        best = sorted(self.eligible, key=lambda one: float(self.eligible[one].mean[0]))
        if not best:
            return None
        name = min(best[:FAIREST_OF], key=lambda one: float(self.eligible[one].unfairness[0]))
        return Compared(name, self.ours.unfairness / self.eligible[name].unfairness)


def below_saturation(cell: Cell) -> bool:
    """By load alone, so that no policy's failure moves a cell to easier targets."""
    return cell.place.load < FULL_LOAD


def saturated(cell: Cell) -> bool:
    """At or above full load."""
    return not below_saturation(cell)


def up_to_full_load(cell: Cell) -> bool:
    """At most full load."""
    return cell.place.load <= FULL_LOAD


@dataclass(frozen=True, slots=True)
class Target:
    """What `mesh` should reach over some cells: in each of them, or in their geometric mean."""

    text: str
    wanted: float
    read: Callable[[Cell], Compared | None]
    among: Callable[[Cell], bool] = lambda cell: True
    is_mean: bool = False
    at_most: bool = False

    def verdict(self, found: Interval) -> Verdict:
        """To two digits: the third is noise. Inconclusive if the interval has both sides."""
        if self.at_most:
            met, missed = round(found.high, 2) <= self.wanted, round(found.low, 2) > self.wanted
        else:
            met, missed = round(found.low, 2) >= self.wanted, round(found.high, 2) < self.wanted
        return Verdict.HIT if met else Verdict.MISS if missed else Verdict.INCONCLUSIVE

    def judged(self, cells: Sequence[Cell]) -> "Judged":
        """The target over those cells."""
        found: dict[Place, Compared] = {}
        without = 0
        for cell in cells:
            if self.among(cell):
                one = self.read(cell)
                without += one is None
                if one is not None:
                    found[cell.place] = one
        return Judged(self, found, without)


@dataclass(frozen=True)
class Judged:
    """A target and the ratio of each cell; `without`: cells in which nobody may be compared."""

    target: Target
    found: Mapping[Place, Compared]
    without: int

    @cached_property
    def intervals(self) -> dict[Place, Interval]:
        """Of each cell."""
        return {place: interval(one.rows) for place, one in self.found.items()}

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of each cell."""
        return [self.target.verdict(one) for one in self.intervals.values()]

    @property
    def worst(self) -> Place:
        """The cell that is furthest from the target."""
        sign = -1 if self.target.at_most else 1
        return min(self.intervals, key=lambda place: sign * self.intervals[place].value)

    @cached_property
    def summary(self) -> Interval:
        """The geometric mean, or the worst cell."""
        if self.target.is_mean:
            return interval(geomean([one.rows for one in self.found.values()]))
        return self.intervals[self.worst]

    @property
    def verdict(self) -> Verdict:
        """Of the geometric mean; of every cell: that of the worst verdict."""
        if self.target.is_mean:
            return self.target.verdict(self.summary)
        for verdict in (Verdict.MISS, Verdict.INCONCLUSIVE):
            if verdict in self.verdicts:
                return verdict
        return Verdict.HIT


def _mean(cell: Cell) -> Compared | None:
    return cell.time(MEAN)


def _central(cell: Cell) -> Compared | None:
    return cell.time(MEAN, central=True)


def _p99(cell: Cell) -> Compared | None:
    return cell.time(P99)


def _goodput(cell: Cell) -> Compared | None:
    return cell.rate(lambda sample: sample.goodput)


def _throughput(cell: Cell) -> Compared | None:
    return cell.rate(lambda sample: sample.throughput)


def _full(cell: Cell) -> bool:
    return cell.kv_saturated


def _not_full(cell: Cell) -> bool:
    return not cell.kv_saturated


def _mixed(cell: Cell) -> bool:
    return cell.place.engines == "mixed"


TARGETS = (
    Target("TTFT mean below saturation, every cell", 1.05, _mean, below_saturation),
    Target("the same, geometric mean", 1.3, _mean, below_saturation, is_mean=True),
    Target("against central routers, geometric mean", 1.6, _central, below_saturation, True),
    Target("TTFT mean at and above saturation, every cell", 1.0, _mean, saturated),
    Target("the same, geometric mean", 1.2, _mean, saturated, is_mean=True),
    Target("goodput at and above saturation, every cell", 1.0, _goodput, saturated),
    Target("the same, geometric mean", 1.2, _goodput, saturated, is_mean=True),
    Target("throughput, every cell", 0.99, _throughput),
    Target("TTFT p99 up to full load, every cell", 0.95, _p99, up_to_full_load),
    Target("the same, geometric mean", 1.1, _p99, up_to_full_load, is_mean=True),
    Target("mixed fleets over the oracle", 1.1, Cell.over_oracle, _mixed, at_most=True),
    Target("price of federation", 1.05, Cell.federation, _not_full, at_most=True),
    Target("the same where memory is full", 1.1, Cell.federation, _full, at_most=True),
    Target("unfairness over the fairest of three", 1.0, Cell.unfairness, at_most=True),
)
