"""When E2 replicates a prefix: its requests wait twice as long as they did.

Preble 3.2: a prefix is replicated when its load is still too high after rebalancing, "average
queueing time doubles over H". The two halves of the window are compared. Doubling from next to
nothing is noise, so the later wait must also exceed what a replica costs: computing the prefix
once more.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

WAITS_MIN = 5  # requests in each half, for an average that means something
PREFIXES_MAX = 4096  # watched at once; beyond it the longest unused is forgotten

Prefix = TypeVar("Prefix", bound=Hashable)


@dataclass(slots=True)
class Waits:
    """Sums of one prefix, of this half of a window and of the one before."""

    half: int
    wait_s: float = 0.0
    requests: int = 0
    wait_s_before: float = 0.0
    requests_before: int = 0

    def enter(self, half: int) -> None:
        """Go on to that half; what is older than the one before it is dropped."""
        if half == self.half:
            return
        follows = half == self.half + 1
        self.wait_s_before = self.wait_s if follows else 0.0
        self.requests_before = self.requests if follows else 0
        self.half, self.wait_s, self.requests = half, 0.0, 0

    def doubled(self, least_s: float) -> bool:
        """Whether the average has, and is `least_s` or more."""
        if min(self.requests, self.requests_before) < WAITS_MIN:
            return False
        mean_s = self.wait_s / self.requests
        return mean_s >= least_s and mean_s >= 2.0 * self.wait_s_before / self.requests_before


class Scaling(Generic[Prefix]):
    """The waits of the prefixes that were in use of late."""

    def __init__(self, window_s: float) -> None:
        self._half_s = window_s / 2.0
        self._waits: OrderedDict[Prefix, Waits] = OrderedDict()

    def waited(self, prefix: Prefix, wait_s: float, now: float) -> None:
        """A request with that prefix began to be answered after waiting so long."""
        half = int(now // self._half_s)
        waits = self._waits.setdefault(prefix, Waits(half))
        self._waits.move_to_end(prefix)
        waits.enter(half)
        waits.wait_s += wait_s
        waits.requests += 1
        if len(self._waits) > PREFIXES_MAX:
            self._waits.popitem(last=False)

    def overloaded(self, prefix: Prefix, prefill_s: float, now: float) -> bool:
        """Whether another replica of this prefix, which costs `prefill_s`, is due."""
        waits = self._waits.get(prefix)
        if waits is None:
            return False
        waits.enter(int(now // self._half_s))
        return waits.doubled(prefill_s)

    def replicated(self, prefix: Prefix) -> None:
        """Judge it anew: what it waited before says nothing about two."""
        self._waits.pop(prefix, None)
