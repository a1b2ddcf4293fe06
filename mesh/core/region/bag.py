"""A set that is drawn from at random, in constant time.

A list holds the things and a dict says where each is; whoever leaves is replaced by the last one.
A dict alone would have to be walked through to reach its n-th thing.
"""

from collections.abc import Hashable, Iterator
from random import Random
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Bag(Generic[T]):
    """Its order depends on what came and went, and on nothing else."""

    def __init__(self) -> None:
        self._things: list[T] = []
        self._places: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._things)

    def __contains__(self, thing: T) -> bool:
        return thing in self._places

    def __iter__(self) -> Iterator[T]:
        return iter(self._things)

    def add(self, thing: T) -> None:
        """Put it in, if it isn't there."""
        if thing not in self._places:
            self._places[thing] = len(self._things)
            self._things.append(thing)

    def discard(self, thing: T) -> None:
        """Take it out, if it is there."""
        place = self._places.pop(thing, None)
        if place is None:
            return
        last = self._things.pop()
        if last != thing:
            self._things[place], self._places[last] = last, place

    def draw(self, most: int, dice: Random) -> list[T]:
        """All of them if there are no more than `most`, else so many draws.

        They are not taken out, and the same one may be drawn again.
        """
        if len(self._things) <= most:
            return self._things.copy()
        return dice.choices(self._things, k=most)
