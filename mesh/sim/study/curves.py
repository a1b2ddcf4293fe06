"""What pictures need and reports have no place for: distributions, and regions over time.

Times of day are counted in slices of the run. Slices double when they are too many, so a day
and a minute both keep between `SLICES_MAX / 2` and `SLICES_MAX` points, whatever the length.
"""

from collections.abc import Iterable
from random import Random

from mesh.replay.stats import Samples
from mesh.replay.tally import Outcome
from mesh.sim.ask import Answered, Ask
from mesh.sim.world import SETTLE_S
from schemas.ids import RegionId

SLICES_MAX = 256
SLICE_S = 1 / 16  # the narrowest; binary, so that doubled slices have the same edges
CURVE_POINTS = 512


class Slices:
    """Counts over time, for each of some groups."""

    def __init__(self, groups: Iterable[RegionId]) -> None:
        self.slice_s = SLICE_S
        self._counts = {group: [0] * SLICES_MAX for group in groups}
        self._used = 0

    def add(self, group: RegionId, at_s: float) -> None:
        """Count one at that time, from 0."""
        while at_s >= self.slice_s * SLICES_MAX:
            self._double()
        place = int(at_s / self.slice_s)
        self._counts[group][place] += 1
        self._used = max(self._used, place + 1)

    def rates_per_s(self) -> dict[RegionId, list[float]]:
        """Counts a second, slice by slice, up to the last slice that any group has used."""
        return {
            group: [count / self.slice_s for count in counts[: self._used]]
            for group, counts in self._counts.items()
        }

    def _double(self) -> None:
        self.slice_s *= 2
        self._used = (self._used + 1) // 2
        for counts in self._counts.values():
            pairs = zip(counts[::2], counts[1::2], strict=True)
            counts[:] = [sum(pair) for pair in pairs] + [0] * (SLICES_MAX // 2)


class Curves:
    """Fed with every reported end of a run."""

    def __init__(self, regions: Iterable[RegionId], seed: int) -> None:
        regions = tuple(regions)
        self.ttft_s = Samples(Random(seed))
        self.asked = Slices(regions)  # where clients are, when they asked
        self.answered = Slices(regions)  # where replicas are, when they were done

    def add(self, ask: Ask, answered: Answered, now: float) -> None:
        """One request's end, at the world's time `now`."""
        self.asked.add(ask.region, ask.asked_at - SETTLE_S)
        if answered.outcome is not Outcome.OK or ask.first_at is None:
            return
        self.ttft_s.add(ask.first_at - ask.asked_at)
        if answered.replica is not None:  # replicas are named after their region
            site = RegionId(answered.replica.rpartition("-")[0])
            self.answered.add(site, now - SETTLE_S)

    def ttft_curve_s(self) -> list[float]:
        """Times to first token at equal steps from the quickest to the slowest."""
        return self.ttft_s.curve(CURVE_POINTS)
