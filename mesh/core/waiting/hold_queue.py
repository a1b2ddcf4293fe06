"""Requests that nobody can take yet: in line by class and arrival, bounded (SkyWalker 3.3).

One line per model, because a request whose model has no free replica must not block those
behind it that ask for another; within a model order is `standing` (arrival, and a head start for
higher classes), kept also when a request comes back because a replica refused it. Where the order
of trying has groups (`hold_order.py`), each group has its own lines, and the order says which
group is next.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Container, Iterator
from heapq import merge

from mesh.core.requests.request import Request
from mesh.core.waiting.hold_order import FirstCome, Turns, standing
from schemas.exchange import Priority
from schemas.ids import ModelId
from schemas.residency import Labels

Line = list[tuple[float, int, Request]]
Kind = tuple[ModelId, Labels, bool]  # requests of one kind can go to the same places
LOWEST_FIRST = (Priority.LOW, Priority.NORMAL, Priority.HIGH)


def kind_of(request: Request) -> Kind:
    """What decides where it can go, as far as it says itself; a peer's goes no further."""
    return request.model, request.residency, request.answer_inbox is not None


class HoldQueue:
    """New requests up to `length_max` over all models; one that comes back always has its place."""

    def __init__(self, length_max: int, turns: Turns | None = None) -> None:
        """`turns`: the order of trying; by `standing` alone unless given."""
        self._length_max = length_max
        self._turns = FirstCome() if turns is None else turns
        self._lines: dict[int, dict[ModelId, Line]] = {}  # of each group
        self._group_of: dict[int, int] = {}  # by the request's key
        self._waiting: dict[ModelId, int] = {}
        self._alike: dict[Kind, Line] = {}
        self._untried: dict[Priority, Line] = {priority: [] for priority in LOWEST_FIRST}

    def __contains__(self, request: Request) -> bool:
        return request.key in self._group_of

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def is_full(self) -> bool:
        """Whether a new request must be shed instead of held, or another one for it."""
        return len(self) >= self._length_max

    def waiting(self, model: ModelId) -> int:
        """Requests held for one model."""
        return self._waiting.get(model, 0)

    def alike(self, kind: Kind) -> int:
        """Requests of that kind that are held."""
        return len(self._alike.get(kind, ()))

    @property
    def kinds(self) -> int:
        """How many different kinds of requests are held."""
        return len(self._alike)

    @property
    def held_kinds(self) -> Collection[Kind]:
        """Which ones."""
        return self._alike.keys()

    def ahead(self, request: Request, without: Container[Kind] = ()) -> int:
        """Those held for its model who stand before that one, whether it is held or not.

        `without`: requests of these kinds are not counted, unless it is one of them.
        """
        place = standing(request), request.key
        lines = list(self._lines_of(request.model, without))
        if (kind := kind_of(request)) in without:
            lines.append(self._alike.get(kind, []))
        return sum(bisect_left(line, place) for line in lines)

    def next_of(self, model: ModelId, without: Container[Kind] = ()) -> Request | None:
        """Whoever stands first in the line of that model; None if nobody waits."""
        lines = self._lines_of(model, without)
        return min((line[0] for line in lines), default=(0.0, 0, None))[2]

    def _lines_of(self, model: ModelId, without: Container[Kind]) -> Iterator[Line]:
        for kind, line in self._alike.items():
            if kind[0] == model and kind not in without:
                yield line

    def newest_below(self, priority: Priority) -> Request | None:
        """Who came last of the lowest class, if that is lower than `priority`.

        Not one that came back: it has its place.
        """
        for lower in LOWEST_FIRST[: LOWEST_FIRST.index(priority)]:
            if held := self._untried[lower]:
                return held[-1][2]
        return None

    def put(self, request: Request, *, comes_back: bool = False) -> None:
        """Hold a request at its place. For a new one the caller has looked at `is_full`."""
        group = self._turns.group(request)
        line = self._lines.setdefault(group, {}).setdefault(request.model, [])
        insort(line, (standing(request), request.key, request))
        if not comes_back:
            insort(self._untried[request.priority], (standing(request), request.key, request))
        self._group_of[request.key] = group
        self._waiting[request.model] = self.waiting(request.model) + 1
        alike = self._alike.setdefault(kind_of(request), [])
        insort(alike, (standing(request), request.key, request))

    def release(self, request: Request) -> None:
        """Take out one that has got a place: it was its group's turn."""
        group = self._group_of[request.key]
        self.remove(request)
        self._turns.released(group)

    def remove(self, request: Request) -> bool:
        """Take a request out, wherever it stands; False if it is not held."""
        group = self._group_of.pop(request.key, None)
        if group is None:
            return False
        lines = self._lines[group]
        line = lines[request.model]
        _take_out(line, request)
        _take_out(self._untried[request.priority], request)
        if not line:
            del lines[request.model]
        if not lines:
            del self._lines[group]
        self._waiting[request.model] -= 1
        if not self._waiting[request.model]:
            del self._waiting[request.model]
        _take_out(alike := self._alike[kind := kind_of(request)], request)
        if not alike:
            del self._alike[kind]
        return True

    def models(self) -> tuple[ModelId, ...]:
        """Models that somebody waits for."""
        return tuple(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """All of them, over all models, in the order of trying. They may be removed meanwhile."""
        lines = {
            group: merge(*(line.copy() for line in lines.values()))
            for group, lines in self._lines.items()
        }
        waiting = {group: sum(map(len, own.values())) for group, own in self._lines.items()}
        for group in self._turns.walk(waiting):
            yield next(lines[group])[2]


def _take_out(line: Line, request: Request) -> None:
    place = bisect_left(line, (standing(request), request.key))
    if place < len(line) and line[place][1] == request.key:
        del line[place]
