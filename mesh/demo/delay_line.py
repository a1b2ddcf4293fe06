"""What is on its way: bytes that entered one direction of a link and have not come out yet.

Every chunk is stamped with the moment it is due when it enters, and leaves at that moment.
Chunks overlap in flight, so delay costs no throughput: sleeping once per chunk, the obvious
way, would let one chunk through per delay. A chunk is never due before the one ahead of it,
whatever the jitter: TCP keeps order, so a late packet holds up its followers.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

# What a waiting chunk costs beside its bytes; counted so that tiny chunks are bounded too.
CHUNK_COST_BYTES = 128


class Mark(Enum):
    """What travels the line beside bytes, behind everything sent before it."""

    EOF = "the sender will send no more"
    RESET = "the sender's connection broke"


Item = bytes | Mark


@dataclass(slots=True)
class DelayLine:
    """One direction of a link. `delay_s` may be changed while it is in use."""

    delay_s: float
    jitter_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    held_bytes: int = 0
    _items: deque[tuple[float, Item]] = field(default_factory=deque)
    _last_due: float = float("-inf")

    def push(self, item: Item, now: float) -> None:
        """Let an item enter at `now` (seconds). Watch `held_bytes` and stop when it is much."""
        jitter_s = self.rng.uniform(0.0, self.jitter_s) if self.jitter_s else 0.0
        self._last_due = max(self._last_due, now + self.delay_s + jitter_s)
        self._items.append((self._last_due, item))
        self.held_bytes += _cost(item)

    @property
    def next_due(self) -> float | None:
        """When the next item comes out, or None if the line is empty."""
        return self._items[0][0] if self._items else None

    def pop_due(self, now: float) -> list[Item]:
        """Every item that has arrived by `now`, in the order of entry."""
        arrived: list[Item] = []
        while self._items and self._items[0][0] <= now:
            item = self._items.popleft()[1]
            self.held_bytes -= _cost(item)
            arrived.append(item)
        return arrived


def _cost(item: Item) -> int:
    return CHUNK_COST_BYTES + (len(item) if isinstance(item, bytes) else 0)
