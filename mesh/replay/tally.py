"""Counts and times of finished requests, for the whole run and per region.

Times are taken over complete answers only: a request that was shed in a millisecond would make
the mesh look quick. Token counts are the engines' own, from `usage`.

A percentile is the linear interpolation between the two nearest ranks, `(n - 1) * p` from 0, as in
numpy's default. Sums and counts are exact. Above `SAMPLES_MAX` values the percentiles come from a
uniform reservoir (Vitter, "Random sampling with a reservoir", 1985, algorithm R), so that hours of
inter-token times fit in 8 MB; the share of values below a percentile is then right to within 0.02
points for p99 and 0.1 for p50, nineteen times in twenty. A histogram with fixed buckets would be
wrong at the small counts of a test run.
"""

import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
        self.count += 1
        self._total += value
        if len(self._kept) < self._limit:
            self._kept.append(value)
        elif (slot := self._rng.randrange(self.count)) < self._limit:
            self._kept[slot] = value

    def extend(self, values: Iterable[float]) -> None:
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


class RequestOutcome(StrEnum):
    OK = "ok"  # 200, and the stream complete
    SHED = "shed"  # refused with 429 or 503
    FAILED = "failed"  # everything else


@dataclass(frozen=True, slots=True)
class RecordedUsage:
    """The engine's own count of an answer; `cached_tokens` None where it gave none."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """How one request ended. `reason` says why, where it is not OK; times are seconds."""

    outcome: RequestOutcome
    reason: str = ""
    late_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    gaps_s: Sequence[float] = ()
    usage: RecordedUsage | None = None


@dataclass(slots=True)
class TokenSums:
    """Sums over answers that reported usage, and the trace's prompt tokens of the same requests."""

    answers: int = 0
    prompt_asked: int = 0
    prompt: int = 0
    output: int = 0
    cached: int = 0
    cached_named: int = 0  # answers that reported cached tokens at all


class GroupTally:
    def __init__(self, rng: random.Random) -> None:
        self.outcomes: Counter[RequestOutcome] = Counter()
        self.failures: Counter[str] = Counter()
        self.tokens = TokenSums()
        self.late_s = Samples(rng)
        self.ttft_s = Samples(rng)
        self.e2e_s = Samples(rng)
        self.itl_s = Samples(rng)

    @property
    def requests(self) -> int:
        """All requests that ended, with any outcome."""
        return self.outcomes.total()

    def add(self, result: RequestResult, prompt_tokens_asked: int) -> None:
        self.outcomes[result.outcome] += 1
        if result.late_s is not None:
            self.late_s.add(result.late_s)
        if result.outcome is RequestOutcome.FAILED:
            self.failures[result.reason] += 1
        if result.outcome is RequestOutcome.OK:
            if result.ttft_s is not None:
                self.ttft_s.add(result.ttft_s)
            if result.e2e_s is not None:
                self.e2e_s.add(result.e2e_s)
            self.itl_s.extend(result.gaps_s)
        if result.usage:
            self._add_tokens(result.usage, prompt_tokens_asked)

    def _add_tokens(self, usage: RecordedUsage, prompt_tokens_asked: int) -> None:
        self.tokens.answers += 1
        self.tokens.prompt_asked += prompt_tokens_asked
        self.tokens.prompt += usage.prompt_tokens
        self.tokens.output += usage.output_tokens
        if usage.cached_tokens is not None:
            self.tokens.cached += usage.cached_tokens
            self.tokens.cached_named += 1


class RunTally:
    """The whole run's tally and each region's."""

    def __init__(self, regions: Iterable[str], rng: random.Random) -> None:
        self.total = GroupTally(rng)
        self.regions = {region: GroupTally(rng) for region in regions}

    def add(self, region: str, result: RequestResult, prompt_tokens_asked: int) -> None:
        self.regions[region].add(result, prompt_tokens_asked)
        self.total.add(result, prompt_tokens_asked)
