"""Prefixes that other routers announce: which peer region, and which of its replicas, holds which.

Like the prefix index, a dict from chained hash to a bit for each owner; but origins publish what
they gained and lost, so nothing is estimated and nothing is evicted.

Several routers may publish for one region. Each publishes what no other of them has, so a path may
come in pieces, and a region holds what any of its routers announces: a block is published when
some replica holds the whole path up to it, and a replica loses a path's end before its beginning.

An origin may name the replicas that hold a block; each name is a bit of its own beside the
origin's. Names are claims like the blocks themselves, and choose nothing: the region that a request
goes to places it by what it knows itself.

An origin whose stream has a gap counts for nothing until the gap is closed: its set stays, a bit of
a mask is cleared. What this router has forwarded to a region, and not found announced by its
answer's end, still counts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeVar

from mesh.core.gossip.replica_names import as_received
from schemas.gossip import BLOCKS_MAX, DELTA_BLOCKS_MAX, TrieDelta, TriePart
from schemas.ids import RegionId, RouterId

K = TypeVar("K")


class SetOutcome(Enum):
    """The outcome of receiving a whole set."""

    TAKEN = auto()
    IN_PART = auto()  # some of it was out of date: it must be sent again
    TOO_LARGE = auto()  # more than an origin may have


class PrefixSet(Protocol):
    """Where one origin's set is kept."""

    def take(self, delta: TrieDelta, now: float) -> bool:
        """What it gained and lost; False if that is more than an origin may have."""

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        """Its whole set, in order, as of some time since `asked_at`."""

    def trust(self, whole: bool) -> None:
        """Let the set count, or not."""

    def forget(self) -> None:
        """Drop the set."""


# A delta may gain before the next one loses what made room for it.
SET_BLOCKS_MAX = BLOCKS_MAX + DELTA_BLOCKS_MAX


class Origin(NamedTuple):
    """One router, as the source of a stream of deltas."""

    region: RegionId
    router: RouterId


NAMES_MAX = 64  # replicas that one origin may name; each is a bit of all its blocks' numbers
SAME_MAX = 4096  # numbers that are kept to be shared by blocks
LOOK_BLOCKS_MAX = 1024  # searched for free names, for each block that has changed
NAME_CHARS_MAX = 65  # of a replica that its region has adopted: region/replica


class OriginBits:
    """One origin's: `own` is set on each of its blocks, others on those that a replica holds."""

    def __init__(self, own: int) -> None:
        self.own = self.all = own
        self.of: dict[str, int] = {}  # by replica
        self.same: dict[int, int] = {}  # one object of each number, shared by its blocks
        self.changed = 0  # blocks, since it was last looked which names are free

    def shared(self, bits: int) -> int:
        """The object with that value."""
        if len(self.same) >= SAME_MAX:
            self.same.clear()
        return self.same.setdefault(bits, bits)


class RegionBits(NamedTuple):
    """Of a region's complete origins: all bits, and those of each replica that they name."""

    all: int
    of: dict[str, int]


