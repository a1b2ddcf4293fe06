"""The largest value of a knob with which online requests keep their objectives.

HyGen's SLO-aware profiler (Sun et al., 2025, §4.2): a binary search over test runs. The knob is the
latency budget of an iteration, in seconds; HyGen* turns the rate of offline requests in the same
way. An objective is a limit of one measure of the online requests alone; several may be given, and
a run keeps them if it keeps each. A tolerance is relative to a run without offline work.

The search believes that a larger knob never makes online requests quicker. Real runs waver a
little, most of all in 99th percentiles: every trial is in the result, so that a reader sees it.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Measure(StrEnum):
    """What an objective may limit."""

    TTFT_MEAN = "mean TTFT"
    TTFT_P99 = "p99 TTFT"
    TBT_MEAN = "mean TBT"
    TBT_P99 = "p99 TBT"


OnlineLatency = Mapping[Measure, float]  # seconds, of one run
Limits = Mapping[Measure, float]  # seconds at most


class Trial(NamedTuple):
    """One test run."""

    knob: float
    latency: OnlineLatency
    kept: bool


@dataclass(frozen=True, slots=True)
class SloProfile:
    """What the search found. `knob` is None if even the smallest value breaks an objective."""

    knob: float | None
    limits: Limits
    trials: tuple[Trial, ...]


def limits_of(alone: OnlineLatency, tolerances: Mapping[Measure, float]) -> Limits:
    """Limits from a run without offline work; a tolerance of 0.05 allows 5 % more.

    Raises ValueError for no tolerance, a negative one, or a run that has no such measure.
    """
    if not tolerances:
        raise ValueError("no objective: give a tolerance for one measure at least")
    limits = {}
    for measure, tolerance in tolerances.items():
        if not 0.0 <= tolerance < math.inf:
            raise ValueError(f"tolerance of {measure} is {tolerance}: it should be 0 or more")
        if not math.isfinite(alone.get(measure, math.nan)):
            raise ValueError(f"the run without offline work has no {measure}")
        limits[measure] = alone[measure] * (1.0 + tolerance)
    return limits


def keeps(latency: OnlineLatency, limits: Limits) -> bool:
    """Whether a run kept every limit; a measure that it lacks counts as broken."""
    return all(latency.get(measure, math.inf) <= limit for measure, limit in limits.items())


def levels(low: float, high: float, count: int) -> tuple[float, ...]:
    """The values to search among, from low to high, each by the same factor above the last.

    Several searches over the same levels can share their runs. Raises ValueError.
    """
    if not (0.0 < low < high < math.inf and count >= 2):
        raise ValueError(f"levels need 0 < low < high and 2 or more, not {low}, {high}, {count}")
    return tuple(low * (high / low) ** (step / (count - 1)) for step in range(count))


def search(
    limits: Limits, values: tuple[float, ...]
) -> Generator[float, OnlineLatency, SloProfile]:
    """Find the largest of the ascending `values` whose run keeps the limits, in log2 runs.

    Each value that it yields is to be played, and the run's latencies sent back.
    """
    trials: list[Trial] = []
    below, above = -1, len(values)
    while above - below > 1:
        middle = (below + above) // 2
        latency = yield values[middle]
        kept = keeps(latency, limits)
        trials.append(Trial(values[middle], latency, kept))
        below, above = (middle, above) if kept else (below, middle)
    return SloProfile(values[below] if below >= 0 else None, limits, tuple(trials))
