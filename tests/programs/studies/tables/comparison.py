"""One policy beside the best of several, cell by cell, and against its targets.

Ratios are written so that more is better: of times theirs over ours, of rates ours over theirs.
A ratio is rounded to two digits before it is compared with a target: the third is noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.programs.studies.tables.figures import (
    Figure,
    geomean,
    lost_ratio,
    throughput,
    ttft,
    unfairness,
)
from tests.programs.studies.tables.markdown import mark, seconds, share, table, times
from tests.programs.studies.tables.results import Results

Place = tuple[Any, ...]  # workload, fleet, load
TIMES = {point: ttft(point) for point in ("mean", "p50", "p90", "p99")}
UNSATURATED, SATURATED = 0.9, 1.0  # loads below and at which the oracle's targets hold


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell's ratios."""

    place: Place
    times: dict[str, float]  # against the best of each: rivals and skywalker
    rate: float  # likewise
    rate_of_skywalker: float
    oracle: float  # our mean TTFT over the best oracle's
    lost: float
    lost_most: float  # by any rival
    unfair: float
    unfair_best: float  # of rivals and skywalker

    @property
    def load(self) -> float:
        """Part of the fleet's capacity."""
        return float(self.place[2])


@dataclass(frozen=True, slots=True)
class Target:
    """What the policy should reach, over some cells."""

    text: str
    wanted: float
    read: Callable[[Cell], float]
    among: Callable[[Cell], bool] = lambda cell: True
    summary: Callable[[Sequence[float]], float] = min
    at_most: bool = False

    def row(self, cells: Sequence[Cell]) -> list[str]:
        """Target, value, and whether it is met; and in how many cells."""
        values = [self.read(cell) for cell in cells if self.among(cell)]
        if not values:
            return [self.text, times(self.wanted), "–", "–", "not played"]
        value = self.summary(values)
        met = [self._is_met(one) for one in values]
        sign = "≤" if self.at_most else "≥"
        return [
            self.text,
            f"{sign} {times(self.wanted)}",
            times(value),
            f"{sum(met)} of {len(met)}",
            mark(self._is_met(value)),
        ]

    def _is_met(self, value: float) -> bool:
        rounded = round(value, 2)
        return rounded <= self.wanted if self.at_most else rounded >= self.wanted


def _skewed(cell: Cell) -> bool:
    return cell.place[0] == "diurnal"


TARGETS = (
    Target("throughput, every cell", 1.0, lambda cell: cell.rate),
    Target("throughput of skywalker under skew", 1.1, lambda cell: cell.rate_of_skywalker, _skewed),
    Target("TTFT mean, geometric mean", 1.8, lambda cell: cell.times["mean"], summary=geomean),
    Target("TTFT p90, geometric mean", 1.6, lambda cell: cell.times["p90"], summary=geomean),
    Target("TTFT mean, every cell", 1.1, lambda cell: cell.times["mean"]),
    Target(
        "TTFT mean at full load, Mooncake",
        3.0,
        lambda cell: cell.times["mean"],
        lambda cell: cell.place[0] == "mooncake chat" and cell.load == SATURATED,
    ),
    Target(
        "TTFT p99 up to full load, every cell",
        1.0,
        lambda cell: cell.times["p99"],
        lambda cell: cell.load <= SATURATED,
    ),
    Target(
        "TTFT mean over the oracle's, below saturation",
        1.05,
        lambda cell: cell.oracle,
        lambda cell: cell.load <= UNSATURATED,
        max,
        at_most=True,
    ),
    Target(
        "TTFT mean over the oracle's, at saturation",
        1.10,
        lambda cell: cell.oracle,
        lambda cell: cell.load == SATURATED,
        max,
        at_most=True,
    ),
)


def compared(
    found: Results, *, ours: str, rivals: Sequence[str], skywalker: str, oracles: Sequence[str]
) -> str:
    """Targets, all policies by geometric mean, and every cell."""
    places = list(dict.fromkeys(place[:3] for place in found.places()))
    names = [*rivals, skywalker]
    cells = [_cell(found, place, ours, names, skywalker, oracles) for place in places]
    targets = [target.row(cells) for target in TARGETS]
    head = ["target", "wanted", "value", "cells that meet it", ""]
    return "\n\n".join(
        [
            f"**Targets**, {len(cells)} cells\n\n{table(head, targets)}",
            f"**All policies**, theirs over ours, geometric means\n\n{_policies(found, ours)}",
            f"**Cells**, best of {', '.join(names)} over ours\n\n{_cells(found, cells, ours)}",
        ]
    )


def _cell(
    found: Results,
    place: Place,
    ours: str,
    names: Sequence[str],
    skywalker: str,
    oracles: Sequence[str],
) -> Cell:
    def of(figure: Figure, name: str) -> float:
        return found.mean(figure, *place, name)

    rate = of(throughput, ours)
    return Cell(
        place,
        {
            point: min(of(figure, name) for name in names) / of(figure, ours)
            for point, figure in TIMES.items()
        },
        rate / max(of(throughput, name) for name in names),
        rate / of(throughput, skywalker),
        of(TIMES["mean"], ours) / min(of(TIMES["mean"], name) for name in oracles),
        of(lost_ratio, ours),
        max(of(lost_ratio, name) for name in names),
        of(unfairness, ours),
        min(of(unfairness, name) for name in names),
    )


def _policies(found: Results, ours: str) -> str:
    by_name: dict[str, list[Place]] = {}
    for place in found.places():
        by_name.setdefault(place[3], []).append(place[:3])
    rows = []
    for name, places in by_name.items():
        ratios = [
            geomean(
                found.mean(figure, *place, name) / found.mean(figure, *place, ours)
                for place in places
            )
            for figure in (*TIMES.values(), unfairness)
        ]
        rate = geomean(
            found.mean(throughput, *place, name) / found.mean(throughput, *place, ours)
            for place in places
        )
        lost = sum(found.mean(lost_ratio, *place, name) for place in places) / len(places)
        rows.append([name, str(len(places)), *map(times, ratios), times(rate), share(lost)])
    head = ["policy", "cells", *(f"TTFT {point}" for point in TIMES)]
    return table([*head, "unfairness", "throughput", "lost"], rows)


def _cells(found: Results, cells: Sequence[Cell], ours: str) -> str:
    rows = []
    for cell in cells:
        workload, engines, load = cell.place
        rows.append(
            [
                f"{workload}, {engines}, {load:g}",
                seconds(found.mean(TIMES["mean"], *cell.place, ours)),
                *map(times, cell.times.values()),
                times(cell.rate),
                times(cell.oracle),
                f"{share(cell.lost)} ({share(cell.lost_most)})",
                f"{times(cell.unfair)} ({times(cell.unfair_best)})",
            ]
        )
    head = ["cell", "TTFT mean s", *TIMES, "throughput", "over oracle"]
    return table([*head, "lost (most)", "unfairness (least)"], rows)
