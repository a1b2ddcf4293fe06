"""Time to first token as a line, fitted on line to a candidate's answers, for the `mesh` policy.

    ttft_s = base_s + s_per_token × tokens to compute before it + s_per_decode × requests running

(GORGO, section 4.2, has the first two terms), by least squares with forgetting, so that an engine
that slows down is noticed within some thirty answers. A ridge pulls a candidate with few answers
towards what is known otherwise.
"""

from dataclasses import dataclass
from typing import NamedTuple

MEMORY = 0.97  # kept of the past at each answer: some thirty of them
RIDGE = 8.0  # answers
KILO = 1000.0  # tokens are counted in thousands inside, for well-scaled sums
ANCHOR = 0.3**2  # holds the slope, as short prompts determine none; in squared thousands of tokens


class FittedSpeed(NamedTuple):
    """The three numbers. Seconds, seconds per prompt token, seconds per running request."""

    base_s: float
    s_per_token: float
    s_per_decode: float


@dataclass(slots=True)
class SpeedFit:
    """Decayed sums over answers: of 1, x (thousands of tokens), n (running) and y (seconds)."""

    w: float = 0.0
    x: float = 0.0
    n: float = 0.0
    xx: float = 0.0
    nn: float = 0.0
    xn: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    ny: float = 0.0

    def add(self, x: float, n: float, y: float) -> None:
        """One answer."""
        self.w = MEMORY * self.w + 1.0
        self.x = MEMORY * self.x + x
        self.n = MEMORY * self.n + n
        self.xx = MEMORY * self.xx + x * x
        self.nn = MEMORY * self.nn + n * n
        self.xn = MEMORY * self.xn + x * n
        self.y = MEMORY * self.y + y
        self.xy = MEMORY * self.xy + x * y
        self.ny = MEMORY * self.ny + n * y

    def fade(self, share: float) -> None:
        """Let all answers so far count for this share of what they did."""
        share = share if share * self.w > 1e-3 else 0.0
        for name in self.__slots__:
            setattr(self, name, share * getattr(self, name))

    def speed(
        self, prior: FittedSpeed, slope_ridge: float = RIDGE, ridge: float = RIDGE
    ) -> FittedSpeed:
        """The ridge towards `prior`, which weighs as much as `ridge` answers like these.

        Its slope weighs `slope_ridge` of them, and ANCHOR. No number falls below a tenth of it, or
        below zero.
        """
        if not self.w:
            return prior
        base, slope, decode = prior.base_s, prior.s_per_token * KILO, prior.s_per_decode
        rest = (
            self.y - base * self.w - slope * self.x - decode * self.n,
            self.xy - base * self.x - slope * self.xx - decode * self.xn,
            self.ny - base * self.n - slope * self.xn - decode * self.nn,
        )
        db, ds, dn = _solve(
            (self.w + ridge, self.x, self.n),
            (self.xx + slope_ridge / self.w * self.xx + ANCHOR, self.xn),
            self.nn + ridge / self.w * self.nn + 1e-9,
            rest,
        )
        return FittedSpeed(
            max(0.1 * base, base + db), max(0.1 * slope, slope + ds) / KILO, max(0.0, decode + dn)
        )


def _solve(
    first: tuple[float, float, float],
    second: tuple[float, float],
    third: float,
    rest: tuple[float, float, float],
) -> tuple[float, float, float]:
    """The symmetric system of three, by elimination; the ridge keeps it regular."""
    a, b, c = first
    d, e = second
    p, q, r = rest
    d, e, q = d - b * b / a, e - b * c / a, q - b * p / a
    f, r = third - c * c / a, r - c * p / a
    f, r = f - e * e / d, r - e * q / d
    z = r / f
    y = (q - e * z) / d
    return (p - b * y - c * z) / a, y, z
