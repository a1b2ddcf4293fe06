"""The prefix index: which owners hold the KV of which prompt prefixes (SkyWalker 3.2).

Logically a trie: every node has the set of owners of the prefix that ends there. Because block
hashes are chained, a hash names its whole path, so the trie is one dict from hash to owners and
walking it is one look-up per block. Owners are bits of an int, so "does an available owner hold
this" is one `&`.

A match stops at the first block without an available owner: a child's owners are a subset of its
parent's. Memory is bounded per owner, the oldest insertion out first; an insertion enters its path
leaf first and root last, so a parent is always younger than its children and eviction never leaves
a gap in a path. Blocks that no request has used for `ttl_s` go too: an engine that idled has kept
them, but one that was restarted behind its agent has not.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import compress, groupby, islice, repeat, takewhile
from operator import itemgetter, or_
from typing import Any, Generic, Protocol, TypeVar


class PrefixListener(Protocol):
    """Receives which prefixes this region's replicas come to hold and lose."""

    def used(self, hashes: Sequence[int], now: float, replica: Any) -> None:
        """That replica holds this prompt from now on."""

    def lost(self, blocks: Iterable[int]) -> None:
        """No replica holds these blocks any more."""

    def left(self, replica: Any, blocks: Iterable[int]) -> None:
        """That replica holds these no more; others do."""

    def gone(self, replica: Any) -> None:
        """That replica holds nothing any more."""


class AnnouncedPrefixes(Protocol):
    """What owners announce that they hold, which may be more than was placed on them here."""

    def depths(self, hashes: Sequence[int], owners: Iterable[Any]) -> Mapping[Any, int]:
        """How many leading blocks each of these owners announces; those with none are left out."""
        ...

    def holders(self, hashes: Sequence[int], owners: Iterable[Any]) -> Mapping[Any, dict[str, int]]:
        """Of each owner, how many each replica holds that it names; "": of all it announces."""
        ...


class IndexListener(Protocol):
    """Receives this index's own changes, for indexes of the same owners at other routers."""

    def used(self, owner: Any, hashes: Sequence[int], now: float) -> None:
        """A prompt was inserted."""

    def lost(self, owner: Any, blocks: Sequence[int]) -> None:
        """These were never computed there."""

    def missed(self, owner: Any, at: float) -> None:
        """Blocks inserted last at that time or before are evicted."""

    def gone(self, owner: Any) -> None:
        """The owner is gone with all it held, as other routers see too."""


OwnerT = TypeVar("OwnerT", bound=Hashable)


class ReportedRoom(Generic[OwnerT]):
    """How many blocks fit into the memory of owners that report what they hold.

    An owner that reports evictions was full: it has room for what it was left with, or for more if
    it reports more later. What was placed there since takes memory before any event says so, and
    the engine evicts as many other blocks for it, the oldest first (as vLLM's free queue does).
    """

    def __init__(self) -> None:
        self._left: dict[OwnerT, int] = {}  # blocks after the last evictions
        self._unreported: dict[OwnerT, set[int]] = {}  # placed there, not reported yet

    def placed(self, owner: OwnerT, blocks: Iterable[int]) -> None:
        """The owner is about to hold these, which it did not."""
        self._unreported.setdefault(owner, set()).update(blocks)

    def settled(self, owner: OwnerT, blocks: Collection[int]) -> None:
        """It reports these, or they are not counted on any more."""
        if unreported := self._unreported.get(owner):
            unreported.difference_update(blocks)

    def evicted(self, owner: OwnerT, left: int) -> None:
        """It has evicted blocks; so many are counted on now."""
        self._left[owner] = left

    def excess(self, owner: OwnerT, blocks: int) -> int:
        """Of so many blocks that are counted on, how many it has no room for."""
        left = self._left.get(owner)
        if left is None:
            return 0
        return max(0, min(blocks - left, len(self._unreported.get(owner, ()))))

    def forget(self, owner: OwnerT) -> None:
        """Nothing is known of its memory any more."""
        self._left.pop(owner, None)
        self._unreported.pop(owner, None)

    def copy(self) -> "ReportedRoom[OwnerT]":
        """Another one that knows the same."""
        other = ReportedRoom[OwnerT]()
        other._left = {**self._left}
        other._unreported = {owner: {*blocks} for owner, blocks in self._unreported.items()}
        return other


