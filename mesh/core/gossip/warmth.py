"""Whether a router that has started knows what its region's replicas hold.

It does when a sibling has told it all, or when there is nobody to ask: it is alone, or all routers
of the region have just started. Until then it serves as well as it can.

Rejected: taking a lone router's own set back from a peer. Peers were told what the region holds,
not which replica holds it, and a placement here needs the replica; nor do they hear that one was
restarted meanwhile. Its engines say by their answers soon enough what they have.
"""

from collections.abc import Mapping

from schemas.ids import RouterId

ALONE_S = 1.5  # three signs of life of somebody else's would have come
ASK_S = 0.5
GIVE_UP_S = 10.0


class Warmth:
    """`tick` until `warm_at` is set."""

    def __init__(self) -> None:
        self.warm_at: float | None = None
        self.source: RouterId | None = None  # the sibling that told it all
        self._began_at: float | None = None
        self._asked_at = float("-inf")
        self._asked: list[RouterId] = []

    def told_all(self, router: RouterId, now: float) -> None:
        """This sibling has."""
        if self.warm_at is None:
            self.warm_at, self.source = now, router

    def end(self, now: float) -> None:
        """There is nobody to ask."""
        if self.warm_at is None:
            self.warm_at = now

    def tick(self, siblings: Mapping[RouterId, bool], now: float) -> RouterId | None:
        """Whom to ask for everything now. `siblings`: those that live, and whether each is warm."""
        if self._began_at is None:
            self._began_at = now
        since_s = now - self._began_at
        warm = [router for router, is_warm in siblings.items() if is_warm]
        if since_s >= (GIVE_UP_S if warm else ALONE_S):
            self.end(now)
            return None
        if not warm or now - self._asked_at < ASK_S:
            return None
        self._asked_at = now
        choice = min(warm, key=lambda router: (self._asked.count(router), router))
        self._asked.append(choice)
        return choice
