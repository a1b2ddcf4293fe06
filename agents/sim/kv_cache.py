"""Paged KV memory with a prefix cache, counted block by block and never touched.

A full block has a key, the chained hash of everything up to its end, so equal keys mean equal
prefixes. A block is in one of four places:

    free      blank
    private   owned by one sequence, content not shared (yet)
    shared    published under its key, with the number of sequences that hold it
    idle      published, held by nobody: still a cache hit, and first to be evicted

    free + private + shared + idle = capacity, always.

When a block is published is the batch's choice (`agents.sim.profiles.Publishing`). Two sequences
that fill equal blocks before either is published both pay, and the second copy stays private. Idle
blocks leave in
least-recently-used order, and of one sequence the deepest goes first, since a block without its
parents can't be found. A simulation never looks inside a block, so there are no block tables.
Source: vLLM's automatic prefix caching; PagedAttention (Kwon et al., SOSP 2023).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 16


def block_keys(tokens: bytes, block_bytes: int, adapter: str = "") -> list[int]:
    """The keys of the full blocks of `tokens`; an unfilled last block has none. An adapter shares
    none with another one or with its model.

    xxHash with the parent's key as its seed costs 0.1 µs a block, and is the same in every run.
    """
    view = memoryview(tokens)
    keys: list[int] = []
    parent = xxh3_64_intdigest(adapter.encode()) if adapter else 0
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        parent = xxh3_64_intdigest(view[end - block_bytes : end], parent)
        keys.append(parent)
    return keys


class CacheWatcher(Protocol):
    """Called when blocks can be found, and when they can't be found any more."""

    def stored(self, keys: Sequence[int]) -> None:
        """These were not cached and are now, in prefix order."""
        ...

    def evicted(self, key: int) -> None:
        """This is not cached any more."""
        ...


class KvCache:
    """The blocks of one engine. Callers keep what they hold and give it back by `release`."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity = capacity_blocks
        self.free = capacity_blocks
        self.private = 0
        self.watchers: list[CacheWatcher] = []
        self._shared: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that could be taken now, by eviction if need be."""
        return self.free + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that running sequences hold."""
        return self.private + len(self._shared)

    @property
    def idle(self) -> int:
        """Blocks held by nobody that a later request may hit."""
        return len(self._idle)

    def keys(self) -> set[int]:
        """The keys of all cached blocks."""
        return {*self._shared, *self._idle}

    def matched(self, keys: Sequence[int]) -> int:
        """How many leading blocks of `keys` are cached."""
        shared, idle = self._shared, self._idle
        for count, key in enumerate(keys):
            if key not in shared and key not in idle:
                return count
        return len(keys)

    def reserve(self, keys: Sequence[int], blocks: int, *, spare: int) -> list[int] | None:
        """Take `blocks` for a sequence whose cacheable prefix is `keys`.

        Returns the keys of the blocks it now shares; the rest are private. None, and nothing
        taken, if fewer than `spare` blocks would be left available.
        """
        hits = list(keys[: self.matched(keys)])
        waking = sum(key in self._idle for key in hits)
        if self.available - waking - (blocks - len(hits)) < spare:
            return None
        for key in hits:
            self._hold(key)
        self.take(blocks - len(hits))
        return hits

    def take(self, blocks: int) -> None:
        """Take blank private blocks. The caller has seen that as many are available."""
        assert blocks <= self.available, "KV memory overrun: check `available` first"
        while self.free < blocks:
            key, _ = self._idle.popitem(last=False)
            self.free += 1
            for watcher in self.watchers:
                watcher.evicted(key)
        self.free -= blocks
        self.private += blocks

    def publish(self, keys: Sequence[int]) -> list[int]:
        """Share private blocks that were filled. Those whose key exists stay private.

        Returns the keys of the others.
        """
        shared, idle, fresh = self._shared, self._idle, []
        for key in keys:
            if key not in shared and key not in idle:
                shared[key] = 1
                fresh.append(key)
        self.private -= len(fresh)
        for watcher in self.watchers if fresh else ():
            watcher.stored(fresh)
        return fresh

    def release(self, held: Sequence[int], private: int) -> None:
        """Give back a sequence's blocks: `held` keys in prefix order, and its private ones."""
        self.private -= private
        self.free += private
        shared, idle = self._shared, self._idle
        for key in reversed(held):
            holders = shared.pop(key)
            if holders == 1:
                idle[key] = None
            else:
                shared[key] = holders - 1

    def _hold(self, key: int) -> None:
        if key in self._idle:
            del self._idle[key]
            self._shared[key] = 1
        else:
            self._shared[key] += 1
