"""Answers to those who asked, each at the pace that its link's budget allows.

One answer an asker: whoever asks again while it is still being said is not heard, so impatience
costs no bytes and can't put the end off. Budgets and room are per region, whoever asks there: a
region whose routers all start at once, or that invents routers, waits longer, and takes nothing
from the others.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh.core.gossip.budget import Budget
from schemas.gossip import TrieAnswer, size_bytes
from schemas.ids import REGION_ROUTERS_MAX, RegionId

ASKERS_MAX = 256
REGIONS_MAX = 256
BURST_S = 4.0


@dataclass(slots=True)
class Repair:
    """What is still to be said to one asker."""

    region: RegionId
    left: deque[TrieAnswer]


class Repairs:
    """By the inbox that the answer goes to."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s`: to each region."""
        self._bytes_per_s = bytes_per_s
        self._routers = 1
        self._of: dict[str, Repair] = {}
        self._budgets: dict[RegionId, Budget] = {}

    def share(self, routers: int) -> None:
        """The budgets are the links': so many routers of this region answer over them."""
        self._routers = routers
        for budget in self._budgets.values():
            budget.share(routers, self._bytes_per_s, BURST_S)

    def has_room(self, inbox: str, region: RegionId) -> bool:
        """Whether an answer to that inbox would be taken; ask before you build it.

        Not while one is still being said there. Askers beyond the limits ask again.
        """
        if inbox in self._of or len(self._of) >= ASKERS_MAX:
            return False
        return sum(repair.region == region for repair in self._of.values()) < REGION_ROUTERS_MAX

    def put(self, inbox: str, region: RegionId, answers: Sequence[TrieAnswer]) -> None:
        """Say this to that inbox, as soon as may be. It must have room."""
        self._of[inbox] = Repair(region, deque(answers))

    def due(self, now: float) -> Iterator[tuple[RegionId, str, TrieAnswer]]:
        """What may go now: to which region, inbox and message."""
        for inbox, repair in list(self._of.items()):
            budget = self._budget(repair.region)
            while repair.left and budget.spend(size_bytes(repair.left[0]), now):
                yield repair.region, inbox, repair.left.popleft()
            if not repair.left:
                del self._of[inbox]

    def _budget(self, region: RegionId) -> Budget:
        budget = self._budgets.get(region)
        if budget is None:
            if len(self._budgets) >= REGIONS_MAX:
                del self._budgets[next(iter(self._budgets))]
            bytes_per_s = self._bytes_per_s / self._routers
            budget = self._budgets[region] = Budget(bytes_per_s, bytes_per_s * BURST_S)
        return budget
