"""Who is best in a cell, by how much, and whether the difference means anything.

Ratios are written so that more is better: of times theirs over ours, of rates ours over theirs. A
rival that loses over `LOST_BEYOND` of the requests more than `mesh` is left out of a cell: what it
answers quickly, it answers because others are refused. As lost requests count already in a mean and
in goodput, these two are also judged over all rivals, with nobody left out. `mesh` is compared with
the best rival of each metric, found again in each draw: that the best of several is partly luck is
then part of the interval.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tests.programs.studies.mesh.samples import (
    BLOCK,
    BLOCK_SATURATED,
    Figure,
    Interval,
    Rows,
    Sample,
    geomean,
    interval,
    percentile,
)
from tests.programs.studies.tables.result_files import Result

LOST_BEYOND = 0.01
# Mean occupancy from which a cell's memory counts as full: over a whole run, in which engines fill
# and drain, and over engines of which not all are full. 0.6 was set after the results were known.
KV_SATURATED = 0.6
FULL_LOAD = 1.0
FAIREST_OF = 3
MEAN: Figure = lambda sample: sample.mean  # noqa: E731
GOODPUT: Figure = lambda sample: sample.goodput  # noqa: E731
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


def sample_of(place: Place, by_seed: Mapping[int, Result], *, cold: bool = False) -> Sample:
    """A policy's requests there, drawn with that place's dice."""
    block = BLOCK if place.load < FULL_LOAD else BLOCK_SATURATED
    return Sample(by_seed, cold=cold, place=str(place), block=block)


class Compared(NamedTuple):
    """A ratio to the best of other policies, which is this one but for the luck of the draw."""

    name: str
    rows: Rows


def least(found: Mapping[str, Rows]) -> Compared | None:
    """Of each row the least, and whose it is in the first; None if there is none."""
    if not found:
        return None
    name = min(found, key=lambda one: float(found[one][0]))
    return Compared(name, np.min(list(found.values()), axis=0))


class Against(StrEnum):
    """Whom a target compares `mesh` with."""

    RIVALS = "rivals"
    CENTRAL = "central routers"
    OURSELVES = "what could not be built"


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
        """Whether the engines' memory is full while they work.

        With one view of all regions, so that no failing of ours moves a cell to the other target.
        """
        return self.everywhere is not None and self.everywhere.occupancy >= KV_SATURATED

    @property
    def is_conversation(self) -> bool:
        """Whether some requests are sent when the answer before them ends."""
        return self.ours.follow > 0

    def compared(self, against: Against, *, everyone: bool = False) -> dict[str, Sample]:
        """The rivals of that kind; without those that lose too much, unless `everyone` is."""
        known = self.rivals if everyone else self.eligible
        kinds = {Against.RIVALS: set(known), Against.CENTRAL: self.central}
        return {name: one for name, one in known.items() if name in kinds.get(against, ())}

    def left_out(self, against: Against) -> list[str]:
        """The rivals of that kind that are not compared."""
        return [name for name in self.compared(against, everyone=True) if name not in self.eligible]

    def time(
        self, figure: Figure, against: Against = Against.RIVALS, *, everyone: bool = False
    ) -> Compared | None:
        """The least time of any rival over ours; None if no rival may be compared."""
        rivals = self.compared(against, everyone=everyone)
        return least({name: figure(one) / figure(self.ours) for name, one in rivals.items()})

    def rate(
        self, figure: Figure, against: Against = Against.RIVALS, *, everyone: bool = False
    ) -> Compared | None:
        """Our rate over the highest of any rival; None if no rival may be compared."""
        rivals = self.compared(against, everyone=everyone)
        return least({name: figure(self.ours) / figure(one) for name, one in rivals.items()})

    def over_oracle(self) -> Compared | None:
        """Our mean time over that of the better oracle; more is worse."""
        better = least({name: one.mean for name, one in self.oracles.items()})
        return None if better is None else Compared(better.name, self.ours.mean / better.rows)

    def oracles_gain(self, against: Against) -> Compared | None:
        """The least mean time of any rival over that of the better oracle."""
        rival, oracle = self.time(MEAN, against), self.over_oracle()
        if rival is None or oracle is None:
            return None
        return Compared(rival.name, rival.rows * oracle.rows)

    def federation(self) -> Compared | None:
        """Our mean time over that with one view of all regions; more is worse."""
        if self.everywhere is None:
            return None
        return Compared("mesh-everywhere", self.ours.mean / self.everywhere.mean)

    def unfairness(self) -> Compared | None:
        """Ours over that of the fairest of the three rivals with the least mean; more is worse."""
        best = sorted(self.eligible, key=lambda one: float(self.eligible[one].mean[0]))
        fairest = least({name: self.eligible[name].unfairness for name in best[:FAIREST_OF]})
        return (
            None if fairest is None else fairest._replace(rows=self.ours.unfairness / fairest.rows)
        )


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
    """What `mesh` should reach over some cells: in each of them, or in their geometric mean.

    `everyone`: the same ratio with no rival left out, where lost requests count in it anyway.
    """

    text: str
    wanted: float
    read: Callable[[Cell], Compared | None]
    among: Callable[[Cell], bool] = lambda cell: True
    is_mean: bool = False
    at_most: bool = False
    against: Against = Against.RIVALS
    everyone: Callable[[Cell], Compared | None] | None = None

    def verdict(self, found: Interval) -> Verdict:
        """To two digits: the third is noise. Inconclusive if the interval has both sides."""
        if self.at_most:
            met, missed = round(found.high, 2) <= self.wanted, round(found.low, 2) > self.wanted
        else:
            met, missed = round(found.low, 2) >= self.wanted, round(found.high, 2) < self.wanted
        return Verdict.HIT if met else Verdict.MISS if missed else Verdict.INCONCLUSIVE

    def judged(self, cells: Sequence[Cell]) -> "Judged":
        """The target over those cells."""
        asked = [cell for cell in cells if self.among(cell)]
        read = {cell.place: self.read(cell) for cell in asked}
        found = {place: one for place, one in read.items() if one is not None}
        left_out = {cell.place: names for cell in asked if (names := cell.left_out(self.against))}
        return Judged(self, found, len(read) - len(found), left_out)

    def judged_over_everyone(self, cells: Sequence[Cell]) -> "Judged | None":
        """The target over those cells with no rival left out."""
        return None if self.everyone is None else replace(self, read=self.everyone).judged(cells)


@dataclass(frozen=True)
class Judged:
    """A target and the ratio of each cell.

    `without`: cells in which nobody may be compared. `left_out`: rivals that may not be, by cell.
    """

    target: Target
    found: Mapping[Place, Compared]
    without: int
    left_out: Mapping[Place, Sequence[str]]

    @property
    def times_left_out(self) -> Counter[str]:
        """In how many cells each rival is left out."""
        return Counter(name for names in self.left_out.values() for name in names)

    @cached_property
    def intervals(self) -> dict[Place, Interval]:
        """Of each cell."""
        return {place: interval(one.rows) for place, one in self.found.items()}

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of each cell; without a rival it is inconclusive."""
        found = [self.target.verdict(one) for one in self.intervals.values()]
        return [*found, *[Verdict.INCONCLUSIVE] * self.without]

    @property
    def worst(self) -> Place:
        """The cell that is furthest from the target, of those with the row's verdict if it has any.

        Else a "miss" might name a cell that is worse by value but inconclusive.
        """
        sign, found, verdict = -1 if self.target.at_most else 1, self.intervals, self.verdict
        alike = [place for place in found if self.target.verdict(found[place]) is verdict]
        among = found if self.target.is_mean else alike or found
        return min(among, key=lambda place: sign * found[place].value)

    @property
    def ties(self) -> int:
        """Cells whose ratio and both ends of it are 1.00: nobody is better."""
        ones = [(one.low, one.value, one.high) for one in self.intervals.values()]
        return sum(all(round(each, 2) == 1.0 for each in one) for one in ones)

    @cached_property
    def summary(self) -> Interval:
        """The geometric mean, or the worst cell."""
        if self.target.is_mean:
            return interval(geomean([one.rows for one in self.found.values()]))
        return self.intervals[self.worst]

    @property
    def verdict(self) -> Verdict:
        """Of the geometric mean; of every cell: that of the worst verdict.

        A mean over cells of which some have no rival is no hit.
        """
        verdicts = self.verdicts
        if self.target.is_mean and self.found:
            unknown = [Verdict.INCONCLUSIVE] * self.without
            verdicts = [self.target.verdict(self.summary), *unknown]
        for verdict in (Verdict.MISS, Verdict.INCONCLUSIVE):
            if verdict in verdicts:
                return verdict
        return Verdict.HIT


