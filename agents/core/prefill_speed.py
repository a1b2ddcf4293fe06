"""The engine's prefill line, learned from responses that had their prefill to themselves."""

from dataclasses import dataclass
from math import sqrt

PREFILL_FORGETTING = 0.98  # a memory of 1 / (1 - 0.98) = 50 answers
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
    """The engine's prefill line, learned from responses that had its prefill to themselves.

    A first token costs `base + slope * uncached prompt tokens` (GORGO, section 4.2). The line is
    fitted by least squares over five decayed sums, so an engine that slows down is noticed within
    some fifty answers. A sample far off the line is pulled to three standard deviations of it: one
    stall must not bend the line, a lasting change still does, because each pulled sample raises the
    deviation. `line` is None until its slope is twice its standard error, which covers too few
    samples, prompts of one length, noise, and negative slopes.
    """

    def __init__(self) -> None:
        self.line: PrefillLine | None = None
        self._count = 0
        self._w = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def add(self, uncached_tokens: int, ttft_s: float) -> None:
        """One response's uncached prompt tokens and its time to first token."""
        x = uncached_tokens / SCALE
        y = self._pulled(x, ttft_s)
        self._count += 1
        self._w = PREFILL_FORGETTING * self._w + 1.0
        self._x = PREFILL_FORGETTING * self._x + x
        self._y = PREFILL_FORGETTING * self._y + y
        self._xx = PREFILL_FORGETTING * self._xx + x * x
        self._xy = PREFILL_FORGETTING * self._xy + x * y
        self._yy = PREFILL_FORGETTING * self._yy + y * y
        self.line = self._known()

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
