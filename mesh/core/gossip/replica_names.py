"""Which replicas hold a block, as bits: a table of names here, another one in each message.

A message names the replicas that its blocks are held by once, and has a number for each block whose
bits are places in these names. So it can be read alone, whatever was lost before it.
"""

from collections.abc import Callable, Sequence

from schemas.gossip import HOLDER_NAMES_MAX


class NameBits:
    """A bit for each name; a bit that was freed is given again."""

    def __init__(self) -> None:
        self._bit_of: dict[str, int] = {}
        self._names: list[str] = []  # by the bit's place; a free bit keeps its last name
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._bit_of)

    def bit(self, name: str) -> int:
        """The name's bit, a new one if it has none."""
        bit = self._bit_of.get(name)
        if bit is None:
            if self._free:
                bit = self._free.pop()
                self._names[bit.bit_length() - 1] = name
            else:
                bit = 1 << len(self._names)
                self._names.append(name)
            self._bit_of[name] = bit
        return bit

    def known(self, name: str) -> int:
        """Its bit; 0 if it has none."""
        return self._bit_of.get(name, 0)

    def chars_at_most(self, count: int) -> int:
        """Characters of so many names, at most."""
        return min(sum(map(len, self._bit_of)), count * max(map(len, self._bit_of), default=0))

    def free(self, name: str) -> None:
        """Nothing has this bit any more."""
        if (bit := self._bit_of.pop(name, None)) is not None:
            self._free.append(bit)

    def names(self, bits: int) -> list[str]:
        """Those whose bits are set."""
        found = []
        while bits:
            lowest = bits & -bits
            found.append(self._names[lowest.bit_length() - 1])
            bits ^= lowest
        return found


def as_sent(
    held_by: Sequence[int], names: Callable[[int], Sequence[str]]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names of a message, and a number for each block; both empty if no replica is named.

    `held_by`: of each block, the sender's bits. Beyond `HOLDER_NAMES_MAX` none is named.
    """
    places: dict[str, int] = {}
    sent: dict[int, int] = {}
    for bits in held_by:
        if bits not in sent:
            sent[bits] = 0
            for name in names(bits):
                if name in places or len(places) < HOLDER_NAMES_MAX:
                    sent[bits] |= 1 << places.setdefault(name, len(places))
    if not places:
        return (), ()
    return tuple(places), tuple([sent[bits] for bits in held_by])


def as_received(
    replicas: Sequence[str], holders: Sequence[int], blocks: int, bit: Callable[[str], int]
) -> list[int]:
    """Of each of so many blocks the receiver's bits; 0 where no replica is named.

    `bit`: of a name, 0 for one that can't be kept. What fits no name, or not the blocks, is
    ignored.
    """
    if len(holders) != blocks:
        return [0] * blocks
    bits_of = [bit(name) for name in replicas[:HOLDER_NAMES_MAX]]
    read: dict[int, int] = {}
    for number in holders:
        if number not in read:
            read[number] = 0
            for place, its_bit in enumerate(bits_of):
                if number >> place & 1:
                    read[number] |= its_bit
    return [read[number] for number in holders]


def named_in(replicas: Sequence[str], holders: Sequence[int], blocks: int) -> list[frozenset[str]]:
    """Of each of so many blocks the replicas that a message names."""
    names = NameBits()
    sets: dict[int, frozenset[str]] = {}
    for bits in (received := as_received(replicas, holders, blocks, names.bit)):
        if bits not in sets:
            sets[bits] = frozenset(names.names(bits))
    return [sets[bits] for bits in received]
