"""Admission: how long a request would wait, whether that is too long, and when a client may retry.

A request with an objective (`slo_ttft_s`) is shed as soon as

    expected > SLO_MARGIN × what is left of its objective, or nothing is left

so that its client can try elsewhere while that helps. The expected seconds, as far as known, are

    line_s      how many go before it / the pace at which held requests are placed
    queue_s     the wait in the engine's queue, by the policy
  + the rest    of the cheapest first token, by the policy: round trip, prefill, …

Both queues drain side by side, so the longer of the two counts and not their sum. While neither is
known no request is shed.

A request without an objective is limited by `queue_delay_s_max`: at five times the
capacity a queue without a limit in seconds answered nearly all requests after 38 s, and refused the
first after 79 s. So a request is refused

    at arrival     if its expected wait exceeds the limit
    while held     once it has waited that long, and its whole wait would be twice the limit

The expected wait is how many go before it (`fair_turns`) by the queue's pace. Before the pace is
known, it is what the first request in the queue has waited, or the policy's estimate of queues if
that is more; being an estimate, it refuses only beyond twice the limit. The second rule is laxer,
because an admitted request is served in time unless the queue slows down, or higher classes or
shorter prompts overtake. Only time in queues counts, other regions' included, not the time of
failed attempts. As many requests as there are replicas may wait whatever the pace, up to
`hold_s_max`: the limit is for crowds, not for long jobs. While no replica serves a request's need,
its time does not count; it starts anew.

When a client may retry: `requests/retry_after.py`.

Reads: absent, begun, dice, held, inflight, paces, retry_after, shares.
Writes: absent, inflight, paces, retry_after.
"""

from dataclasses import replace
from typing import NamedTuple

from mesh.core.lifecycle import fair_turns, release_order
from mesh.core.lifecycle.timeouts import queue_delay_s, serving
from mesh.core.model.rates import ReleasePace
from mesh.core.model.request import Request
from mesh.core.model.served_names import work_name
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.hold_queue import need_of
from mesh.core.requests.record import RequestRecord
from mesh.core.requests.retry_after import RetryAfter
from mesh.core.state import RouterState
from schemas.decision import Placement

HELD_FACTOR = 2.0  # of the limit: the longest whole wait of an admitted request


class LongWait(NamedTuple):
    """A wait in queues that is too long, in seconds."""

    wait_s: float
    limit_s: float
    waited_s: float = 0.0  # of it, by one that was let in

    def __str__(self) -> str:
        limit = f"the queue_delay_s_max of {self.limit_s:g} s"
        if not self.waited_s:
            return f"expected wait {self.wait_s:.1f} s > {limit}"
        more_s = self.wait_s - self.waited_s
        more = f" and {more_s:.1f} s more expected" if more_s >= 0.05 else ""
        return f"waited {self.waited_s:.1f} s{more} > twice {limit}"


# An expected time is a mean of times that scatter about as widely: half as much again is not luck.
SLO_MARGIN = 1.5
MODELS_MAX = 256  # whose queue's pace is remembered; a mesh serves far fewer


class LateFirstToken(NamedTuple):
    """A first token that would come too late: in seconds from the request's arrival."""

    expected_s: float
    slo_s: float

    def __str__(self) -> str:
        return f"a first token after {self.expected_s:.3f} s is too late for {self.slo_s:g} s"


# The pace of queues.


def waits(state: RouterState, request: Request, now: float) -> None:
    work = work_name(request.model)
    if work not in state.paces and len(state.paces) >= MODELS_MAX:
        oldest = next(iter(state.paces))
        del state.paces[oldest]
        state.retry_after.pop(oldest, None)
    state.paces.setdefault(work, ReleasePace()).waits(now)
    release_order.joined(state, request)


def look(state: RouterState, now: float) -> None:
    """A tick: time in which no replica serves a queue does not count for its pace, nor does that
    since the last release before it."""
    if state.shares:
        fair_turns.expire(state, now)
    held = state.held.held_needs
    state.absent = {need for need in held if not serving(state, need, now)}
    served = {work_name(need[0]) for need in held if need not in state.absent}
    for work in state.held.works():
        if (pace := state.paces.get(work)) is not None:
            (pace.waits if work in served else pace.nobody_serves)(now)
    if state.absent:
        for request in state.held:
            if need_of(request) in state.absent:
                state.inflight[request.key].nobody_serves(now)


def released(state: RouterState, request: Request, now: float) -> None:
    if (pace := _pace(state, request)) is not None:
        pace.released(now)
    left(state, request, now)


def left(state: RouterState, request: Request, now: float) -> None:
    pace = _pace(state, request)
    if pace is not None and not state.held.waiting(request.model):
        pace.nobody_waits(now)


def expected_s(
    state: RouterState, request: Request, place: PlacementResult | None, now: float
) -> float | None:
    """Seconds from now until its first token; None while unknown.

    `place`: the last decision about it, if there is one.
    """
    in_line = place is None or place.target is None
    line_s = _line_s(state, request, now) if in_line else None
    first = None if place is None else place.first_token
    if first is None:
        return line_s
    return first.seconds - first.queue_s + max(first.queue_s, line_s or 0.0)


