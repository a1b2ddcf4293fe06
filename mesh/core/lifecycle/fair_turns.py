"""Whose held request has the next turn, where several tenants wait for the same work.

`requests/fair_shares.py` counts what each was given. Turns of models and classes are as without
tenants; of a model and class they go to the tenant with the least counter, and among counters that
are equal within a quantum, and within a tenant, as in `release_order`. A try counts as if each
request before were placed, and is over only when all were tried: no place stays empty for one that
can't use it.

A newcomer of a tenant with less than all who wait doesn't wait for them. What is in an engine's
queue goes before whoever comes next, whatever the shares, so while others have had requests of
late, a tenant that was given more than one of them is placed on a replica only if the prompts
queued there take less than ROOM_S, so that the engine has work until the next report of it, and on
none that is kept for them while it has work.

Where only one tenant has requests nothing is counted.

Reads: held, replicas, shares, uncached, weights.
Writes: shares.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import islice

from mesh.core.lifecycle import release_order
from mesh.core.model import events as ev
from mesh.core.model.request import Request, Served
from mesh.core.model.served_names import work_name
from mesh.core.placement.placement import NONE, PlacementResult
from mesh.core.requests.fair_shares import QUANTUM_S, FairShares, Placed, engine_s
from mesh.core.requests.hold_queue import Need, Turn, effective_arrival
from mesh.core.state import RouterState
from schemas.decision import Placement
from schemas.ids import ModelId, ReplicaId

ROOM_S = 0.25  # two heartbeats and a half: with one, engines ran dry (docs/benchmarks/fair.md)
OVER_ITS_SHARE = "other tenants have had less, and prompts are queued there"


def shares_of(state: RouterState, request: Request, now: float) -> FairShares | None:
    """The counters that it counts in, if other tenants have requests too: it waits or is to."""
    work, tenant = work_name(request.model), request.tenant
    shares, waiting = state.shares.get(work), state.held.of_tenants(work)
    if shares is None:
        if len(waiting) < (2 if tenant in waiting else 1):
            return None
        shares = state.shares[work] = FairShares(state.weights, waiting, now)
    shares.seen(tenant, waiting, now)
    return shares


def goes_first(state: RouterState, newcomer: Request, shares: FairShares) -> bool:
    """Whether it goes before all that are held for its work."""
    waiting = state.held.of_tenants(newcomer.model)
    if newcomer.tenant in waiting or state.held.waits_above(newcomer):
        return False
    mine = shares.given_s(newcomer.tenant) // QUANTUM_S
    return all(mine < shares.given_s(tenant) // QUANTUM_S for tenant in waiting)


def leaves_room(state: RouterState, request: Request, place: PlacementResult, now: float) -> bool:
    """Whether a request may go into that replica's queue now, or back to the peer that sent it, as
    far as others' shares go."""
    shares = state.shares.get(work_name(request.model))
    goes_back = place.placement is Placement.PEER and not request.kind.ends_here
    if shares is None or not (place.placement is Placement.LOCAL or goes_back):
        return True
    if not shares.is_behind_others(request.tenant, now):
        return True
    if goes_back:
        return False
    replica = state.replicas.by_name[_computes(place)]
    s_per_token = release_order.s_per_token(state, request.model)
    queued = replica.prefill_queue_tokens(now, s_per_token)
    return queued is None or queued * s_per_token <= ROOM_S


def kept_from(
    state: RouterState, request: Request, now: float, found: dict[ModelId, frozenset[str]]
) -> frozenset[str]:
    """Replicas that have work, and are kept for tenants who were given less than its own.

    `found`: what is kept of each kind of work, since the last placement."""
    work = work_name(request.model)
    shares = state.shares.get(work)
    if shares is None or not shares.is_behind_others(request.tenant, now):
        return NONE
    if work not in found:
        known = state.replicas.by_name
        names = (ReplicaId(name) for name in shares.kept(now))
        found[work] = frozenset(name for name in names if name in known and known[name].load)
    return found[work]


def kept_from_all(state: RouterState, request: Request, now: float) -> bool:
    """Whether replicas are kept from all tenants that wait for its work, as from its own."""
    shares = state.shares.get(work_name(request.model))
    tenants = state.held.of_tenants(request.model)
    return shares is not None and all(shares.is_behind_others(one, now) for one in tenants)


def _computes(place: PlacementResult) -> ReplicaId:
    """Which replica computes the prompt, of a local placement."""
    return ReplicaId(place.target or "") if place.prefill is None else place.prefill.replica


def placed(state: RouterState, request: Request, place: PlacementResult, now: float) -> None:
    """Count it, where several tenants have requests."""
    shares = state.shares.get(work_name(request.model))
    if shares is None:
        return
    shares.seen(request.tenant, state.held.of_tenants(request.model), now)
    answer_tokens = 0.0
    if request.answer_tokens != 0:
        answer_tokens = shares.answer_tokens(request.tenant)
    s_per_token = release_order.s_per_token(state, request.model)
    tokens = place.prefill_tokens
    estimate = Placed(request.tenant, tokens, answer_tokens, s_per_token, at=now)
    if place.placement is Placement.LOCAL:
        generates = place.prefill is None
        estimate = shares.computes(_computes(place), estimate, now, generates=generates)
    shares.placed(request.key, estimate, is_followed=request.kind.ends_here)


