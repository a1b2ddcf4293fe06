"""Which of the prefixes held here others know of, and which they should hear of next.

Fed by the prefix index of the policy that places: `used` with every prompt that a replica holds
from now on, `lost` when the last replica lets go of a block. Gains and losses that cancel out
before the next delta are never told.

What is told first is worth most to others: blocks that many prompts had in common, and lately.
The value of a block is its uses since it became known, each halved every HALF_LIFE_S: new uses
weigh more and more instead of old ones less and less, so values compare without being brought up
to date. A parent is used whenever its child is, so it is never worth less, and among equals the
order of paths is kept. Nobody needs to hear all: what never has its turn is dropped, and comes
back with its next use.

Tokens are no part of the value because all blocks stand for equally many.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from itertools import islice

Untold = Callable[[list[int]], list[int]]
WAITING_MAX = 16_384
HALF_LIFE_S = 60.0
RESCALE_HALF_LIVES = 64.0


class OutgoingPrefixes:
    """One router's set: what was told of it, and what is still to be told."""

    def __init__(self, blocks_max: int, untold: Untold = list) -> None:
        """`blocks_max`: most blocks that are told at a time, the longest unused out first.
        `untold`: which of some blocks no other router of this region has told."""
        self.is_paused = False  # to what is used now: not everybody who listens may know of it
        self.dropped = 0  # blocks that never had their turn
        self._blocks_max = blocks_max
        self._untold = untold
        self._told: dict[int, None] = {}  # the longest unused first
        self._waiting: dict[int, float] = {}  # and their values
        self._scaled_at = 0.0  # when a use weighed 1
        self._lost: dict[int, None] = {}  # and still in `_told`

    def __len__(self) -> int:
        return len(self._told)

    @property
    def told(self) -> tuple[int, ...]:
        """The set as listeners have it after the last delta."""
        return tuple(self._told)

    @property
    def waiting(self) -> int:
        """Blocks that are still to be told."""
        return len(self._waiting)

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to tell."""
        return not self._waiting and not self._lost

    def used(self, hashes: Sequence[int], now: float) -> None:
        """A replica of this region holds this prompt from now on."""
        if self.is_paused:
            return
        told = self._told
        fresh = [block for block in hashes if block not in told]
        if len(fresh) < len(hashes):
            self._touch(hashes)
        if fresh := self._untold(fresh):
            self._await(fresh, self._weight(now))

    def _await(self, blocks: Sequence[int], weight: float) -> None:
        waiting = self._waiting
        if waiting.keys().isdisjoint(blocks):
            waiting.update(dict.fromkeys(blocks, weight))
        else:
            for block in blocks:
                waiting[block] = waiting.pop(block, 0.0) + weight
        if len(waiting) > WAITING_MAX:
            oldest = _first(waiting, len(waiting) - WAITING_MAX)
            for block in oldest:
                del waiting[block]
            self.dropped += len(oldest)

    def _weight(self, now: float) -> float:
        """Of a use now."""
        half_lives = (now - self._scaled_at) / HALF_LIFE_S
        if half_lives > RESCALE_HALF_LIVES:
            self._scaled_at = now
            scale = 2.0 ** -min(half_lives, 1000.0)
            self._waiting = {block: value * scale for block, value in self._waiting.items()}
            return 1.0
        return float(2.0**half_lives)

    def _touch(self, hashes: Sequence[int]) -> None:
        told, lost = self._told, self._lost
        # Leaf first, root last: then a parent is always younger than its children.
        for block in reversed(hashes):
            if block in told:
                del told[block]
                told[block] = None
        if lost:
            for block in hashes:
                lost.pop(block, None)

    def lost(self, blocks: Iterable[int]) -> None:
        """No replica of this region holds these blocks any more."""
        waiting, told, lost = self._waiting, self._told, self._lost
        for block in blocks:
            waiting.pop(block, None)
            if block in told:
                lost[block] = None

    def announced_by_sibling(self, blocks: Iterable[int]) -> None:
        """Another router of this region has just told them: it need not be done twice."""
        for block in blocks:
            self._waiting.pop(block, None)

    def inherit(self, blocks: Sequence[int]) -> None:
        """Held here, and told by a router that is gone: told anew once all else has been."""
        waiting = self._waiting
        for block in blocks[-(WAITING_MAX - len(waiting)) :] if len(waiting) < WAITING_MAX else ():
            if block not in self._told:
                waiting.setdefault(block, 0.0)

    def take(self, blocks_max: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """At most so many blocks, gained and lost, to be told now; losses first."""
        lost = self._take_lost(blocks_max)
        gained = self._best(blocks_max - len(lost))
        for block in reversed(gained):
            del self._waiting[block]
            self._told[block] = None
        room = blocks_max - len(lost) - len(gained)
        for block in self._oldest(len(self._told) - self._blocks_max):
            self._lost[block] = None
        return gained, lost + self._take_lost(room)

    def _take_lost(self, blocks_max: int) -> tuple[int, ...]:
        lost = _first(self._lost, blocks_max)
        for block in lost:
            del self._lost[block], self._told[block]
        return lost

    def _best(self, count: int) -> tuple[int, ...]:
        count = min(count, self._blocks_max)
        if count <= 0:
            return ()
        return tuple(nlargest(count, self._waiting, key=self._waiting.__getitem__))

    def _oldest(self, count: int) -> tuple[int, ...]:
        return _first(self._told, count)


def _first(blocks: Iterable[int], count: int) -> tuple[int, ...]:
    # All in one go: a dict's iterator passes over what was deleted at its front, every time anew.
    return tuple(islice(blocks, max(0, count)))
