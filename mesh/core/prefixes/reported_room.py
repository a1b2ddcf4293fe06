"""How many blocks fit into the memory of owners that report what they hold.

An owner that reports evictions was full: it has room for what it was left with, or for more if it
reports more later. What was placed there since takes memory before any event says so, and the
engine evicts as many other blocks for it, the oldest first (the order of vLLM's free queue).
"""

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)


class ReportedRoom(Generic[OwnerT]):
    """Of the owners that report."""

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
