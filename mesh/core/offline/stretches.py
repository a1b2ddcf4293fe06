"""Which line of one job a place gets next, so that few prefixes are computed in two places.

Lines wait in the depth-first order of their prompts' prefixes (`schemas.offline_queue`). A place, a
replica or a peer region, works along a stretch of that order: from the line that it got last to
where the next place's stretch begins. A line that comes back waits where it waited; the stretch of
the place that had it begins there again, if no other one begins in between. A place whose stretch
is empty takes what lies before all stretches, or else the second part of a long one, cut where the
fewest blocks are shared. So a subtree of prompts goes to one replica, and a subtree that is all
there is goes to as many as have room.

Now and then the oldest line is next, wherever it lies (`OfflineQueue.chooses_by_prefix`).
"""

from collections.abc import Callable

from sortedcontainers import SortedDict

from schemas.offline_queue import OfflineQueue, Place

PROBES = 5  # evenly spaced waiting lines: a long stretch holds one of them
LOOKED_PAST = 8  # lines that a place can't take, before its stretch counts as stuck

Accepts = Callable[[int], bool]


class Stretches:
    """Of one queue; owners are names of replicas and regions."""

    def __init__(self, queue: OfflineQueue) -> None:
        self._queue = queue
        self._owners: SortedDict[Place, str] = SortedDict()  # by where their stretches begin
        self._begins: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def leave(self, owner: str) -> None:
        """It takes no more: its stretch falls to the one before."""
        begin = self._begins.pop(owner, None)
        if begin is not None:
            del self._owners[begin]

    def came_back(self, owner: str, key: int) -> None:
        """A line that this place had waits again."""
        begin, place = self._begins.get(owner), self._queue.place(key)
        if begin is None or place >= begin:
            return
        before = self._owners.bisect_left(begin) - 1
        if before < 0 or self._owners.peekitem(before)[0] < place:
            self._begin_at(place, owner)

    def next_for(self, owner: str, accepts: Accepts) -> int | None:
        """The line that this place should take now; None if there is none that it accepts."""
        queue = self._queue
        if not len(queue):
            return None
        if not queue.chooses_by_prefix():
            oldest = queue.oldest()
            if oldest is not None and accepts(oldest):
                return oldest
        begin = self._begins.get(owner)
        if begin is not None:
            end = self._next_begin(begin)
            if queue.has_between(begin, end):
                return self._take_from(begin, end, owner, accepts)
        first = self._owners.peekitem(0)[0] if self._owners else None
        key = self._take_from(None, first, owner, accepts)
        return self._take_over(owner, accepts) if key is None and first is not None else key

    def _next_begin(self, begin: Place) -> Place | None:
        after = self._owners.bisect_right(begin)
        return self._owners.peekitem(after)[0] if after < len(self._owners) else None

    def _take_from(
        self, begin: Place | None, end: Place | None, owner: str, accepts: Accepts
    ) -> int | None:
        for looked, key in enumerate(self._queue.waiting(begin, end)):
            if looked >= LOOKED_PAST:
                return None
            if accepts(key):
                self._begin_at(self._queue.place(key), owner)
                return key
        return None

    def _take_over(self, owner: str, accepts: Accepts) -> int | None:
        """A part of a long stretch: of the longest of some that waiting lines lie in."""
        queue, longest, found = self._queue, 0, None
        waiting = len(queue)
        for probe in range(PROBES):
            place = queue.place_at(waiting * (2 * probe + 1) // (2 * PROBES))
            before = self._owners.bisect_right(place) - 1
            if before < 0:
                continue  # before all stretches: nothing there was accepted
            begin = self._owners.peekitem(before)[0]
            end = self._next_begin(begin)
            length = queue.count(begin, end)
            if length > longest:
                longest, found = length, (begin, end)
        if found is None:
            return None
        return self._take_from(queue.cut(*found), found[1], owner, accepts)

    def _begin_at(self, place: Place, owner: str) -> None:
        self.leave(owner)
        before = self._owners.get(place)
        if before is not None:  # it had this line and gave it back
            del self._begins[before]
        self._owners[place] = owner
        self._begins[owner] = place
