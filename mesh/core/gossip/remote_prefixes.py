"""What all origins together told: which peer region holds which prefix.

Like the prefix index, a dict from chained hash to a bit for each owner; but here the origins say
what they gained and lost, and nothing is guessed, so nothing is evicted either.

Several routers may speak for one region. Each tells what no other of them has told, so a path may
be told in pieces, and a region holds what any of its routers says. That is right because each of
them knows what the others have placed: a block is told when some replica holds the whole path up
to it, and a replica loses the end of a path before its beginning.

An origin whose stream has a hole counts for nothing until it is mended: its set stays, a bit of
a mask is cleared. Rejected: letting it count in part. A hole may hide the restart of a replica,
and a prompt sent across an ocean to an empty cache costs more than the hit would have saved;
what this router saw of a region itself, by forwarding to it, it goes on believing.

Where one origin's set is kept, as its mirror sees it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from mesh.core.gossip.outgoing_prefixes import OutgoingPrefixes
from schemas.gossip import BLOCKS_MAX, DELTA_BLOCKS_MAX, TrieDelta, TriePart
from schemas.ids import RegionId, RouterId


class SetOutcome(Enum):
    """What became of a whole set."""

    TAKEN = auto()
    IN_PART = auto()  # some of it was out of date: it is to be said again
    TOO_LARGE = auto()  # more than an origin may have


class PrefixSet(Protocol):
    """Where one origin's set is kept."""

    def take(self, delta: TrieDelta, now: float) -> bool:
        """What it gained and lost; False if that is more than an origin may have."""

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        """Its whole set, in order, as it was at some time since `asked_at`."""

    def trust(self, whole: bool) -> None:
        """Let the set count, or not."""

    def forget(self) -> None:
        """The set is no more."""


# A delta may gain before the next one loses what made room for it.
SET_BLOCKS_MAX = BLOCKS_MAX + DELTA_BLOCKS_MAX


class Origin(NamedTuple):
    """One router, as the source of a stream of deltas."""

    region: RegionId
    router: RouterId


class RemotePrefixes:
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

    def not_announced(self, region: RegionId, blocks: Iterable[int]) -> list[int]:
        """Those of them that no trusted origin of that region told."""
        mask, origins_of = self._trusted.get(region, 0), self._origins_of
        if not mask:
            return list(blocks)
        return [block for block in blocks if not origins_of.get(block, 0) & mask]

    def lacks(self, region: RegionId, block: int) -> bool:
        """Whether a region that can be believed says that it holds others, and not this one."""
        mask = self._trusted.get(region, 0)
        return bool(mask) and not self._origins_of.get(block, 0) & mask

    def trust(self, origin: Origin, whole: bool) -> None:
        """Let what it told count, or not."""
        bit, trusted = self._bit(origin), self._trusted.get(origin.region, 0)
        self._trusted[origin.region] = trusted | bit if whole else trusted & ~bit

    def add(self, origin: Origin, blocks: Iterable[int]) -> None:
        """It holds these too."""
        bit, known, origins_of = self._bit(origin), self._blocks_of[origin], self._origins_of
        for block in blocks:
            known[block] = None
            origins_of[block] = origins_of.get(block, 0) | bit

    def remove(self, origin: Origin, blocks: Iterable[int]) -> None:
        """It holds these no more."""
        bit, known, origins_of = self._bit(origin), self._blocks_of[origin], self._origins_of
        for block in blocks:
            if block not in known:
                continue
            del known[block]
            left = origins_of.pop(block) & ~bit
            if left:
                origins_of[block] = left

    def forget(self, origin: Origin) -> None:
        """It is gone, with all that it told."""
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
    """One origin's set among those of all: the shelf of its mirror."""

    def __init__(self, told: RemotePrefixes, origin: Origin) -> None:
        self._told = told
        self._origin = origin

    def take(self, delta: TrieDelta, now: float) -> bool:
        """What it gained and lost; False if that is more than an origin may have."""
        self._told.remove(self._origin, delta.lost)
        return self._add(delta.gained)

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        """Its whole set."""
        wanted = {block: None for part in parts for block in part.blocks}
        known = self._told.blocks(self._origin)
        self._told.remove(self._origin, [block for block in known if block not in wanted])
        return SetOutcome.TAKEN if self._add(tuple(wanted)) else SetOutcome.TOO_LARGE

    def trust(self, whole: bool) -> None:
        """Let the set count, or not."""
        self._told.trust(self._origin, whole)

    def forget(self) -> None:
        """The set is no more."""
        self._told.forget(self._origin)

    def _add(self, blocks: Sequence[int]) -> bool:
        known = self._told.blocks(self._origin)
        room = SET_BLOCKS_MAX - len(known)
        # Counted only where it may matter.
        if len(blocks) > room and sum(block not in known for block in blocks) > room:
            return False
        self._told.add(self._origin, blocks)
        return True


def _all(bits_of: dict[str, int]) -> int:
    mask = 0
    for bits in bits_of.values():
        mask |= bits
    return mask


# What a sibling told the peers: we need not tell it too, unless the sibling is gone.


class SiblingPrefixSet(RemotePrefixSet):
    """The shelf of one sibling's mirror.

    What a sibling told is told anew by the others when it is forgotten, each a part of it; what is
    used meanwhile, while it is only silent, is told by whoever places it. Nothing else is told for
    it: what it placed and did not tell may be a secret.
    """

    def __init__(
        self,
        told: RemotePrefixes,
        origin: Origin,
        news: OutgoingPrefixes,
        heirs: Callable[[RouterId], tuple[int, int]],
        knows: Callable[[int], bool],
    ) -> None:
        """`heirs`: of one that is gone, how many they are and our place among them.
        `knows`: whether a block is held here."""
        super().__init__(told, origin)
        self._news = news
        self._heirs = heirs
        self._knows = knows
        self._set: Callable[[], Collection[int]] = lambda: told.blocks(origin)

    def take(self, delta: TrieDelta, now: float) -> bool:
        """What it gained and lost."""
        self._news.announced_by_sibling(delta.gained)
        return super().take(delta, now)

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> SetOutcome:
        """Its whole set."""
        for part in parts:
            self._news.announced_by_sibling(part.blocks)
        return super().put(parts, asked_at, now)

    def forget(self) -> None:
        """It is gone, or starts anew with nothing told."""
        left = [*self._set()]
        super().forget()
        if left:
            count, place = self._heirs(self._origin.router)
            self._news.inherit(
                [block for block in left if block % count == place and self._knows(block)]
            )
