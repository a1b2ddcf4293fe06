"""Which hand-offs of each router have arrived: `Heartbeat.taken`.

A router adds to a replica's pending what it handed off beyond this number, so that two
placements within one heartbeat don't both see an idle replica.

The *last* number is kept, not the highest: one router sends over one connection, so its numbers
arrive in order, and a router that restarted and counts from 1 again is right at once.
"""

from agents.core.work import Handoff
from schemas.ids import RegionId, RouterId

ROUTERS_MAX = 64  # of its own region and of an adopter; more than they run


class Taken:
    """The last hand-off number of each router, the latest routers kept.

    `owner`: the region of an adopter's router, None for the replica's own region.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[tuple[RegionId | None, RouterId], int] = {}

    def note(self, handoff: Handoff) -> None:
        router = (handoff.owner, handoff.router)
        self._last.pop(router, None)
        if len(self._last) >= ROUTERS_MAX:
            del self._last[next(iter(self._last))]
        self._last[router] = handoff.number

    def forget(self, router: RouterId, owner: RegionId | None = None) -> None:
        """The router restarted: its numbers start anew."""
        self._last.pop((owner, router), None)

    def snapshot(self, owner: RegionId | None = None) -> dict[RouterId, int]:
        return {router: last for (of, router), last in self._last.items() if of == owner}