class RemotePrefixes:
    """Sets of blocks by origin, and how much of a prompt each region holds."""

    def __init__(self) -> None:
        self._holders_of: dict[int, int] = {}  # block -> bits of origins, and of their replicas
        self._blocks_of: dict[Origin, dict[int, int]] = {}  # the origin's own bits of each
        self._bits_of: dict[Origin, OriginBits] = {}
        self._bits_made = 0
        self._free_bits: list[int] = []
        self._trusted: dict[RegionId, dict[Origin, None]] = {}  # its complete origins
        self._of_region: dict[RegionId, RegionBits] = {}  # made from the two before

    def __len__(self) -> int:
        return len(self._holders_of)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(self._bits_of)

    def blocks(self, origin: Origin) -> Collection[int]:
        return self._blocks_of.get(origin, {}).keys()

    def is_trusted(self, origin: Origin) -> bool:
        return origin in self._trusted.get(origin.region, ())

    def not_announced(
        self, region: RegionId, blocks: Iterable[int], replica: str = ""
    ) -> list[int]:
        """Those of them that no trusted origin of that region announced as held by that replica;
        "": at all."""
        bits = self._region(region)
        mask, holders_of = bits.of.get(replica, 0) if replica else bits.all, self._holders_of
        if not mask:
            return list(blocks)
        return [block for block in blocks if not holders_of.get(block, 0) & mask]

    def lacks(self, region: RegionId, block: int) -> bool:
        """Whether trusted origins of a region announce others, and not this one."""
        mask = self._region(region).all
        return bool(mask) and not self._holders_of.get(block, 0) & mask

    def trust(self, origin: Origin, whole: bool) -> None:
        """Let its set count, or not."""
        self._bits(origin)
        trusted = self._trusted.setdefault(origin.region, {})
        if (origin in trusted) == whole:
            return
        if whole:
            trusted[origin] = None
        else:
            del trusted[origin]
        self._of_region.pop(origin.region, None)

    def add(
        self,
        origin: Origin,
        blocks: Sequence[int],
        replicas: Sequence[str] = (),
        holders: Sequence[int] = (),
    ) -> None:
        """It announces these, held by `holders` alone: see `schemas.gossip`."""
        its, known, holders_of = self._bits(origin), self._blocks_of[origin], self._holders_of
        own = its.own
        if holders:
            self._make_room_for(origin, replicas)
        named = as_received(replicas, holders, len(blocks), lambda name: self._bit(origin, name))
        masks = {bits: its.shared(own | bits) for bits in dict.fromkeys(named)}
        for block, bits in zip(blocks, named, strict=True):
            mask = masks[bits]
            if (others := holders_of.get(block, 0)) and (before := known.get(block, 0)):
                its.changed += 1
                others &= ~before
            known[block] = mask
            holders_of[block] = others | mask if others else mask

    def remove(self, origin: Origin, blocks: Iterable[int]) -> None:
        its, known, holders_of = self._bits(origin), self._blocks_of[origin], self._holders_of
        for block in blocks:
            if block not in known:
                continue
            its.changed += 1
            left = holders_of.pop(block) & ~known.pop(block)
            if left:
                holders_of[block] = left

    def forget(self, origin: Origin) -> None:
        """It is gone, with its set."""
        if origin in self._bits_of:
            self.remove(origin, list(self._blocks_of[origin]))
            self.trust(origin, False)
            bits = self._bits_of.pop(origin)
            self._free_bits += [bits.own, *bits.of.values()]
            del self._blocks_of[origin]

    def depths(self, hashes: Sequence[int], regions: Iterable[str]) -> dict[str, int]:
        """How many leading blocks each of these regions holds; others are left out."""
        masks = {region: self._region(RegionId(region)).all for region in regions}
        return self._depths(hashes, masks)

    def holders(self, hashes: Sequence[int], regions: Iterable[str]) -> dict[str, dict[str, int]]:
        """The same, and of each replica that a region names; "": of the region."""
        first = self._holders_of.get(hashes[0], 0) if hashes else 0
        masks: dict[tuple[str, str], int] = {}
        for region in regions if first else ():
            bits = self._region(RegionId(region))
            if first & bits.all:
                masks[region, ""] = bits.all
                for name, mask in bits.of.items():
                    if first & mask:
                        masks[region, name] = mask
        found: dict[str, dict[str, int]] = {}
        for (region, name), depth in self._depths(hashes, masks).items():
            found.setdefault(region, {})[name] = depth
        return found

    def _depths(self, hashes: Sequence[int], left: dict[K, int]) -> dict[K, int]:
        """How many leading blocks have some of these bits, by key; keys with none are left out."""
        found: dict[K, int] = {}
        depth, before, mask = 0, -1, _all(left)
        if not mask:
            return found
        for block in hashes:
            here = self._holders_of.get(block, 0) & mask
            if here != before:
                for key in [key for key, bits in left.items() if not bits & here]:
                    found[key] = depth
                    del left[key]
                if not left:
                    break
                mask = _all(left)
                before = here & mask
            depth += 1
        found |= dict.fromkeys(left, depth)
        return {key: blocks for key, blocks in found.items() if blocks}

    def _region(self, region: RegionId) -> RegionBits:
        known = self._of_region.get(region)
        if known is None:
            known = RegionBits(0, {})
            for origin in self._trusted.get(region, ()):
                bits = self._bits_of[origin]
                known = known._replace(all=known.all | bits.all)
                for name, bit in bits.of.items():
                    known.of[name] = known.of.get(name, 0) | bit
            self._of_region[region] = known
        return known

    def _bits(self, origin: Origin) -> OriginBits:
        bits = self._bits_of.get(origin)
        if bits is None:
            bits = self._bits_of[origin] = OriginBits(self._new_bit())
            self._blocks_of[origin] = {}
        return bits

    def _bit(self, origin: Origin, name: str) -> int:
        """Of a replica that it names; 0 if it names too many."""
        bits = self._bits(origin)
        bit = bits.of.get(name)
        if bit is None:
            if len(bits.of) >= NAMES_MAX or not 0 < len(name) <= NAME_CHARS_MAX:
                return 0
            bit = bits.of[name] = self._new_bit()
            bits.all |= bit
            self._of_region.pop(origin.region, None)
        return bit

    def _make_room_for(self, origin: Origin, replicas: Sequence[str]) -> None:
        """Drop names that no block has any more, if there is no room for new ones.

        All its blocks are searched, so only once enough of them have changed: small messages with
        new names must not cost much each.
        """
        bits, known = self._bits(origin), self._blocks_of[origin]
        if len(bits.of) < NAMES_MAX or all(name in bits.of for name in replicas):
            return
        if not bits.changed or bits.changed * LOOK_BLOCKS_MAX < len(known):
            return
        bits.changed = 0
        used = _all(known)
        for name, bit in list(bits.of.items()):
            if not bit & used:
                del bits.of[name]
                bits.all &= ~bit
                self._free_bits.append(bit)
        self._of_region.pop(origin.region, None)

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._bits_made += 1
        return 1 << (self._bits_made - 1)


class RemotePrefixSet:
    """One origin's set in `RemotePrefixes`."""

    def __init__(self, remote: RemotePrefixes, origin: Origin) -> None:
        self._remote = remote
        self._origin = origin

    def take(self, delta: TrieDelta, now: float) -> bool:
        self._remote.remove(self._origin, delta.lost)
        return self._add(delta.gained, delta)

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        wanted = {block: None for part in parts for block in part.blocks}
        known = self._remote.blocks(self._origin)
        self._remote.remove(self._origin, [block for block in known if block not in wanted])
        is_taken = all(self._add(part.blocks, part) for part in parts)
        return SetOutcome.TAKEN if is_taken else SetOutcome.TOO_LARGE

    def trust(self, whole: bool) -> None:
        self._remote.trust(self._origin, whole)

    def forget(self) -> None:
        self._remote.forget(self._origin)

    def _add(self, blocks: Sequence[int], message: TrieDelta | TriePart) -> bool:
        known = self._remote.blocks(self._origin)
        room = SET_BLOCKS_MAX - len(known)
        # Counted only where it may matter.
        if len(blocks) > room and sum(block not in known for block in blocks) > room:
            return False
        self._remote.add(self._origin, blocks, message.replicas, message.holders)
        return True


def _all(bits_of: Mapping[Any, int]) -> int:
    mask = 0
    for bits in bits_of.values():
        mask |= bits
    return mask
