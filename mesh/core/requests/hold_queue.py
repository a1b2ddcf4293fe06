"""The hold queue: requests that wait for a place, by class and arrival (SkyWalker 3.3).

One queue per model: a request whose model has no free replica must not block those for another. Nor
must its backlog shed them: of a full queue, the kind of work that most requests wait for gives up
its newest one, of no higher class, to a request for another that fewer wait for (longest queue
drop: Suter, Lakshman, Stiliadis and Choudhury, INFOCOM 1998). Within a model the order is
`effective_arrival`, also when a request comes back after a refusal: a class is worth HEAD_START_S
of waiting. A higher class goes first, and no request starves: all that go before it arrived at most
two head starts later. The number is settled at arrival; an age rule would reorder the queue as time
passes. Where the policy judges load, `release_order` gives the turns of a model and class to those
with less to compute.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from mesh.core.model.request import Request
from mesh.core.model.served_names import model_of, work_name
from schemas.exchange import CLASSES_BEFORE, Priority
from schemas.ids import ModelId
from schemas.residency import Labels

# A sixth of the longest hold: low requests are tried long before they are shed for their age.
HEAD_START_S = 10.0


def effective_arrival(request: Request) -> float:
    """The time by which a request is ordered, in seconds: its arrival, later for lower classes."""
    return request.arrived_at + HEAD_START_S * CLASSES_BEFORE[request.priority]


Arrival = tuple[float, int]  # `effective_arrival`, and the request's key


class Turn(NamedTuple):
    """A held request. `at`: when the last of those that it gives way to came, in seconds."""

    at: float
    arrival: Arrival
    request: Request


WaitingRequests = list[tuple[float, int, Request]]
Need = tuple[ModelId, Labels, bool]  # requests of the same need can go to the same places
HIGHEST_FIRST = tuple(Priority)
LOWEST_FIRST = HIGHEST_FIRST[::-1]
NO_LIMITS: Mapping[ModelId, int] = {}
NOBODYS: Mapping[str, WaitingRequests] = {}


def need_of(request: Request) -> Need:
    """What the places for it depend on; a peer's request is not forwarded again."""
    return request.model, request.residency, not request.kind.ends_here


