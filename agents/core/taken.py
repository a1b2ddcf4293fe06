"""Which hand-offs of each router have arrived: `Heartbeat.taken`.

A router adds to a replica's pending what it handed off beyond this number, so that two
placements within one heartbeat don't both see an idle replica.

The *last* number is kept, not the highest: one router sends over one connection, so its numbers
arrive in order, and a router that restarted and counts from 1 again is right at once.
"""

from agents.core.work import Handoff
from schemas.ids import RouterId

ROUTERS_MAX = 64  # routers of one region; more than any region runs


class Taken:
    """The last hand-off number of each router of the region, the latest routers kept."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[RouterId, int] = {}

    def note(self, handoff: Handoff) -> None:
        self._last.pop(handoff.router, None)
        if len(self._last) >= ROUTERS_MAX:
            del self._last[next(iter(self._last))]
        self._last[handoff.router] = handoff.number

    def forget(self, router: RouterId) -> None:
        """The router restarted: its numbers start anew."""
        self._last.pop(router, None)

    def snapshot(self) -> dict[RouterId, int]:
        return dict(self._last)
