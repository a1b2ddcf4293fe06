"""In which order held requests have their turns, where the policy judges load.

Those with little to compute go first. The mean wait is least if the shortest is computed first
(Smith, Naval Research Logistics Quarterly 3, 1956); first come, first served makes a prompt that
needs 0.1 s wait for many that need 5 s, and under overload answers them all when their clients are
about to give up. And while a cached prompt waits, others may evict what it came for.

A request gives way to those of its model and class that came at most SHORTER_FACTOR times as much
later as its own prompt takes to compute, and at most SHORTER_S_MAX, half of the longest hold or of
its own limit for the first token, or the limit of queue delay later, so that nobody is held until
it is shed. Turns of models and classes are by `effective_arrival`: which request of a model and
class has one is decided here, among the first SORTED_MAX. Rejected: nothing held for a queue, which
had the same effect (short prompts went first where memory was full) without any limit on engines'
queues.
"""

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from itertools import chain, compress, islice
from operator import attrgetter
from typing import NamedTuple

from mesh.core.lifecycle.hold_queue import HoldQueue, RequestKind, effective_arrival, kind_of
from mesh.core.model.reported_speed import believed_slope
from mesh.core.model.request import Request
from mesh.core.policies.base import PREFILL_S_PER_TOKEN
from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import Priority
from schemas.ids import ModelId

# Mean time to the first token with a factor of 5, of 30, to that by arrival (simulated, two seeds):
# documents on both GPUs at full load 0.97, 0.35, on H100s 0.80, 0.64; tools above it 0.84, 0.57.
SHORTER_FACTOR = 30.0
SHORTER_S_MAX = 30.0  # half of the longest hold
SORTED_MAX = 64  # the first held requests
UNCACHED_KNOWN_S = 0.1  # a heartbeat's time; each look walks the index
NO_KEY = -1
_at, _arrival_of = attrgetter("at"), attrgetter("arrival")


Arrival = tuple[float, int]  # `effective_arrival`, and the request's key


class Turn(NamedTuple):
    """A held request. `at`: when the last of those that it gives way to came, in seconds."""

    at: float
    arrival: Arrival
    request: Request


class ReleaseOrder:
    """The turns of held requests, computed again at each try."""

    def __init__(
        self,
        held: HoldQueue,
        replicas: ReplicaTable,
        hit_ratio: Callable[[Request], float],
        longest_wait_s: Callable[[Request], float],
    ) -> None:
        """`hit_ratio`: part of a prompt that is cached, 0 to 1. `longest_wait_s`: the least limit
        of how long a request may be held, in seconds."""
        self._held, self._replicas = held, replicas
        self._hit_ratio, self._longest_wait_s = hit_ratio, longest_wait_s
        # By key: when it was looked up, and how many tokens it leaves to compute.
        self._uncached: dict[int, tuple[float, float]] = {}
        self._newcomer = NO_KEY, 0.0  # the last one, and its tokens to compute
        self._s_per_token: dict[ModelId, float] = {}
        self._alike: dict[tuple[ModelId, Priority], list[Turn]] = {}  # by arrival

    def by_arrival(self) -> Iterable[Request]:
        """All held requests in the order of the queue."""
        self._alike = {}
        return self._held

    def shorter_first(self, now: float) -> Iterable[Request]:
        """All held requests; in turns of one model and class, those with less to compute first."""
        if len(self._held) < 2 or not self._held.is_first_come:
            return self.by_arrival()
        rest = iter(self._held)
        first = list(islice(rest, SORTED_MAX))
        self._look_up(first, now)
        models = dict.fromkeys(request.model for request in first)
        self._s_per_token = {model: self._middle_s_per_token(model) for model in models}
        self._alike = {}
        for one in first:
            turn = Turn(self._turn_at(one, self._uncached[one.key][1]), _arrival(one), one)
            self._alike.setdefault((one.model, one.priority), []).append(turn)
        turns = {kind: iter(sorted(own, key=_at)) for kind, own in self._alike.items()}
        return chain([next(turns[one.model, one.priority]).request for one in first], rest)

    def ahead(self, request: Request, without: Container[RequestKind] = ()) -> int:
        """Requests held for its kind of work that go before it, whether it is held or not.

        `without`: requests of these kinds are not counted, unless it is one of them.
        """
        ahead = self._held.ahead(request, without)
        alike = self._alike.get((request.model, request.priority))
        if alike is None or ahead >= SORTED_MAX:
            return ahead
        key, group_of = request.key, self._held.group_of
        others = [one for one in alike if (at := one.arrival[1]) in group_of and at != key]
        if without:
            own = kind_of(request)
            kinds = [kind_of(one.request) for one in others]
            counted = [kind == own or kind not in without for kind in kinds]
            others = list(compress(others, counted))
        mine = self._turn_at(request, self._tokens_of(request)), _arrival(request)
        earlier = sum([one[:2] < mine for one in others])
        before = bisect_left(others, mine[1], key=_arrival_of)
        if earlier == before:
            return ahead
        # It takes the turn of the one that has as many before it by arrival.
        turn = others[earlier - (earlier > before)]
        is_missing = key not in group_of and mine[1] < turn.arrival
        return self._held.ahead(request, without, turn_of=turn.request) + is_missing

    def _turn_at(self, request: Request, tokens: float) -> float:
        most_s = min(SHORTER_S_MAX, self._longest_wait_s(request))
        prefill_s = tokens * self._s_per_token[request.model]
        return request.arrived_at + min(most_s, SHORTER_FACTOR * prefill_s)

    def _tokens_of(self, request: Request) -> float:
        """Of its prompt, to compute. A newcomer's are asked for several times."""
        if (known := self._uncached.get(request.key)) is not None:
            return known[1]
        if self._newcomer[0] != request.key:
            self._newcomer = request.key, self._uncached_tokens(request)
        return self._newcomer[1]

    def _uncached_tokens(self, request: Request) -> float:
        return request.prompt.tokens * (1.0 - self._hit_ratio(request))

    def _look_up(self, requests: Iterable[Request], now: float) -> None:
        known, self._uncached = self._uncached, {}
        for request in requests:
            seen = known.get(request.key)
            if seen is None or now - seen[0] >= UNCACHED_KNOWN_S:
                seen = now, self._uncached_tokens(request)
            self._uncached[request.key] = seen

    def _middle_s_per_token(self, model: ModelId) -> float:
        """Of the middle one of the replicas that serve it, by what they report."""
        reported = (replica.prefill_line[0] for replica in self._replicas.serving(model))
        known = sorted(filter(None, reported)) or [PREFILL_S_PER_TOKEN]
        return believed_slope(known[len(known) // 2])


def _arrival(request: Request) -> Arrival:
    return effective_arrival(request), request.key