class HoldQueue:
    """New requests up to `length_max` over all models; one that comes back is always taken."""

    def __init__(self, length_max: int, model_max: Mapping[ModelId, int] = NO_LIMITS) -> None:
        """`model_max`: the most requests of single models."""
        self._length_max, self.model_max = length_max, model_max
        self._line: WaitingRequests = []  # all, over all models
        self.keys: set[int] = set()  # of the held requests
        self._waiting: dict[ModelId, int] = {}
        self._alike: dict[Need, WaitingRequests] = {}
        self._untried: dict[ModelId, dict[Priority, WaitingRequests]] = {}  # by kind of work
        self._of_tenants: dict[ModelId, dict[str, WaitingRequests]] = {}  # the same

    def __contains__(self, request: Request) -> bool:
        return request.key in self.keys

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_full(self) -> bool:
        """Whether a new request must be shed instead of held, or another one for it."""
        return len(self) >= self._length_max

    def is_full_for(self, request: Request) -> bool:
        """The same of a request for that model, which may have a limit of its own."""
        return self.is_full or self._is_at_limit(request)

    def _is_at_limit(self, request: Request) -> bool:
        limit = self.model_max.get(model_of(request.model)) if self.model_max else None
        return limit is not None and self.waiting(request.model) >= limit

    def waiting(self, model: ModelId) -> int:
        """How many requests are held for that kind of work."""
        return self._waiting.get(work_name(model), 0)

    def of_tenants(self, model: ModelId) -> Mapping[str, WaitingRequests]:
        """By tenant, the requests held for that kind of work, by arrival."""
        return self._of_tenants.get(work_name(model), NOBODYS)

    def by_tenant(self) -> Counter[str]:
        """How many requests are held of each tenant."""
        held = Counter[str]()
        for lines in self._of_tenants.values():
            held.update({tenant: len(line) for tenant, line in lines.items()})
        return held

    @property
    def is_shared(self) -> bool:
        """Whether several tenants wait for the same kind of work."""
        return any(len(lines) > 1 for lines in self._of_tenants.values())

    def waits_above(self, request: Request) -> bool:
        """Whether a new request of a higher class waits for its kind of work."""
        classes = self._untried.get(work_name(request.model), {})
        return any(classes.get(one) for one in HIGHEST_FIRST[: CLASSES_BEFORE[request.priority]])

    def alike(self, need: Need) -> int:
        return len(self._alike.get(need, ()))

    @property
    def held_needs(self) -> Collection[Need]:
        return self._alike.keys()

    def ahead(
        self,
        request: Request,
        without: Container[Need] = (),
        turn_of: Request | None = None,
    ) -> int:
        """Requests held for its kind of work that came before it, whether it is held or not.

        `without`: requests of these needs are not counted, unless it is one of them. `turn_of`: as
        if it had come when that one did.
        """
        came = request if turn_of is None else turn_of
        place = effective_arrival(came), came.key
        lines = list(self._lines_of(request.model, without))
        if (need := need_of(request)) in without:
            lines.append(self._alike.get(need, []))
        return sum(bisect_left(line, place) for line in lines)

    def next_of(self, model: ModelId, without: Container[Need] = ()) -> Request | None:
        """The first request held for that kind of work; None if there is none."""
        lines = self._lines_of(model, without)
        return min((line[0] for line in lines), default=(0.0, 0, None))[2]

    def _lines_of(self, model: ModelId, without: Container[Need]) -> Iterator[WaitingRequests]:
        work = work_name(model)
        for need, line in self._alike.items():
            if work_name(need[0]) == work and need not in without:
                yield line

    def gives_way(self, request: Request) -> Request | None:
        """The new request that is to be shed for this one where it finds no room; None: this one.

        It is the last of the lowest class for the work that most requests wait for, of none above
        this one's, or, where that is its own work or its model is at its limit, of a lower one. For
        the same work, the tenant with most requests, two more than this one's, gives way alike.
        """
        own = work_name(request.model)
        lower = LOWEST_FIRST[: LOWEST_FIRST.index(request.priority)]
        longest = own if self._is_at_limit(request) else self._longest()
        if longest != own and self._waiting[longest] > self._waiting.get(own, 0) + 1:
            found = self._newest_of(longest, (*lower, request.priority))
            if found is not None:
                return found
        return self._newest_of(own, lower) or self._longest_tenants(request, lower)

    def _longest_tenants(self, request: Request, lower: tuple[Priority, ...]) -> Request | None:
        """The newest of the same class or a lower one, of the tenant that most are held of."""
        lines = self.of_tenants(request.model)
        longest = max(lines, key=lambda tenant: len(lines[tenant]), default=request.tenant)
        if longest == request.tenant:
            return None
        if len(lines[longest]) <= len(lines.get(request.tenant, ())) + 1:
            return None
        untried = self._untried.get(work_name(request.model), {})
        newest = (
            entry[2]
            for one in (*lower, request.priority)
            for entry in reversed(untried.get(one, ()))
            if entry[2].tenant == longest
        )
        return next(newest, None)

    def _longest(self) -> ModelId:
        """The work that most new requests wait for."""
        return max(self._waiting, key=self._waiting.__getitem__)

    def _newest_of(self, work: ModelId, classes: Iterable[Priority]) -> Request | None:
        untried = self._untried.get(work, {})
        lines = filter(None, map(untried.get, classes))
        return next((line[-1][2] for line in lines), None)

    def put(self, request: Request, *, comes_back: bool = False) -> None:
        """Hold a request at its place. For a new one the caller checks `is_full` first."""
        entry = effective_arrival(request), request.key, request
        insort(self._line, entry)
        work = work_name(request.model)
        if not comes_back:
            insort(self._untried.setdefault(work, {}).setdefault(request.priority, []), entry)
        insort(self._of_tenants.setdefault(work, {}).setdefault(request.tenant, []), entry)
        self.keys.add(request.key)
        self._waiting[work] = self._waiting.get(work, 0) + 1
        insort(self._alike.setdefault(need_of(request), []), entry)

    def remove(self, request: Request) -> bool:
        """Take a request out; False if it is not held."""
        if request.key not in self.keys:
            return False
        self.keys.remove(request.key)
        _take_out(self._line, request)
        work = work_name(request.model)
        _take_out(self._untried.get(work, {}).get(request.priority, []), request)
        self._waiting[work] -= 1
        tenants = self._of_tenants[work]
        _take_out(own := tenants[request.tenant], request)
        if not own:
            del tenants[request.tenant]
        if not self._waiting[work]:
            del self._waiting[work], self._of_tenants[work]
            self._untried.pop(work, None)
        _take_out(alike := self._alike[need := need_of(request)], request)
        if not alike:
            del self._alike[need]
        return True

    def models(self) -> tuple[ModelId, ...]:
        """What is requested by those held, by served names."""
        return tuple(dict.fromkeys(need[0] for need in self._alike))

    def works(self) -> tuple[ModelId, ...]:
        """The same, by kinds of work."""
        return tuple(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """All, over all models, in the order of trying. They may be removed meanwhile."""
        for _, _, request in self._line.copy():
            yield request


def _take_out(line: WaitingRequests, request: Request) -> None:
    place = bisect_left(line, (effective_arrival(request), request.key))
    if place < len(line) and line[place][1] == request.key:
        del line[place]
