"""Requests that nobody can take yet: first come, first served, bounded (SkyWalker 3.3).

One line per model, because a request whose model has no free replica must not block those
behind it that ask for another; within a model order is arrival, kept also when a request comes
back because a replica refused it.
"""

from bisect import insort
from collections.abc import Iterator
from heapq import merge

from mesh.core.request import Request
from schemas.ids import ModelId


class HoldQueue:
    """New requests up to `length_max` over all models; one that comes back always has its place."""

    def __init__(self, length_max: int) -> None:
        self._length_max = length_max
        self._lines: dict[ModelId, list[tuple[float, int, Request]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def is_full(self) -> bool:
        """Whether a new request must be shed instead of held."""
        return self._length >= self._length_max

    def waiting(self, model: ModelId) -> int:
        """Requests held for one model."""
        return len(self._lines.get(model, ()))

    def put(self, request: Request) -> None:
        """Hold a request at its place by time of arrival. The caller has looked at `is_full`."""
        line = self._lines.setdefault(request.model, [])
        insort(line, (request.arrived_at, request.key, request))
        self._length += 1

    def remove(self, request: Request) -> bool:
        """Take a request out, wherever it stands; False if it is not held."""
        line = self._lines.get(request.model, [])
        for place, (_, key, _) in enumerate(line):
            if key == request.key:
                del line[place]
                self._length -= 1
                if not line:
                    del self._lines[request.model]
                return True
        return False

    def models(self) -> tuple[ModelId, ...]:
        """Models that somebody waits for."""
        return tuple(self._lines)

    def __iter__(self) -> Iterator[Request]:
        """All of them, over all models, by time of arrival. They may be removed meanwhile."""
        for _, _, request in merge(*(line.copy() for line in self._lines.values())):
            yield request
