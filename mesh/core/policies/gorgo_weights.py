"""What the three terms of GORGO's cost are worth: as the paper sets them, or learned on line.

GORGO 3.4 leaves t_p and q̂ "tunable at runtime" and section 8 names the wish: tune them by the
TTFT observed. That is a linear fit, TTFT = rtt·w₁ + prefill·w₂ + queue·w₃ + base, learned by
recursive least squares with forgetting: exact where a gradient step would crawl, because the
terms differ in size by two orders and rise together. The base (what every request pays) is
fitted so that it doesn't distort the others; it is the same for all and decides nothing.

Three bounds keep it sane. Each error is clipped to a few times the usual one, since TTFT has a
long tail; each weight stays in its range; and forgetting stops where the terms have not varied
for long, or the first surprise would throw the weights about. Rejected: tuning by which of two
settings had the lower mean TTFT, which needs hours of steady load to tell them apart.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# In §2.4's example 6,500 running tokens delay by 300 ms and 4,200 queued ones by 195.75 ms: both
# are half of what Table 1's 0.0938 ms a token makes of them.
QUEUE_WEIGHT = 0.5

FORGETTING = 0.999  # a lesson counts half after 700 more
COVARIANCE_START = 10.0  # of a weight that nothing is known of, relative to errors of 1 s²
COVARIANCE_MAX = 10.0  # in sum; beyond it nothing is forgotten
ERROR_WEIGHT = 0.05  # of a new error in the running average of their sizes
ERRORS_MAX = 4.0  # an error counts as this many usual ones at most


class Terms(NamedTuple):
    """Of one placement, in seconds, unweighted; as weights, factors of them."""

    rtt_s: float
    prefill_s: float
    queue_s: float

    def sum(self, weights: "Terms") -> float:
        """Of the terms, each weighed."""
        return (
            self.rtt_s * weights.rtt_s
            + self.prefill_s * weights.prefill_s
            + self.queue_s * weights.queue_s
        )

    def times(self, weights: "Terms") -> "Terms":
        """Each term weighed."""
        return Terms(
            self.rtt_s * weights.rtt_s,
            self.prefill_s * weights.prefill_s,
            self.queue_s * weights.queue_s,
        )


AS_WRITTEN = Terms(1.0, 1.0, QUEUE_WEIGHT)
RANGES = ((0.5, 3.0), (0.2, 5.0), (0.0, 5.0), (0.0, 5.0))  # rtt, prefill, queue, base in seconds


class Weights(Protocol):
    """Factors of the terms."""

    @property
    def present(self) -> Terms:
        """The ones to weigh with now."""
        ...

    def learn(self, terms: Terms, ttft_s: float) -> None:
        """A placement with these terms, before weighing, had this TTFT."""
        ...


class FixedWeights:
    """As the paper sets them."""

    def __init__(self, weights: Terms = AS_WRITTEN) -> None:
        self.present = weights

    def learn(self, terms: Terms, ttft_s: float) -> None:
        """Nothing to learn."""


class TunedWeights:
    """Begins with the paper's, and follows what is observed."""

    def __init__(self, start: Terms = AS_WRITTEN) -> None:
        self._fit = [*start, 0.0]
        size = len(self._fit)
        self._covariance = [
            [COVARIANCE_START if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]
        self._usual_error_s: float | None = None

    @property
    def present(self) -> Terms:
        """The ones to weigh with now, each in its range."""
        return Terms(*self._fit[:3])

    @property
    def base_s(self) -> float:
        """What every request pays."""
        return self._fit[3]

    def learn(self, terms: Terms, ttft_s: float) -> None:
        """One step of recursive least squares."""
        inputs = (*terms, 1.0)
        spread = [_dot(row, inputs) for row in self._covariance]
        scale = FORGETTING + _dot(inputs, spread)
        error_s = self._clipped(ttft_s - _dot(self._fit, inputs))
        for place, (least, most) in enumerate(RANGES):
            moved = self._fit[place] + spread[place] / scale * error_s
            self._fit[place] = min(most, max(least, moved))
        self._narrow(spread, scale)

    def _clipped(self, error_s: float) -> float:
        usual_s = self._usual_error_s
        if usual_s is None:
            self._usual_error_s = abs(error_s)
            return error_s
        limit_s = ERRORS_MAX * usual_s
        clipped_s = min(limit_s, max(-limit_s, error_s))
        # The floor lets a fit that was perfect for a while learn again.
        self._usual_error_s = max(1e-3, usual_s + ERROR_WEIGHT * (abs(clipped_s) - usual_s))
        return clipped_s

    def _narrow(self, spread: list[float], scale: float) -> None:
        known = sum(self._covariance[place][place] for place in range(len(spread)))
        forgetting = FORGETTING if known < COVARIANCE_MAX else 1.0
        self._covariance = [
            [
                (value - spread[row] * spread[column] / scale) / forgetting
                for column, value in enumerate(values)
            ]
            for row, values in enumerate(self._covariance)
        ]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
