"""A consistent-hash ring with virtual nodes (Karger and others, 1997; as Envoy's ring hash).

Every name stands at many points of a circle; a key belongs to the first name at or after its own
point. A name that comes or goes moves only the keys at its points. The ring keeps names that are
not available at the moment, and a walk passes over them: a replica that is full for a second
must not move anybody else's keys (SkyWalker 3.2, its second extension).

A fixed number of points per name, instead of a fixed size of the whole ring divided by the names:
then a new name moves nobody's points. The points come from the names alone, so all routers that
know the same names have the same ring.
"""

from array import array
from bisect import bisect_left
from collections.abc import Container, Sequence

import xxhash

POINTS = 128  # per name: shares of the keys differ by some 9 % (1 / sqrt(POINTS))
NAMES_MAX = 4096  # beyond it, names that are away are dropped


def key_of(text: str) -> int:
    """A text's place on the circle."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class HashRing:
    """Names on a circle."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._points = array("Q")  # ascending; the name at each is at the same place in _names
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, names: Sequence[str]) -> None:
        """Put those names on the ring that are new to it."""
        new = dict.fromkeys(name for name in names if name not in self._known)
        if not new:
            return
        if len(self._known) + len(new) > NAMES_MAX:
            present = set(names)
            self._keep([name for name in self._known if name in present])
        points = list(zip(self._points, self._names, strict=True))
        points += [(key_of(f"{name}#{copy}"), name) for name in new for copy in range(POINTS)]
        self._known |= new
        self._set(sorted(points))

    def forget(self, name: str) -> None:
        """It will not come back soon."""
        if name in self._known:
            self._keep([other for other in self._known if other != name])

    def next(self, key: int, candidates: Container[str]) -> str | None:
        """The first candidate at or after `key`; None if the ring knows none of them."""
        names = self._names
        start = bisect_left(self._points, key)
        for place in range(start, len(names)):
            if names[place] in candidates:
                return names[place]
        for place in range(start):
            if names[place] in candidates:
                return names[place]
        return None

    def _keep(self, names: list[str]) -> None:
        self._known = dict.fromkeys(names)
        points = zip(self._points, self._names, strict=True)
        self._set([point for point in points if point[1] in self._known])

    def _set(self, points: list[tuple[int, str]]) -> None:
        self._points = array("Q", [point for point, _ in points])
        self._names = [name for _, name in points]