TTL_S = 3600.0
MISSED_MAX = 4096  # owners, those that are gone included
OWNERS_AT_ONCE = 4  # searched for old blocks at each tick
EXPIRED_AT_ONCE = 1024  # blocks of each; about half a millisecond
ALL = -1  # every bit
NO_BLOCKS: dict[int, float] = {}
NO_TIERS: dict[int, int] = {}
NEVER = float("-inf")
FEW_BITS = 8  # are sooner found one by one than among a thousand
TRUTH = bytes.maketrans(b"01", b"\x00\x01")  # binary digits as false and true


def _itself(table: dict[Any, Any]) -> dict[Any, Any]:
    return table


class PrefixIndex(Generic[OwnerT]):
    """Owners of prompt prefixes; at most `blocks_max` blocks per owner, for `ttl_s`."""

    def __init__(self, blocks_max: int, ttl_s: float = TTL_S) -> None:
        self._blocks_max = blocks_max
        self._ttl_s = ttl_s
        self._bounds: dict[OwnerT, int] = {}  # of owners known to hold less than blocks_max
        self._owners_of: dict[int, int] = {}  # block hash -> bits of owners
        self._blocks_of: dict[OwnerT, dict[int, float]] = {}  # when inserted, the oldest first
        self._bit_of: dict[OwnerT, int] = {}
        self._owners: list[OwnerT] = []  # by the bit's place; a free bit keeps its last owner
        self._free_bits: list[int] = []
        self._turns: list[OwnerT] = []  # to be searched for old blocks
        self._now = NEVER  # of the last tick
        self._oldest_at: dict[OwnerT, float] = {}  # no block of it was inserted before
        self._missed_at: dict[OwnerT, float] = {}  # blocks inserted up to then are evicted
        self.reporting: set[OwnerT] = set()  # owners that report what they hold
        # Of these, blocks that must be loaded before they are of use, and their tier.
        self.slow: dict[OwnerT, dict[int, int]] = {}
        self._room: ReportedRoom[OwnerT] = ReportedRoom()
        self.outgoing: PrefixListener | None = None
        self.listener: IndexListener | None = None
        self.announced: AnnouncedPrefixes | None = None

    def go_on_from(self, earlier: "PrefixIndex[OwnerT]", *, copied: bool) -> None:
        """Hold what another index of the same bounds holds; this one must still be empty.

        Unless `copied`, the other must not be used any more: copying a large fleet's takes a while.
        """
        own = dict if copied else _itself
        self._bounds, self._owners_of = own(earlier._bounds), own(earlier._owners_of)
        self._blocks_of = {owner: own(held) for owner, held in earlier._blocks_of.items()}
        self._bit_of, self._oldest_at = own(earlier._bit_of), own(earlier._oldest_at)
        self._missed_at = own(earlier._missed_at)
        self.reporting = {*earlier.reporting}
        self.slow = {owner: own(tiers) for owner, tiers in earlier.slow.items()}
        self._room = earlier._room.copy()
        self._owners, self._free_bits = [*earlier._owners], [*earlier._free_bits]
        self._turns, self._now = [*earlier._turns], earlier._now

    def __len__(self) -> int:
        return len(self._owners_of)

    def __contains__(self, block: int) -> bool:
        return block in self._owners_of

    @property
    def owners(self) -> tuple[OwnerT, ...]:
        return tuple(self._blocks_of)

    @property
    def owner_count(self) -> int:
        return len(self._blocks_of)

    def held(self, owner: OwnerT) -> list[tuple[int, float]]:
        """Its blocks and when each was inserted last, the oldest first."""
        return list(self._blocks_of.get(owner, NO_BLOCKS).items())

    def missed_at(self, owner: OwnerT) -> float | None:
        """Its blocks inserted up to then are evicted; None if none are known to be."""
        return self._missed_at.get(owner)

    def blocks(self, owner: OwnerT) -> int:
        return len(self._blocks_of.get(owner, ()))

    def placed_since(self, owner: OwnerT, at: float) -> int:
        """How many of its blocks were inserted after that; takes time in proportion to them."""
        times = reversed(self._blocks_of.get(owner, NO_BLOCKS).values())
        return sum(1 for _ in takewhile(lambda inserted_at: inserted_at > at, times))

    def bound(self, owner: OwnerT, blocks: int) -> None:
        """`owner` has memory for so many blocks; more than `blocks_max` are not kept.

        One that reports what it holds has no need of the bound, and may hold more in other tiers.
        """
        if owner not in self.reporting:
            self._bounds[owner] = max(1, min(blocks, self._blocks_max))

    def bound_of(self, owner: OwnerT) -> int:
        """Most blocks that are kept for it."""
        return self._bounds.get(owner, self._blocks_max)

    def insert(self, owner: OwnerT, hashes: Sequence[int], now: float) -> tuple[int, float]:
        """`owner` holds, or is about to hold, the KV of this prompt. Returns `depth` before."""
        bound = self._bounds.get(owner, self._blocks_max)
        if len(hashes) > bound:
            held, hashes = self.depth(owner, hashes), hashes[:bound]
            self.enter(owner, hashes, now)
        else:
            held = self.enter(owner, hashes, now)
        if self.outgoing is not None:
            self.outgoing.used(hashes, now, owner)
        if self.listener is not None:
            self.listener.used(owner, hashes, now)
        return held

    def enter(self, owner: OwnerT, hashes: Sequence[int], now: float) -> tuple[int, float]:
        """The same, from another router's index of the same owners."""
        bit = self._bit(owner)
        blocks, owners_of = self._blocks_of[owner], self._owners_of
        bound = self._bounds.get(owner, self._blocks_max)
        hashes = hashes[:bound]
        # Block by block in Python this takes three times as long.
        before = list[float | None](map(blocks.pop, hashes, repeat(None)))
        blocks.update(dict.fromkeys(reversed(hashes), now))
        depth = len(hashes)
        if None in before:
            depth = before.index(None)
            new = [block for block, at in zip(hashes, before, strict=True) if at is None]
            known = map(owners_of.get, new, repeat(0))
            owners_of.update(zip(new, map(or_, known, repeat(bit)), strict=False))
            if owner in self.reporting:
                self._room.placed(owner, new)
        if len(blocks) > bound:
            self._drop(owner, list(islice(blocks, len(blocks) - bound)))
        if now < self._oldest_at.get(owner, now):
            self._oldest_at[owner] = now
        self._expire(owner, now)
        deepest_at = before[depth - 1] if depth else None
        return depth, NEVER if deepest_at is None else deepest_at

    def merge(self, owner: OwnerT, held: Iterable[tuple[int, float]]) -> None:
        """Another index's blocks of it, with times: of each block the later one counts.

        Takes time in proportion to all that both hold.
        """
        bit, blocks = self._bit(owner), self._blocks_of[owner]
        after = self._missed_at.get(owner, NEVER)
        for block, at in held:
            known = blocks.get(block)
            if at > after and (known is None or at > known):
                blocks[block] = at
                self._owners_of[block] = self._owners_of.get(block, 0) | bit
        self._oldest_at.pop(owner, None)
        # Sorting is stable: blocks of one prompt keep their order.
        self._blocks_of[owner] = dict(sorted(blocks.items(), key=itemgetter(1)))
        bound = self._bounds.get(owner, self._blocks_max)
        merged = self._blocks_of[owner]
        self._drop(owner, list(islice(merged, max(0, len(merged) - bound))))

    def depth(self, owner: OwnerT, hashes: Iterable[int]) -> tuple[int, float]:
        """How many leading blocks it holds, and when the deepest of them was inserted last.

        Of no block it is minus infinity.
        """
        blocks, depth, at = self._blocks_of.get(owner, NO_BLOCKS), 0, NEVER
        for inserted_at in map(blocks.get, hashes):
            if inserted_at is None:
                break
            depth, at = depth + 1, inserted_at
        return depth, at

    def reports(self, owner: OwnerT, *, reporting: bool) -> None:
        """Whether the owner reports what it holds from now on."""
        if reporting:
            self.reporting.add(owner)
            self._bounds.pop(owner, None)
        else:
            self.reporting.discard(owner)
            self.slow.pop(owner, None)
            self._room.forget(owner)

    def report(self, owner: OwnerT, blocks: Sequence[int], tier: int, now: float) -> None:
        """The owner holds these, in any order; tier 0 needs no loading."""
        bit, held = self._bit(owner), self._blocks_of[owner]
        self._room.settled(owner, blocks)
        slow = self.slow.get(owner, NO_TIERS)
        for block in reversed(blocks):  # parents last, which makes them younger
            held.pop(block, None)
            held[block] = now
            self._owners_of[block] = self._owners_of.get(block, 0) | bit
            if tier:
                slow = self.slow.setdefault(owner, {})
                slow[block] = tier
            elif slow:
                slow.pop(block, None)
        self._drop(owner, list(islice(held, max(0, len(held) - self._blocks_max))))

    def evicted(self, owner: OwnerT, blocks: Iterable[int]) -> None:
        """The owner reports that it holds these no longer."""
        self.remove(owner, blocks)
        self._room.evicted(owner, self.blocks(owner))

    def leaving(self, owner: OwnerT) -> set[int]:
        """Blocks that what is on its way to the owner will evict, before it reports that."""
        excess = self._room.excess(owner, self.blocks(owner))
        return set(islice(self._blocks_of.get(owner, NO_BLOCKS), excess))

    def report_whole(self, owner: OwnerT, blocks: Collection[int], before: float) -> None:
        """The owner holds only these of all that were inserted up to `before`."""
        held = self._blocks_of.get(owner, NO_BLOCKS).items()
        self._drop(owner, [block for block, at in held if at <= before and block not in blocks])

    def retract(self, owner: OwnerT, hashes: Sequence[int], at: float) -> None:
        """`owner` did not compute the blocks inserted at `at`; later insertions stay."""
        blocks = self._blocks_of.get(owner, NO_BLOCKS)
        never = [block for block in hashes if blocks.get(block) == at]
        self.remove(owner, never)
        if never and self.listener is not None:
            self.listener.lost(owner, never)

    def remove(self, owner: OwnerT, blocks: Iterable[int]) -> None:
        """`owner` does not hold these, by another router's index."""
        known = self._blocks_of.get(owner, NO_BLOCKS)
        self._drop(owner, [block for block in dict.fromkeys(blocks) if block in known])

    def forget_until(self, owner: OwnerT, at: float) -> None:
        """`owner` has evicted what was inserted last at `at` or before."""
        self.leave_until(owner, at)
        if self.listener is not None:
            self.listener.missed(owner, at)

    def leave_until(self, owner: OwnerT, at: float) -> None:
        """The same, from another router's index."""
        self._note_missed(owner, at)
        self._room.forget(owner)
        # All in one go: a dict's iterator skips what was deleted at its front, every time anew.
        held = self._blocks_of.get(owner, NO_BLOCKS).items()
        self._drop(owner, [block for block, _ in takewhile(lambda item: item[1] <= at, held)])

    def expire(self, now: float) -> None:
        """Drop some blocks older than `ttl_s`; call at every tick, owners take turns."""
        self._now = now
        if not self._turns:
            self._turns = list(self._blocks_of)
        for owner in self._turns[-OWNERS_AT_ONCE:]:
            if owner in self._blocks_of:
                self._expire(owner, now)
        del self._turns[-OWNERS_AT_ONCE:]

    def _expire(self, owner: OwnerT, now: float) -> None:
        oldest = now - self._ttl_s
        if self._oldest_at.get(owner, NEVER) >= oldest:
            return
        blocks = self._blocks_of[owner]
        first = islice(blocks.items(), EXPIRED_AT_ONCE)
        self._drop(owner, [block for block, at in takewhile(lambda item: item[1] < oldest, first)])
        self._oldest_at[owner] = next(iter(blocks.values()), now)

    def depths(self, hashes: Iterable[int], available: Iterable[OwnerT]) -> dict[OwnerT, int]:
        """How many leading blocks each available owner holds; without those that hold none."""
        mask = self._mask(available)
        found: dict[OwnerT, int] = {}
        depth = 0
        for block in hashes:
            here = self._owners_of.get(block, 0) & mask
            if here != mask:
                if depth:
                    found |= dict.fromkeys(self._names(mask & ~here), depth)
                if not here:
                    return found
                mask = here
            depth += 1
        if depth:
            found |= dict.fromkeys(self._names(mask), depth)
        return found

    def deepen(
        self, depths: dict[OwnerT, int], hashes: Sequence[int], owners: Iterable[OwnerT]
    ) -> dict[OwnerT, int]:
        """These depths, or what the owners announce where that goes deeper."""
        if self.announced is not None:
            for owner, depth in self.announced.depths(hashes, owners).items():
                if depth > depths.get(owner, 0):
                    depths[owner] = depth
        return depths

    def holders(
        self, hashes: Iterable[int], among: Iterable[OwnerT] | None = None
    ) -> list[tuple[int, Sequence[OwnerT]]]:
        """Owners of a beginning of it, the shallowest first: how many blocks, and which owners.

        `among`: only these, else all.
        """
        return [(depth, self._names(bits)) for depth, bits in self._holding(hashes, among)]

    def deepest(self, hashes: Iterable[int]) -> Iterator[Sequence[OwnerT]]:
        """The owners of a beginning of it, in groups: those that hold the most of it first."""
        for _, bits in reversed(self._holding(hashes)):
            yield self._names(bits)

    def _holding(
        self, hashes: Iterable[int], among: Iterable[OwnerT] | None = None
    ) -> list[tuple[int, int]]:
        """As `holders`, with bits of owners."""
        found: list[tuple[int, int]] = []
        depth, before = 0, ALL if among is None else self._mask(among)
        for owners, blocks in groupby(map(self._owners_of.get, hashes)):
            here = before & (owners or 0)  # after a gap nothing counts
            if depth and (left := before & ~here):
                found.append((depth, left))
            if not here:
                return found
            before, depth = here, depth + len(list(blocks))
        if depth:
            found.append((depth, before))
        return found

    def hit_ratio(self, hashes: Sequence[int]) -> float:
        """Part of a prompt's blocks that some owner holds, 0 to 1."""
        held = 0
        for block in hashes:
            if block not in self._owners_of:
                break
            held += 1
        return held / len(hashes) if hashes else 0.0

    def forget(self, owner: OwnerT) -> None:
        """`owner` is gone, and its KV with it."""
        if self._now > NEVER:
            self._note_missed(owner, self._now)  # an older snapshot may still arrive
        if self.listener is not None:
            self.listener.gone(owner)
        if owner not in self._bit_of:
            return
        self._drop(owner, list(self._blocks_of[owner]))
        bit = self._bit_of.pop(owner)
        del self._blocks_of[owner]
        self._bounds.pop(owner, None)
        self._oldest_at.pop(owner, None)
        self.slow.pop(owner, None)
        self._room.forget(owner)
        self._free_bits.append(bit)
        if self.outgoing is not None:
            self.outgoing.gone(owner)

    def _mask(self, owners: Iterable[OwnerT]) -> int:
        return reduce(or_, map(self._bit_of.get, owners, repeat(0)), 0)

    def _note_missed(self, owner: OwnerT, at: float) -> None:
        missed_at = self._missed_at
        missed_at[owner] = max(at, missed_at.pop(owner, at))
        if len(missed_at) > MISSED_MAX:
            del missed_at[next(iter(missed_at))]

    def _bit(self, owner: OwnerT) -> int:
        bit = self._bit_of.get(owner)
        if bit is None:
            if self._free_bits:
                bit = self._free_bits.pop()
                self._owners[bit.bit_length() - 1] = owner
            else:
                bit = 1 << len(self._owners)
                self._owners.append(owner)
            self._bit_of[owner] = bit
            self._blocks_of[owner] = {}
        return bit

    def _drop(self, owner: OwnerT, blocks: Sequence[int]) -> None:
        """Remove these, all of which it holds."""
        if not blocks:
            return
        held, owners_of, others = self._blocks_of[owner], self._owners_of, ~self._bit_of[owner]
        self._room.settled(owner, blocks)
        if slow := self.slow.get(owner):
            for block in blocks:
                slow.pop(block, None)
        unowned, shared = [], []
        for block in blocks:
            del held[block]
            if left := owners_of[block] & others:
                owners_of[block] = left
                shared.append(block)
            else:
                del owners_of[block]
                unowned.append(block)
        if self.outgoing is not None:
            self.outgoing.lost(unowned)
            self.outgoing.left(owner, shared)

    def _names(self, bits: int) -> tuple[OwnerT, ...]:
        if bits.bit_count() <= FEW_BITS:
            found = []
            while bits:
                lowest = bits & -bits
                found.append(self._owners[lowest.bit_length() - 1])
                bits ^= lowest
            return tuple(found)
        digits = bin(bits)[:1:-1].encode().translate(TRUTH)  # the lowest bit first
        return tuple(compress(self._owners, digits))
