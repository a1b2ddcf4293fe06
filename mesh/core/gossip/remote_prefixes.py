"""Prefixes that other routers announce: which peer region holds which.

Like the prefix index, a dict from chained hash to a bit for each owner; but origins publish what
they gained and lost, so nothing is estimated and nothing is evicted.

Several routers may publish for one region. Each publishes what no other of them has, so a path may
come in pieces, and a region holds what any of its routers announces: a block is published when
some replica holds the whole path up to it, and a replica loses a path's end before its beginning.

An origin whose stream has a gap counts for nothing until the gap is closed: its set stays, a bit of
a mask is cleared. Rejected: counting it in part. A gap may hide the restart of a replica, and a
prompt sent across an ocean to an empty cache costs more than the hit would have saved. What this
router has itself forwarded to a region still counts.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from schemas.gossip import BLOCKS_MAX, DELTA_BLOCKS_MAX, TrieDelta, TriePart
from schemas.ids import RegionId, RouterId


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


class RemotePrefixes:
    """Sets of blocks by origin, and how much of a prompt each region holds."""

    def __init__(self) -> None:
        self._origins_of: dict[int, int] = {}  # block -> bits of origins
        self._blocks_of: dict[Origin, dict[int, None]] = {}
        self._bit_of: dict[Origin, int] = {}
        self._free_bits: list[int] = []
        self._trusted: dict[RegionId, int] = {}  # bits of its complete origins

    def __len__(self) -> int:
        return len(self._origins_of)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(self._bit_of)

    def blocks(self, origin: Origin) -> Collection[int]:
        return self._blocks_of.get(origin, {}).keys()

    def is_trusted(self, origin: Origin) -> bool:
        return bool(self._trusted.get(origin.region, 0) & self._bit_of.get(origin, 0))

    def not_announced(self, region: RegionId, blocks: Iterable[int]) -> list[int]:
        """Those of them that no trusted origin of that region announced."""
        mask, origins_of = self._trusted.get(region, 0), self._origins_of
        if not mask:
            return list(blocks)
        return [block for block in blocks if not origins_of.get(block, 0) & mask]

    def lacks(self, region: RegionId, block: int) -> bool:
        """Whether trusted origins of a region announce others, and not this one."""
        mask = self._trusted.get(region, 0)
        return bool(mask) and not self._origins_of.get(block, 0) & mask

    def trust(self, origin: Origin, whole: bool) -> None:
        """Let its set count, or not."""
        bit, trusted = self._bit(origin), self._trusted.get(origin.region, 0)
        self._trusted[origin.region] = trusted | bit if whole else trusted & ~bit

    def add(self, origin: Origin, blocks: Iterable[int]) -> None:
        bit, known, origins_of = self._bit(origin), self._blocks_of[origin], self._origins_of
        for block in blocks:
            known[block] = None
            origins_of[block] = origins_of.get(block, 0) | bit

    def remove(self, origin: Origin, blocks: Iterable[int]) -> None:
        bit, known, origins_of = self._bit(origin), self._blocks_of[origin], self._origins_of
        for block in blocks:
            if block not in known:
                continue
            del known[block]
            left = origins_of.pop(block) & ~bit
            if left:
                origins_of[block] = left

    def forget(self, origin: Origin) -> None:
        """It is gone, with its set."""
        if origin in self._bit_of:
            self.remove(origin, list(self._blocks_of[origin]))
            self.trust(origin, False)
            self._free_bits.append(self._bit_of.pop(origin))
            del self._blocks_of[origin]

    def depths(self, hashes: Sequence[int], regions: Iterable[str]) -> dict[str, int]:
        """How many leading blocks each of these regions holds; others are left out."""
        trusted = self._trusted
        left = {region: trusted.get(RegionId(region), 0) for region in regions}
        found: dict[str, int] = {}
        depth, before, mask = 0, -1, _all(left)
        if not mask:
            return found
        for block in hashes:
            here = self._origins_of.get(block, 0) & mask
            if here != before:
                for region in [region for region, bits in left.items() if not bits & here]:
                    found[region] = depth
                    del left[region]
                if not left:
                    break
                mask = _all(left)
                before = here & mask
            depth += 1
        found |= dict.fromkeys(left, depth)
        return {region: blocks for region, blocks in found.items() if blocks}

    def _bit(self, origin: Origin) -> int:
        bit = self._bit_of.get(origin)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bit_of)
            self._bit_of[origin] = bit
            self._blocks_of[origin] = {}
        return bit


class RemotePrefixSet:
    """One origin's set in `RemotePrefixes`."""

    def __init__(self, remote: RemotePrefixes, origin: Origin) -> None:
        self._remote = remote
        self._origin = origin

    def take(self, delta: TrieDelta, now: float) -> bool:
        self._remote.remove(self._origin, delta.lost)
        return self._add(delta.gained)

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        wanted = {block: None for part in parts for block in part.blocks}
        known = self._remote.blocks(self._origin)
        self._remote.remove(self._origin, [block for block in known if block not in wanted])
        return SetOutcome.TAKEN if self._add(tuple(wanted)) else SetOutcome.TOO_LARGE

    def trust(self, whole: bool) -> None:
        self._remote.trust(self._origin, whole)

    def forget(self) -> None:
        self._remote.forget(self._origin)

    def _add(self, blocks: Sequence[int]) -> bool:
        known = self._remote.blocks(self._origin)
        room = SET_BLOCKS_MAX - len(known)
        # Counted only where it may matter.
        if len(blocks) > room and sum(block not in known for block in blocks) > room:
            return False
        self._remote.add(self._origin, blocks)
        return True


def _all(bits_of: dict[str, int]) -> int:
    mask = 0
    for bits in bits_of.values():
        mask |= bits
    return mask