def _mean(cell: Cell) -> Compared | None:
    return cell.time(MEAN)


def _mean_everyone(cell: Cell) -> Compared | None:
    return cell.time(MEAN, everyone=True)


def _central(cell: Cell) -> Compared | None:
    return cell.time(MEAN, Against.CENTRAL)


def _central_everyone(cell: Cell) -> Compared | None:
    return cell.time(MEAN, Against.CENTRAL, everyone=True)


def _p99(cell: Cell) -> Compared | None:
    return cell.time(P99)


def _goodput(cell: Cell) -> Compared | None:
    return cell.rate(GOODPUT)


def _goodput_everyone(cell: Cell) -> Compared | None:
    return cell.rate(GOODPUT, everyone=True)


def _throughput(cell: Cell) -> Compared | None:
    return cell.rate(lambda sample: sample.throughput)


def _full(cell: Cell) -> bool:
    return cell.kv_saturated


def _not_full(cell: Cell) -> bool:
    return not cell.kv_saturated


def _mixed(cell: Cell) -> bool:
    return cell.place.engines == "mixed"


def _times(text: str, wanted: float, among: Callable[[Cell], bool], **more: Any) -> Target:
    return Target(text, wanted, _mean, among, everyone=_mean_everyone, **more)


def _goodputs(text: str, wanted: float, **more: Any) -> Target:
    return Target(text, wanted, _goodput, saturated, everyone=_goodput_everyone, **more)


