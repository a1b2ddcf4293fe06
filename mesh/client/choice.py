"""Which region to ask: the nearest that is well, then the others, then those that failed.

Round trips are measured by the client itself, because only it knows where it is. The choice
stays where it is until another region is clearly nearer: a conversation that wanders between two
equally near regions finds its prefix cached in neither. A region that failed rests, twice as long
each time and never all clients equally long, so that a region that comes back isn't met by
everybody at once. When all rest, the one whose rest ends first is asked all the same: a try may
succeed and an error can't.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from random import Random

REST_S, REST_S_MAX = 1.0, 60.0
# Nearer by a fifth and by 5 ms, or it isn't worth the caches left behind.
NEARER_RATIO, NEARER_S = 0.8, 0.005
REGIONS_MAX = 32


@dataclass(slots=True)
class _Standing:
    rtt_s: float | None = None
    failures: int = 0  # in a row
    rests_until: float = -inf


class Choice:
    """Pure: `now` is seconds of any monotonic clock, `dice` spreads the rests."""

    def __init__(self, urls: Iterable[str], dice: Random) -> None:
        self._dice = dice
        self._standings: dict[str, _Standing] = {}
        self._present: str | None = None
        self.learn(urls)

    @property
    def urls(self) -> tuple[str, ...]:
        """Every region that is known."""
        return tuple(self._standings)

    def learn(self, urls: Iterable[str]) -> None:
        """There are these, too."""
        for url in urls:
            if len(self._standings) < REGIONS_MAX:
                self._standings.setdefault(url, _Standing())

    def measured(self, url: str, rtt_s: float) -> None:
        """It is well, and so far away."""
        self._standings[url] = _Standing(rtt_s)

    def answered(self, url: str) -> None:
        """It is well."""
        standing = self._standings[url]
        standing.failures, standing.rests_until = 0, -inf

    def failed(self, url: str, now: float, retry_after_s: float = 0.0) -> None:
        """It is not; `retry_after_s` is what it said itself, 0 if nothing."""
        standing = self._standings[url]
        rest_s = min(REST_S_MAX, REST_S * 2.0 ** min(standing.failures, 10))
        rest_s = max(self._dice.uniform(0.5, 1.0) * rest_s, min(REST_S_MAX, retry_after_s))
        standing.failures += 1
        standing.rests_until = max(standing.rests_until, now + rest_s)

    def order(self, now: float) -> list[str]:
        """All regions, the one to ask first in front."""
        well = [url for url, it in self._standings.items() if it.rests_until <= now]
        well.sort(key=self._rtt_s)
        resting = [url for url in self._standings if url not in well]
        resting.sort(key=lambda url: self._standings[url].rests_until)
        if well:
            self._present = first = self._stay_or_go(well)
            well.remove(first)
            well.insert(0, first)
        return well + resting

    def _stay_or_go(self, well: list[str]) -> str:
        present, nearest = self._present, well[0]
        if present not in well:
            return nearest
        limit_s = min(NEARER_RATIO * self._rtt_s(present), self._rtt_s(present) - NEARER_S)
        return nearest if self._rtt_s(nearest) < limit_s else present

    def _rtt_s(self, url: str) -> float:
        rtt_s = self._standings[url].rtt_s
        return inf if rtt_s is None else rtt_s
