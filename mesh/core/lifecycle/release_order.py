"""In which order held requests have their turns, where the policy judges load.

Those with little to compute go first. The mean wait is least if the shortest is computed first
(Smith, Naval Research Logistics Quarterly 3, 1956); first come, first served makes a prompt that
needs 0.1 s wait for many that need 5 s, and under overload answers them all when their clients are
about to give up. And while a cached prompt waits, others may evict what it came for.

A request gives way to shorter ones of its model and class that came within SHORTER_FACTOR times the
time that its own prompt takes to compute. So that nobody is held until it is shed, they came no
later than the least of SHORTER_S_MAX, half of the longest hold, half of its own limit for the first
token, and the limit of queue delay. Turns of models and classes are by `effective_arrival`: which
request of a model and class has one is decided here, among the first SORTED_MAX.

Reads: held, newcomer, placer, replicas, s_per_token, settings, turns, uncached.
Writes: newcomer, s_per_token, turns, uncached.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable
from itertools import chain, compress, islice
from operator import attrgetter

from mesh.core.lifecycle.timeouts import queue_delay_s
from mesh.core.model.reported_speed import believed_slope
from mesh.core.model.request import Request
from mesh.core.policies.base import PREFILL_S_PER_TOKEN
from mesh.core.requests.hold_queue import Arrival, Need, Turn, effective_arrival, need_of
from mesh.core.state import RouterState
from schemas.exchange import Priority
from schemas.ids import ModelId

# Mean time to the first token with a factor of 5, of 30, to that by arrival (simulated, two seeds):
# documents on both GPUs at full load 0.97, 0.35, on H100s 0.80, 0.64; tools above it 0.84, 0.57.
SHORTER_FACTOR = 30.0
SHORTER_S_MAX = 30.0  # half of the longest hold
SORTED_MAX = 64  # the first held requests
UNCACHED_KNOWN_S = 0.1  # a heartbeat's time; each look walks the index
_at, _arrival_of = attrgetter("at"), attrgetter("arrival")

Kind = tuple[ModelId, Priority]


def in_order(state: RouterState, now: float) -> Iterable[Request]:
    """All held requests; in turns of one model and class, those with less to compute first."""
    if not state.placer.judges_load:
        state.turns, state.s_per_token = {}, {}
        return state.held
    rest = iter(state.held)
    first = list(islice(rest, SORTED_MAX))
    known = turns_of(state, first, now)
    alike: dict[Kind, list[Turn]] = {}
    for one in first:
        alike.setdefault((one.model, one.priority), []).append(known[one.key])
    turns = {kind: iter(sorted(own, key=_at)) for kind, own in alike.items()}
    return chain([next(turns[one.model, one.priority]).request for one in first], rest)


def turns_of(state: RouterState, first: Iterable[Request], now: float) -> dict[int, Turn]:
    """A new try begins: the turns of the first held requests, by key; none where all go by
    arrival."""
    state.turns, state.s_per_token = {}, {}
    if state.placer.judges_load:
        _look_up(state, first, now)
        for one in first:
            state.turns[one.key] = _turn(state, one, state.uncached[one.key][1])
    return state.turns


def by_arrival(request: Request) -> Turn:
    """The turn of one that gives way to nobody who came later."""
    return Turn(effective_arrival(request), _arrival(request), request)


def joined(state: RouterState, request: Request) -> None:
    """It is held from now on, or for another model than before."""
    if not state.placer.judges_load or len(state.held) > SORTED_MAX:
        return
    if len(state.turns) >= 2 * SORTED_MAX:  # nothing was tried for long, and many have left
        held = state.held.keys
        state.turns = {key: one for key, one in state.turns.items() if key in held}
    state.turns[request.key] = _turn(state, request, _tokens_of(state, request))


def ahead(
    state: RouterState,
    request: Request,
    without: Container[Need] = (),
    gone: Request | None = None,
) -> int:
    """Requests held for its kind of work that go before it, whether it is held or not; beyond
    the first SORTED_MAX by arrival alone.

    `without`: requests of these needs are not counted, unless it is one of them. `gone`: nor is
    this one, which may be held.
    """
    place = came = _arrival(request)
    turn_of, is_missing = request, False
    if (others := _others(state, request, without)) is not None:
        mine = state.turns.get(request.key)
        if mine is None or mine.arrival != came:
            mine = _turn(state, request, _tokens_of(state, request))
        earlier = sum([one[:2] < mine[:2] for one in others])
        before = bisect_left(others, came, key=_arrival_of)
        if earlier != before:
            # It takes the turn of the one that has as many before it by arrival.
            _, place, turn_of = others[earlier - (earlier > before)]
            is_missing = (gone is not None or request not in state.held) and came < place
    ahead = state.held.ahead(request, without, turn_of) + is_missing
    return ahead - (gone is not None and gone in state.held and _arrival(gone) < place)


def _others(state: RouterState, request: Request, without: Container[Need]) -> list[Turn] | None:
    """The turns of the others of its model and class, by arrival; None where it has none."""
    key, held = request.key, state.held.keys
    if not state.placer.judges_load or (key not in state.turns and len(held) >= SORTED_MAX):
        return None
    kind = request.model, request.priority
    others = [
        one
        for other, one in state.turns.items()
        if other in held and other != key and (one.request.model, one.request.priority) == kind
    ]
    if without:
        own = need_of(request)
        needs = [need_of(one.request) for one in others]
        others = list(compress(others, [one == own or one not in without for one in needs]))
    return sorted(others, key=_arrival_of)


def _longest_wait_s(state: RouterState, request: Request) -> float:
    """Half of the longest hold or of its objective, or the limit of queue delay if less."""
    most_s = state.settings.hold_s_max if request.slo_ttft_s is None else request.slo_ttft_s
    most_s = min(most_s, state.settings.hold_s_max) / 2
    return min(most_s, queue_delay_s(state, request) or most_s)


def _turn(state: RouterState, request: Request, tokens: float) -> Turn:
    most_s = min(SHORTER_S_MAX, _longest_wait_s(state, request))
    compute_s = tokens * s_per_token(state, request.model)
    at = request.arrived_at + min(most_s, SHORTER_FACTOR * compute_s)
    return Turn(at, _arrival(request), request)


def s_per_token(state: RouterState, model: ModelId) -> float:
    """Of the middle one of the replicas that serve it, as of the last try."""
    known = state.s_per_token.get(model)
    if known is None:
        known = state.s_per_token[model] = _middle_s_per_token(state, model)
    return known


def _tokens_of(state: RouterState, request: Request) -> float:
    """Of its prompt, to compute. A newcomer's are asked for several times."""
    if (known := state.uncached.get(request.key)) is not None:
        return known[1]
    if state.newcomer[0] != request.key:
        state.newcomer = request.key, _uncached_tokens(state, request)
    return state.newcomer[1]


def _uncached_tokens(state: RouterState, request: Request) -> float:
    return request.prompt.tokens * (1.0 - state.placer.hit_ratio(request))


def _look_up(state: RouterState, requests: Iterable[Request], now: float) -> None:
    known, state.uncached = state.uncached, {}
    for request in requests:
        seen = known.get(request.key)
        if seen is None or now - seen[0] >= UNCACHED_KNOWN_S:
            seen = now, _uncached_tokens(state, request)
        state.uncached[request.key] = seen


def _middle_s_per_token(state: RouterState, model: ModelId) -> float:
    """Of the middle one of the replicas that serve it, by what they report."""
    reported = (replica.prefill_line[0] for replica in state.replicas.serving(model))
    known = sorted(filter(None, reported)) or [PREFILL_S_PER_TOKEN]
    return believed_slope(known[len(known) // 2])


def _arrival(request: Request) -> Arrival:
    return effective_arrival(request), request.key