def _itself(
    text: str, wanted: float, read: Callable[[Cell], Compared | None], among: Callable[[Cell], bool]
) -> Target:
    return Target(text, wanted, read, among, at_most=True, against=Against.OURSELVES)


GOODPUT_EVERY_CELL = _goodputs("goodput at and above saturation, every cell", 1.0)
TARGETS = (
    _times("TTFT mean below saturation, every cell", 1.05, below_saturation),
    _times("the same, geometric mean", 1.3, below_saturation, is_mean=True),
    Target(
        "against central routers, geometric mean",
        1.6,
        _central,
        below_saturation,
        is_mean=True,
        against=Against.CENTRAL,
        everyone=_central_everyone,
    ),
    _times("TTFT mean at and above saturation, every cell", 1.0, saturated),
    _times("the same, geometric mean", 1.2, saturated, is_mean=True),
    GOODPUT_EVERY_CELL,
    _goodputs("the same, geometric mean", 1.2, is_mean=True),
    Target("throughput, every cell", 0.99, _throughput),
    Target("TTFT p99 up to full load, every cell", 0.95, _p99, up_to_full_load),
    Target("the same, geometric mean", 1.1, _p99, up_to_full_load, is_mean=True),
    _itself("mixed fleets over the oracle", 1.1, Cell.over_oracle, _mixed),
    _itself("price of federation", 1.05, Cell.federation, _not_full),
    _itself("the same where memory is full", 1.1, Cell.federation, _full),
    Target("unfairness over the fairest of three", 1.0, Cell.unfairness, at_most=True),
)
