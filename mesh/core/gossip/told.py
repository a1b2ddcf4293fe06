"""What all origins together told: which peer region holds which prefix.

Like the prefix index, a dict from chained hash to a bit for each owner; but here the origins say
what they gained and lost, and nothing is guessed, so nothing is evicted either. Several routers
may speak for one region: it holds what any of them says.

An origin whose stream has a hole counts for nothing until it is mended: its set stays, a bit of
a mask is cleared. Rejected: letting it count in part. A hole may hide the restart of a replica,
and a prompt sent across an ocean to an empty cache costs more than the hit would have saved;
what this router saw of a region itself, by forwarding to it, it goes on believing.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from schemas.ids import RegionId, RouterId


class Origin(NamedTuple):
    """One router, as the source of a stream of deltas."""

    region: RegionId
    router: RouterId


class ToldPrefixes:
    """Sets of blocks by origin, and who of a prompt's candidates has how much of it."""

    def __init__(self) -> None:
        self._origins_of: dict[int, int] = {}  # block -> bits of origins
        self._blocks_of: dict[Origin, dict[int, None]] = {}
        self._bit_of: dict[Origin, int] = {}
        self._free_bits: list[int] = []
        self._trusted: dict[RegionId, int] = {}  # bits of its whole origins

    def __len__(self) -> int:
        return len(self._origins_of)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Who told anything."""
        return tuple(self._bit_of)

    def blocks(self, origin: Origin) -> Collection[int]:
        """Its set."""
        return self._blocks_of.get(origin, {}).keys()

    def is_trusted(self, origin: Origin) -> bool:
        """Whether what it told counts."""
        return bool(self._trusted.get(origin.region, 0) & self._bit_of.get(origin, 0))

    def trust(self, origin: Origin, whole: bool) -> None:
        """Let what it told count, or not."""
        bit, trusted = self._bit(origin), self._trusted.get(origin.region, 0)
        self._trusted[origin.region] = trusted | bit if whole else trusted & ~bit

    def add(self, origin: Origin, blocks: Iterable[int]) -> None:
        """It holds these too."""
        bit, known = self._bit(origin), self._blocks_of[origin]
        for block in blocks:
            known[block] = None
            self._origins_of[block] = self._origins_of.get(block, 0) | bit

    def remove(self, origin: Origin, blocks: Iterable[int]) -> None:
        """It holds these no more."""
        bit, known = self._bit(origin), self._blocks_of[origin]
        for block in blocks:
            if block not in known:
                continue
            del known[block]
            left = self._origins_of[block] & ~bit
            if left:
                self._origins_of[block] = left
            else:
                del self._origins_of[block]

    def forget(self, origin: Origin) -> None:
        """It is gone, with all that it told."""
        if origin in self._bit_of:
            self.remove(origin, list(self._blocks_of[origin]))
            self.trust(origin, False)
            self._free_bits.append(self._bit_of.pop(origin))
            del self._blocks_of[origin]

    def depths(self, hashes: Sequence[int], regions: Iterable[str]) -> dict[str, int]:
        """How many leading blocks each of these regions holds; those that hold none are left out.

        One origin's word for a whole path: two routers of a region place on the same replicas,
        but neither knows whether its half of a path lies where the other's does.
        """
        trusted = {region: self._trusted.get(RegionId(region), 0) for region in regions}
        mask = 0
        for bits in trusted.values():
            mask |= bits
        found: dict[str, int] = {}
        if not mask:
            return found
        depth = 0
        for block in hashes:
            here = self._origins_of.get(block, 0) & mask
            if here != mask:
                if depth:
                    _note(found, trusted, mask & ~here, depth)
                mask = here
                if not here:
                    return found
            depth += 1
        if depth:
            _note(found, trusted, mask, depth)
        return found

    def deepen(
        self, depths: dict[str, int], hashes: Sequence[int], regions: Iterable[str]
    ) -> dict[str, int]:
        """These depths, or what was told where that goes deeper."""
        for region, depth in self.depths(hashes, regions).items():
            if depth > depths.get(region, 0):
                depths[region] = depth
        return depths

    def _bit(self, origin: Origin) -> int:
        bit = self._bit_of.get(origin)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bit_of)
            self._bit_of[origin] = bit
            self._blocks_of[origin] = {}
        return bit


def _note(found: dict[str, int], trusted: dict[str, int], ended: int, depth: int) -> None:
    """Paths of these origins end at that depth; a region's deepest one counts, which is last."""
    for region, bits in trusted.items():
        if bits & ended:
            found[region] = depth
