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
from typing import NamedTuple, Protocol

from mesh.core.model.reported_speed import believed_slope
from mesh.core.model.request import Request
from mesh.core.policies.base import PREFILL_S_PER_TOKEN
from mesh.core.requests.hold_queue import HoldQueue, RequestKind, effective_arrival, kind_of
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
Kind = tuple[ModelId, Priority]


class Turn(NamedTuple):
    """A held request. `at`: when the last of those that it gives way to came, in seconds."""

    at: float
    arrival: Arrival
    request: Request


class Estimates(Protocol):
    """What the order depends on beside the queue; the placer has it."""

    @property
    def judges_load(self) -> bool:
        """Whether the policy does, so that the order is by what is to compute."""

    def hit_ratio(self, request: Request) -> float:
        """Part of a prompt that is cached, 0 to 1."""


class ReleaseOrder:
    """The turns of held requests, as of the last try and of those that were held since."""

    def __init__(
        self,
        held: HoldQueue,
        replicas: ReplicaTable,
        estimates: Estimates,
        longest_wait_s: Callable[[Request], float],
    ) -> None:
        """`longest_wait_s`: the least limit of how long a request may be held, in seconds."""
        self._held, self._replicas, self._estimates = held, replicas, estimates
        self._longest_wait_s = longest_wait_s
        # By key: when it was looked up, and how many tokens it leaves to compute.
        self._uncached: dict[int, tuple[float, float]] = {}
        self._newcomer = NO_KEY, 0.0  # the last one, and its tokens to compute
        self._s_per_token: dict[ModelId, float] = {}
        self._turns: dict[int, Turn] = {}  # by key, of the first SORTED_MAX

    @property
    def _sorts(self) -> bool:
        return self._estimates.judges_load and self._held.is_first_come

    def in_order(self, now: float) -> Iterable[Request]:
        """All held requests; in turns of one model and class, those with less to compute first."""
        self._turns, self._s_per_token = {}, {}
        if not self._sorts:
            return self._held
        rest = iter(self._held)
        first = list(islice(rest, SORTED_MAX))
        self._look_up(first, now)
        alike: dict[Kind, list[Turn]] = {}
        for one in first:
            turn = self._turns[one.key] = self._turn(one, self._uncached[one.key][1])
            alike.setdefault((one.model, one.priority), []).append(turn)
        turns = {kind: iter(sorted(own, key=_at)) for kind, own in alike.items()}
        return chain([next(turns[one.model, one.priority]).request for one in first], rest)

    def joined(self, request: Request) -> None:
        """It is held from now on, or for another model than before."""
        if not self._sorts or len(self._held) > SORTED_MAX:
            return
        if len(self._turns) >= 2 * SORTED_MAX:  # nothing was tried for long, and many have left
            held = self._held.group_of
            self._turns = {key: one for key, one in self._turns.items() if key in held}
        self._turns[request.key] = self._turn(request, self._tokens_of(request))

    def ahead(
        self,
        request: Request,
        without: Container[RequestKind] = (),
        gone: Request | None = None,
    ) -> int:
        """Requests held for its kind of work that go before it, whether it is held or not; beyond
        the first SORTED_MAX by arrival alone.

        `without`: requests of these kinds are not counted, unless it is one of them. `gone`: nor is
        this one, which may be held.
        """
        place = came = _arrival(request)
        turn_of, is_missing = request, False
        if (others := self._others(request, without)) is not None:
            mine = self._turns.get(request.key)
            if mine is None or mine.arrival != came:
                mine = self._turn(request, self._tokens_of(request))
            earlier = sum([one[:2] < mine[:2] for one in others])
            before = bisect_left(others, came, key=_arrival_of)
            if earlier != before:
                # It takes the turn of the one that has as many before it by arrival.
                _, place, turn_of = others[earlier - (earlier > before)]
                is_missing = (gone is not None or request not in self._held) and came < place
        ahead = self._held.ahead(request, without, turn_of) + is_missing
        return ahead - (gone is not None and gone in self._held and _arrival(gone) < place)

    def _others(self, request: Request, without: Container[RequestKind]) -> list[Turn] | None:
        """The turns of the others of its model and class, by arrival; None where it has none."""
        key, held = request.key, self._held.group_of
        if not self._sorts or (key not in self._turns and len(held) >= SORTED_MAX):
            return None
        kind = request.model, request.priority
        others = [
            one
            for other, one in self._turns.items()
            if other in held and other != key and (one.request.model, one.request.priority) == kind
        ]
        if without:
            own = kind_of(request)
            kinds = [kind_of(one.request) for one in others]
            others = list(compress(others, [one == own or one not in without for one in kinds]))
        return sorted(others, key=_arrival_of)

    def _turn(self, request: Request, tokens: float) -> Turn:
        most_s = min(SHORTER_S_MAX, self._longest_wait_s(request))
        s_per_token = self._s_per_token.get(request.model)
        if s_per_token is None:
            s_per_token = self._middle_s_per_token(request.model)
            self._s_per_token[request.model] = s_per_token
        at = request.arrived_at + min(most_s, SHORTER_FACTOR * tokens * s_per_token)
        return Turn(at, _arrival(request), request)

    def _tokens_of(self, request: Request) -> float:
        """Of its prompt, to compute. A newcomer's are asked for several times."""
        if (known := self._uncached.get(request.key)) is not None:
            return known[1]
        if self._newcomer[0] != request.key:
            self._newcomer = request.key, self._uncached_tokens(request)
        return self._newcomer[1]

    def _uncached_tokens(self, request: Request) -> float:
        return request.prompt.tokens * (1.0 - self._estimates.hit_ratio(request))

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
