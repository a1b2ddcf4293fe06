"""How fast offline work is done: measured, and expected in the hours to come.

Speed is measured while lines wait and no replica has room for more: at other times more could have
been computed than was. The hour under way goes on as measured. For later hours home counts by its
forecast, and peers by the slack that they claim: `is_trusting` says whether claims count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf

from mesh.core.offline.forecast import HOUR_S

WINDOW_S = 300.0  # of the measured speed: longer than most answers
MEASURED_S_MIN = 30.0  # of work, before a speed is known
KEPT_S = 3600.0  # without work: then a speed is forgotten
DAYS_MAX = 60  # that are looked ahead, and more: no window is longer
HOURS = 24  # that are expected one by one; after them they repeat


class Throughput:
    """Tokens a second while there is work; frozen while there is none."""

    def __init__(self) -> None:
        self._tokens = 0.0  # faded
        self._busy_s = 0.0
        self._quiet_s = 0.0

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def pass_time(self, passed_s: float, *, is_busy: bool) -> None:
        if is_busy:
            self._quiet_s = 0.0
            self._tokens *= exp(-passed_s / WINDOW_S)
            self._busy_s = min(self._busy_s + passed_s, 100 * WINDOW_S)
            return
        self._quiet_s += passed_s
        if self._quiet_s > KEPT_S:
            self._tokens = self._busy_s = 0.0

    def per_s(self) -> float | None:
        """None until it was measured for a while."""
        if self._busy_s < MEASURED_S_MIN:
            return None
        return self._tokens / (WINDOW_S * (1 - exp(-self._busy_s / WINDOW_S)))


@dataclass(slots=True)
class Speeds:
    """Of one model, as measured."""

    home: Throughput
    peers: Throughput
    raised: Throughput  # of lines that were raised to online priority


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens a second expected in each of the next hours; after the last one they repeat."""

    hourly: tuple[float, ...]
    is_forecast: bool = False  # else it is the measured speed, for ever

    def until(self, seconds: float) -> float:
        """Tokens from now on."""
        round_s = len(self.hourly) * HOUR_S
        rounds = int(max(0.0, seconds) // round_s)
        tokens, seconds = rounds * sum(self.hourly) * HOUR_S, seconds - rounds * round_s
        for per_s in self.hourly:
            tokens += min(max(0.0, seconds), HOUR_S) * per_s
            seconds -= HOUR_S
        return tokens

    def time_for(self, tokens: float) -> float:
        """Seconds from now on until so many are computed."""
        if tokens <= 0:
            return 0.0
        each_round = sum(self.hourly) * HOUR_S
        if tokens > each_round * DAYS_MAX * 24:
            return inf
        rounds = int(tokens // each_round)
        tokens -= rounds * each_round
        seconds = float(rounds * len(self.hourly) * HOUR_S)
        for per_s in self.hourly:
            if tokens <= per_s * HOUR_S:
                return seconds + (tokens / per_s if per_s > 0 else 0.0)
            tokens, seconds = tokens - per_s * HOUR_S, seconds + HOUR_S
        return seconds

    def plus(self, per_s: float) -> "Capacity":
        return replace(self, hourly=tuple(hour + per_s for hour in self.hourly))


def expected(
    forecast: Sequence[int],
    promised: Sequence[float],
    speeds: Speeds,
    *,
    is_trusting: bool,
) -> Capacity | None:
    """What will be computed; None if nothing is known.

    `forecast`: tokens of home's replicas in each of the next hours; `promised`: of the peers.
    """
    home, peers = speeds.home.per_s(), speeds.peers.per_s()
    if not is_trusting:
        promised = ()
    if not forecast and not promised and home is None and peers is None:
        return None
    hourly = []
    for hour in range(HOURS):
        here = forecast[hour] / HOUR_S if hour < len(forecast) else home or 0.0
        there = promised[hour] / HOUR_S if hour < len(promised) else peers or 0.0
        if hour == 0:
            here, there = here if home is None else home, there if peers is None else peers
        hourly.append(here + there)
    return Capacity(tuple(hourly), bool(forecast))