def late(
    state: RouterState, record: RequestRecord, place: PlacementResult | None, now: float
) -> LateFirstToken | None:
    """Its late first token, if it is clear that it can't be in time."""
    request = record.request
    if request.slo_ttft_s is None:
        return None
    so_far_s = now - request.arrived_at
    left_s = request.slo_ttft_s - so_far_s
    soonest_s = expected_s(state, request, place, now)
    if left_s > 0.0 and (soonest_s is None or soonest_s <= SLO_MARGIN * left_s):
        return None
    return LateFirstToken(so_far_s + (soonest_s or 0.0), request.slo_ttft_s)


def with_expectation(
    state: RouterState, record: RequestRecord, place: PlacementResult, now: float
) -> PlacementResult:
    """The placement with the expected first token in its reason."""
    soonest_s = expected_s(state, record.request, place, now)
    if soonest_s is None:
        return place
    return place._replace(reason=f"{place.reason}; first token expected in {soonest_s:.3f} s")


def retry_after_s(
    state: RouterState, request: Request, late: LateFirstToken | None, now: float
) -> float:
    """Whole seconds until its client should retry.

    When it could join the queue or, with an objective, when those before it are gone and it
    would be in time; and after clients that were refused before.
    """
    back = replace(request, arrived_at=now)
    ahead = fair_turns.ahead(state, back, state.absent, gone=request)
    pace_per_s = _pace_per_s(state, request, now)
    wait_s: float | None = 0.0
    if ahead:
        wait_s = ahead / pace_per_s if pace_per_s > 0.0 else None
    if wait_s is not None and late is not None:
        wait_s = max(wait_s, late.expected_s - late.slo_s)
    elif wait_s is not None and request.slo_ttft_s is None:
        place_s = 1.0 / pace_per_s if ahead and state.held.is_full_for(request) else 0.0
        wait_s = max(place_s, wait_s - queue_delay_s(state, request))
    if _pace(state, request) is not None:
        retry_after = state.retry_after.setdefault(work_name(request.model), RetryAfter())
    else:
        retry_after = RetryAfter()
    return retry_after.after_s(wait_s, pace_per_s, now, state.dice)


def _line_s(state: RouterState, request: Request, now: float) -> float | None:
    pace = _pace(state, request)
    per_s = None if pace is None else pace.per_s(now)
    return None if not per_s else (_ahead(state, request) + 1) / per_s


def _ahead(state: RouterState, request: Request) -> int:
    return fair_turns.ahead(state, request, state.absent)


def _pace(state: RouterState, request: Request) -> ReleasePace | None:
    return state.paces.get(work_name(request.model))


def _pace_per_s(state: RouterState, request: Request, now: float) -> float:
    """Of the queue for its work; before that is known, of all attempts."""
    pace = _pace(state, request)
    known = None if pace is None else pace.per_s(now)
    return state.begun.per_s(now) if known is None else known


# Waits that are too long.


def too_long(
    state: RouterState, record: RequestRecord, place: PlacementResult | None, now: float
) -> LongWait | None:
    """Its whole wait if it joins the queue, or stays in it, and that is too long; else None.

    `place`: the last decision about it.
    """
    request, limit_s = record.request, queue_delay_s(state, record.request)
    if not limit_s or request.slo_ttft_s is not None or record.continuations:
        return None
    if place is not None and place.placement is Placement.LOCAL:
        return None  # it begins
    joins = record.held_since is None and not record.attempt
    need = need_of(request)
    waited_s = record.in_line_s(now)
    if not joins and waited_s <= limit_s:
        return None
    left_s, guess_s = _left_s(state, request, place, now, joins=joins)
    wait_s = waited_s + max(left_s, guess_s)
    if wait_s <= HELD_FACTOR * limit_s and not (joins and left_s > limit_s):
        return None
    ahead = _ahead(state, request)
    if not ahead < serving(state, need, now, ahead + 1):
        so_far_s = 0.0 if joins else waited_s
        return LongWait(wait_s, limit_s, so_far_s) if serving(state, need, now, 1) else None
    return None


def _left_s(
    state: RouterState,
    request: Request,
    place: PlacementResult | None,
    now: float,
    *,
    joins: bool,
) -> tuple[float, float]:
    """What it still has to wait: by the queue, and by the policy where the pace is unknown."""
    first = None if place is None else place.first_token
    guess_s = 0.0 if first is None else first.queue_s
    if place is not None and place.placement is Placement.PEER:
        return 0.0, guess_s  # it leaves this queue
    line_s = _line_s(state, request, now)
    if line_s is not None:
        return line_s, 0.0
    head = state.held.next_of(request.model, state.absent) if joins else None
    if head is None:
        return 0.0, guess_s
    return state.inflight[head.key].in_line_s(now), guess_s
