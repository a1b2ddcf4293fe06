"""Seconds per prefill token of this engine, learned from the answers that pass.

A first token costs `base + slope * uncached prompt tokens` (GORGO, section 4.2). The line is
fitted by least squares with exponential forgetting, so mixed GPU types need no table and an
engine that slows down is noticed within some fifty answers.

Five decayed sums instead of the matrix form of recursive least squares: the same line, but the
numbers can be read, and nothing winds up while all prompts have one length. A sample far off the
line is pulled to three standard deviations of it: one request that met a stall must not bend the
line, a lasting change still does, because the deviation grows with every pulled sample.

The line is told only once its slope is twice its own standard error. That one rule covers too
few samples, prompts of one length, noise, and the nonsense of a negative slope.
"""

from dataclasses import dataclass
from math import sqrt

FORGETTING = 0.98  # a memory of 1 / (1 - 0.98) = 50 answers
SAMPLES_MIN = 8
OUTLIER_DEVIATIONS = 3.0
SLOPE_ERRORS_MIN = 2.0
SCALE = 1000.0  # tokens are counted in thousands inside, for well-scaled sums


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """Time to first token as a line over uncached prompt tokens."""

    s_per_token: float
    base_s: float

    def ttft_s(self, uncached_tokens: int) -> float:
        return self.base_s + self.s_per_token * uncached_tokens


class PrefillEstimator:
    """Feed it samples of answers that met an idle-enough engine; ask it for the line."""

    __slots__ = ("_count", "_line", "_w", "_x", "_xx", "_xy", "_y", "_yy")

    def __init__(self) -> None:
        self._count = 0
        self._line: PrefillLine | None = None
        self._w = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def add(self, uncached_tokens: int, ttft_s: float) -> None:
        """One answer's uncached prompt tokens and its time from hand-over to first token."""
        x = uncached_tokens / SCALE
        y = self._pulled(x, ttft_s)
        self._count += 1
        self._w = FORGETTING * self._w + 1.0
        self._x = FORGETTING * self._x + x
        self._y = FORGETTING * self._y + y
        self._xx = FORGETTING * self._xx + x * x
        self._xy = FORGETTING * self._xy + x * y
        self._yy = FORGETTING * self._yy + y * y
        self._line = self._known()

    def line(self) -> PrefillLine | None:
        """The line, or None while it is not known well enough to decide by."""
        return self._line

    def _known(self) -> PrefillLine | None:
        fit = self._fit()
        if fit is None or self._count < SAMPLES_MIN:
            return None
        slope, base, deviation = fit
        error = deviation / sqrt(self._spread())
        if slope <= 0.0 or slope < SLOPE_ERRORS_MIN * error:
            return None
        return PrefillLine(s_per_token=slope / SCALE, base_s=max(0.0, base))

    def _spread(self) -> float:
        """Sum of squared distances of the token counts from their mean."""
        return self._xx - self._x * self._x / self._w

    def _fit(self) -> tuple[float, float, float] | None:
        """Slope, base and standard deviation of the rest; None while no line exists."""
        if self._w < 2.0 or self._spread() <= 1e-9 * self._xx:
            return None
        slope = (self._xy - self._x * self._y / self._w) / self._spread()
        base = (self._y - slope * self._x) / self._w
        rest = self._yy - base * self._y - slope * self._xy
        return slope, base, sqrt(max(0.0, rest) / self._w)

    def _pulled(self, x: float, y: float) -> float:
        fit = self._fit()
        if fit is None or self._count < SAMPLES_MIN:
            return y
        slope, base, deviation = fit
        expected = base + slope * x
        # A fit without any rest (a simulator's) must still be able to move.
        reach = max(OUTLIER_DEVIATIONS * deviation, 0.05 * abs(expected))
        return min(max(y, expected - reach), expected + reach)
