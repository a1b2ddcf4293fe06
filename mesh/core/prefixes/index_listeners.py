"""Interfaces of a prefix index: who receives its changes, and where announced prefixes are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


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
