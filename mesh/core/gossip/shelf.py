"""Where one origin's set is kept, as its mirror sees it."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from schemas.gossip import TrieDelta, TriePart


class Put(Enum):
    """What became of a whole set."""

    TAKEN = auto()
    IN_PART = auto()  # some of it was out of date: it is to be said again
    TOO_LARGE = auto()  # more than an origin may have


class Shelf(Protocol):
    """Where one origin's set is kept."""

    def take(self, delta: TrieDelta, now: float) -> bool:
        """What it gained and lost; False if that is more than an origin may have."""

    def put(self, parts: Sequence[TriePart], asked_at: float, now: float) -> Put:
        """Its whole set, in order, as it was at some time since `asked_at`."""

    def trust(self, whole: bool) -> None:
        """Let the set count, or not."""

    def forget(self) -> None:
        """The set is no more."""
