"""Which line of one job a place gets next, so that few prefixes are computed in two places.

`PrefixRanges` chooses the line; `PrefixMemory` remembers which replica was given which prefix.

Lines wait in the depth-first order of their prompts' prefixes (`offline_queue`). A place (a
replica or a peer region) is given lines of one range of that order: from the line that it got last
to where the next place's range begins. A line that comes back waits where it waited; the range of
the place that had it begins there again, if no other one begins in between. A place whose range
is empty gets what lies before all ranges, or else the second part of a long one, cut where the
fewest blocks are shared. So a subtree of prompts goes to one replica, and the only subtree of a
job goes to as many replicas as have room.

At random (`utility_ratio`) the oldest line is next, in whichever range it is
(`OfflineQueue.chooses_by_prefix`).
"""

from collections.abc import Callable, Sequence

from sortedcontainers import SortedDict

from mesh.core.offline.offline_queue import OfflineQueue, Place
from schemas.ids import ReplicaId

PROBES = 5  # evenly spaced waiting lines: a long range holds one of them
LOOKED_PAST = 8  # lines that a place can't take, before its range counts as stuck
BLOCKS_MAX = 65_536  # that PrefixMemory keeps
PROMPT_BLOCKS_MAX = 512  # of one prompt that are remembered: about 32,000 tokens

Accepts = Callable[[int], bool]


class PrefixRanges:
    """Of one queue; owners are names of replicas and regions."""

    def __init__(self, queue: OfflineQueue) -> None:
        self._queue = queue
        self._owners: SortedDict[Place, str] = SortedDict()  # by where their ranges begin
        self._begins: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def leave(self, owner: str) -> None:
        """It takes no more: its range becomes part of the one before."""
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
        """A part of a long range: of the longest of some that waiting lines lie in."""
        queue, longest, found = self._queue, 0, None
        waiting = len(queue)
        for probe in range(PROBES):
            place = queue.place_at(waiting * (2 * probe + 1) // (2 * PROBES))
            before = self._owners.bisect_right(place) - 1
            if before < 0:
                continue  # before all ranges: nothing there was accepted
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


class PrefixMemory:
    """Which replica was given a prompt's beginning last: a guess at what its cache holds.

    The oldest blocks are forgotten first. Agents take the guess for what a prompt costs, so what
    was refused, or lost with its replica, is forgotten: else a prompt that no replica computed
    would count as cached the second time. What a replica has taken and given back for online
    requests stays, though it may not have computed it. If it were forgotten, the first prompts of
    a kind would fit no iteration again and again, and their neighbours would wait for them.
    """

    def __init__(self) -> None:
        self._holders: dict[int, ReplicaId] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def given(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        holders = self._holders
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            holders.pop(block, None)
            holders[block] = replica
        while len(holders) > BLOCKS_MAX:
            del holders[next(iter(holders))]

    def given_back(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """Blocks that it was given and may not have computed."""
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            if self._holders.get(block) == replica:
                del self._holders[block]

    def lost(self, replica: ReplicaId) -> None:
        """Another process runs there now, or none."""
        self._holders = {block: one for block, one in self._holders.items() if one != replica}

    def holders(self, hashes: Sequence[int]) -> list[ReplicaId]:
        """Replicas that were given some of this prompt's beginning, the longest one first."""
        found: dict[ReplicaId, None] = {}
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            holder = self._holders.get(block)
            if holder is None:
                break
            found.pop(holder, None)
            found[holder] = None
        return list(reversed(found))

    def held_blocks(self, replica: ReplicaId, hashes: Sequence[int]) -> int:
        """Leading blocks that this replica was given last."""
        held = 0
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            if self._holders.get(block) != replica:
                break
            held += 1
        return held
