"""Histograms in the wall seconds that a client of this process sees.

Own and tiny instead of prometheus_client: a page must carry exactly the names, labels and
buckets of the engine it stands for, and twelve engines on one machine are scraped ten times a
second each.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

# vLLM V1's own buckets.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts by upper bound, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """The same value, seen that many times."""
        self._counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    @property
    def count(self) -> int:
        """How many values were seen."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(le, values at or below it), ending with +Inf."""
        names = (*map(str, self.bounds), "+Inf")
        return zip(names, accumulate(self._counts), strict=True)


class Meters:
    """What the page shows beyond the engine's own numbers."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(_TTFT_S)
        self.itl_s = Histogram(_ITL_S)
        self.e2e_s = Histogram(_E2E_S)
        self.ended: Counter[str] = Counter()  # by finish reason
        self._tokens_before = 0
        self._seen_at = 0.0
        self._tokens_per_s = 0.0

    def throughput(self, generated_tokens: int, now: float) -> float:
        """Tokens per second since the last look that was a second ago or more."""
        elapsed_s = now - self._seen_at
        if elapsed_s >= 1.0:
            self._tokens_per_s = (generated_tokens - self._tokens_before) / elapsed_s
            self._tokens_before, self._seen_at = generated_tokens, now
        return self._tokens_per_s