def came_back(state: RouterState, request: Request, now: float) -> None:
    """It is held again."""
    if (shares := state.shares.get(work_name(request.model))) is not None:
        shares.came_back(request.key, now)


def served(state: RouterState, request: Request, served: Served, now: float) -> None:
    """What its engine reported at its end."""
    shares = state.shares.get(work_name(request.model))
    if shares is None:
        return
    prompt_tokens: float | None = None
    if served.prompt_tokens is not None and served.cached_tokens is not None:
        prompt_tokens = max(0, served.prompt_tokens - served.cached_tokens)
    shares.served(request.key, prompt_tokens, served.output_tokens, now)


def estimated(state: RouterState, event: ev.CostEstimated, now: float) -> None:
    """Its client left, or its deadline passed: what was computed until then counts."""
    shares = state.shares.get(work_name(event.model))
    if shares is not None:
        shares.served(event.key, event.uncached, event.output, now)


def expire(state: RouterState, now: float) -> None:
    """A tick: forget who has had no request for long."""
    for work, shares in list(state.shares.items()):
        if shares.expire(state.held.of_tenants(work), now):
            del state.shares[work]


# Turns.


def in_order(state: RouterState, now: float) -> Iterable[Request]:
    """All held requests, in the order of trying."""
    if not state.held.is_shared:
        return release_order.in_order(state, now)
    return _in_fair_order(state, now)


def _in_fair_order(state: RouterState, now: float) -> Iterator[Request]:
    held = list(state.held)
    lines: dict[release_order.Kind, dict[str, list[Request]]] = {}
    for one in held:
        lines.setdefault((one.model, one.priority), {}).setdefault(one.tenant, []).append(one)
    most = max(1, release_order.SORTED_MAX // sum(map(len, lines.values())))
    first = (one for own in lines.values() for line in own.values() for one in line[:most])
    known = release_order.turns_of(state, list(islice(first, release_order.SORTED_MAX)), now)
    given: dict[str, dict[str, float]] = {}
    orders: dict[release_order.Kind, Iterator[Request]] = {}
    for kind, own in lines.items():
        if len(own) > 1 and shares_of(state, next(iter(own.values()))[0], now) is not None:
            orders[kind] = _fair(state, own, known, given.setdefault(work_name(kind[0]), {}))
        else:
            orders[kind] = (one.request for one in _turns(next(iter(own.values())), known))
    for one in held:
        yield next(orders[one.model, one.priority])


def _turns(line: list[Request], known: Mapping[int, Turn]) -> Iterator[Turn]:
    """Of one tenant: the first ones, those with less to compute before others; then by arrival."""
    first = sorted(known[one.key] for one in line if one.key in known)
    yield from first
    yield from map(release_order.by_arrival, line[len(first) :])


def _fair(
    state: RouterState,
    lines: Mapping[str, list[Request]],
    known: Mapping[int, Turn],
    given: dict[str, float],
) -> Iterator[Request]:
    """Of one model and class, by tenant. `given`: the counters, as if all before were placed."""
    model = next(iter(lines.values()))[0].model
    shares, s_per_token = state.shares[work_name(model)], release_order.s_per_token(state, model)
    queues: dict[str, Iterator[Turn]] = {}
    heads: list[tuple[float, Turn, str]] = []
    for tenant, line in lines.items():
        given.setdefault(tenant, shares.given_s(tenant))
        queues[tenant] = _turns(line, known)
        heads.append((given[tenant] // QUANTUM_S, next(queues[tenant]), tenant))
    heapify(heads)
    while heads:
        quantum, turn, tenant = heads[0]
        if quantum != (quantum := given[tenant] // QUANTUM_S):  # by turns of another class
            heapreplace(heads, (quantum, turn, tenant))
            continue
        request = turn.request
        _, tokens = state.uncached.get(request.key, (0.0, float(request.prompt.tokens)))
        seconds = engine_s(tokens, shares.answer_tokens(tenant), s_per_token)
        given[tenant] += seconds / shares.weight(tenant)
        following = next(queues[tenant], None)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (given[tenant] // QUANTUM_S, following, tenant))
        yield request


def ahead(
    state: RouterState,
    request: Request,
    without: Container[Need] = (),
    gone: Request | None = None,
) -> int:
    """Requests held for its kind of work that go before it; see `release_order.ahead`. Of other
    tenants, as many as have their turns until its own has come, by what theirs usually cost."""
    shares = state.shares.get(work_name(request.model))
    if shares is None or without:
        return release_order.ahead(state, request, without, gone)
    lines, tenant = state.held.of_tenants(request.model), request.tenant
    own = bisect_left(lines.get(tenant, ()), (effective_arrival(request), request.key))
    own -= gone is not None and gone in state.held and gone.arrived_at < request.arrived_at
    s_per_token = release_order.s_per_token(state, request.model)
    usual_s = engine_s(request.prompt.tokens, shares.answer_tokens(tenant), s_per_token)
    until_s = shares.given_s(tenant) + own * shares.cost_s(tenant, usual_s) + QUANTUM_S
    for other, line in lines.items():
        if other != tenant:
            left_s = until_s - shares.given_s(other)
            cost_s = shares.cost_s(other, usual_s)
            own += len(line) if left_s >= len(line) * cost_s else max(0, int(left_s / cost_s))
    return own
