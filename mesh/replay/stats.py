"""Samples and their summary: the one place that says what a percentile is.

A percentile here is the linear interpolation between the two nearest ranks, `(n - 1) * p` from
0, as in numpy's default and `statistics.quantiles(method="inclusive")`: with few samples it
moves smoothly instead of jumping from one request to the next.

Sums and counts are exact. Above `SAMPLES_MAX` values the percentiles come from a uniform
reservoir (Vitter, "Random sampling with a reservoir", 1985, algorithm R), so that hours of
inter-token times fit in 8 MB. The share of all values that lies below a percentile is then what
it says to within 0.02 points for p99 and 0.1 for p50, nineteen times in twenty. Rejected: a
histogram with fixed buckets, whose error shows at the small counts of a test run, which are the
common case.
"""

import math
import random
from array import array
from collections.abc import Iterable, Sequence

SAMPLES_MAX = 1_000_000
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}

Summary = dict[str, float | None]


class Samples:
    """Values of one measure, bounded in memory."""

    def __init__(self, rng: random.Random, limit: int = SAMPLES_MAX) -> None:
        self._rng = rng
        self._limit = limit
        self._kept = array("d")
        self._total = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take one more value."""
        self.count += 1
        self._total += value
        if len(self._kept) < self._limit:
            self._kept.append(value)
        elif (slot := self._rng.randrange(self.count)) < self._limit:
            self._kept[slot] = value

    def extend(self, values: Iterable[float]) -> None:
        """Take many."""
        for value in values:
            self.add(value)

    def summary(self) -> Summary:
        """Mean, p50, p90 and p99; all None when there is no value."""
        if not self.count:
            return dict.fromkeys(("mean", *PERCENTILES))
        ordered = sorted(self._kept)
        points = {name: percentile(ordered, share) for name, share in PERCENTILES.items()}
        return {"mean": self._total / self.count, **points}

    def curve(self, points: int) -> list[float]:
        """The distribution as `points` values (2 or more) of equal steps; [] without a value."""
        ordered = sorted(self._kept)
        steps = range(points) if ordered else range(0)
        return [percentile(ordered, step / (points - 1)) for step in steps]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the sorted, non-empty `ordered` lies."""
    rank = (len(ordered) - 1) * share
    below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return below + (above - below) * (rank - math.floor(rank))
