"""Medians, spreads and comparisons of rounds that were played in turns.

Two systems are compared round by round, so that what slows the whole machine for a while slows
both sides of a pair. A claim holds when it holds in every round; where some rounds show it and
others no, nothing was shown.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether a figure is at most its limit."""

    HIT = "hit"
    MISS = "**miss**"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Spread:
    """The rounds' median, lowest and highest."""

    median: float
    low: float
    high: float

    def verdict(self, at_most: float) -> Verdict:
        """Inconclusive where the limit is inside the spread."""
        if self.high <= at_most:
            return Verdict.HIT
        return Verdict.MISS if self.low > at_most else Verdict.INCONCLUSIVE


def spread(values: Sequence[float]) -> Spread | None:
    """Of those rounds that have a figure; None if none has."""
    known = [value for value in values if not math.isnan(value)]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def quartiles(values: Sequence[float]) -> Spread | None:
    """As `spread`, with the quartiles as lowest and highest: what one odd round does not move."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return spread(known)
    low, median, high = statistics.quantiles(known, method="inclusive")
    return Spread(median, low, high)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours to theirs, round by round; NaN where a round lacks one of them."""
    return [a / b if b else math.nan for a, b in zip(ours, theirs, strict=True)]


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """What ours has more, round by round."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]
