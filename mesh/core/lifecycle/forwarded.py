"""Requests that peers forward here: which of them this region takes, and those that it holds.

A peer's request is placed on a local replica, held in the region's own hold queue, or refused at
once with the reason. It is held only where the policy judges load: other policies forward to free
regions only, so a region that isn't free refuses (SkyWalker 3.3).

No request is taken that would spoil the region's own goal for first tokens (`own_ttft_goal_s`).
With a goal, peers' requests are refused while any of the region's own clients wait for the model,
and after taking one, at least one replica must be able to serve an own client in time. For a
replica that has room,

    (prompt tokens queued there + the foreign one's, if it goes there + the client's) × seconds
    per token + what every first token costs

must be within the goal; the client is assumed to have as much to compute as the request in hand. A
replica of unknown speed counts as in time.

A held request of a peer waits like those of the region's own clients, at its place by arrival: its
prefix may be here, or this queue be shorter. Its own router keeps the client, and receives HELD at
once and every HELD_S, then PLACED or REFUSED. While it waits, its prefix may be evicted here or
another region have room. So whenever it is tried, other regions are priced as well, and once one of
them is clearly cheaper it is handed back: refused as ELSEWHERE, to be placed by its own router,
which chooses by what it knows itself. A client that hangs up meanwhile is not reported here: when
the request is placed, its router cancels it at the replica.

Reads: draining, held, placer, replicas, settings, told_held_at.
Writes: nothing.
"""

from mesh.core.lifecycle import admission, queue_scheduler
from mesh.core.model.request import Request
from mesh.core.model.served_names import is_keeper_name
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.record import RequestRecord
from mesh.core.state import RouterState
from mesh.core.view.replica import Replica
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.ids import ModelId

HELD_MAX = 128  # bodies are kept with them, in the one budget for all bodies


def _is_full_for(state: RouterState, request: Request) -> bool:
    return len(state.told_held_at) >= HELD_MAX or state.held.is_full_for(request)


def place(state: RouterState, request: Request, now: float) -> PlacementResult | Refusal:
    """A placement on a local replica, a hold, or the reason for refusing it."""
    if state.draining:
        return Refusal.DRAINING
    if is_keeper_name(request.model):
        if _is_gone(state, request.model):
            return Refusal.NOT_KEPT
        if state.replicas.drains(request.model):
            return Refusal.KEEPER_DRAINS
    may_wait = state.settings.own_ttft_goal_s is None and state.placer.judges_load
    if not may_wait and queue_scheduler.must_queue(state, request):
        return state.placer.forbids_here(request) or Refusal.OWN_WORK
    place = queue_scheduler.place_new(state, request, now)
    if place.placement is not Placement.LOCAL:
        why = state.placer.forbids_here(request)
        if why is not None or not may_wait or _is_full_for(state, request):
            return why or Refusal.NO_REPLICA
        # Its wait at home counts.
        too_long = admission.too_long(state, RequestRecord(request), place, now)
        return place if too_long is None else Refusal.NO_REPLICA
    if state.settings.own_ttft_goal_s is not None and not _leaves_room(
        state, request, place, state.settings.own_ttft_goal_s, now
    ):
        return Refusal.OWN_WORK
    return place


def _is_gone(state: RouterState, keeper: ModelId) -> bool:
    """Whether no replica has that name; a router that knows none can't say."""
    return len(state.replicas) > 0 and not state.replicas.serving(keeper)


def _leaves_room(
    state: RouterState, request: Request, place: PlacementResult, goal_s: float, now: float
) -> bool:
    return any(
        _in_time(state, replica, place, goal_s, now)
        for replica in state.replicas
        if state.replicas.unavailable_because(replica, request.model, now) is None
    )


def _in_time(
    state: RouterState, replica: Replica, place: PlacementResult, goal_s: float, now: float
) -> bool:
    """Whether a client's request could begin there in time, after the foreign one."""
    foreign_tokens = 0
    if replica.heartbeat.replica == place.target:
        if not _has_room_for_two(replica):
            return False
        foreign_tokens = place.prefill_tokens
    s_per_token = replica.heartbeat.prefill_s_per_token
    if s_per_token is None:
        return True
    queued = replica.prefill_queue_tokens(now, s_per_token) or 0.0
    tokens = queued + foreign_tokens + place.prefill_tokens
    return tokens * s_per_token + (replica.heartbeat.prefill_base_s or 0.0) <= goal_s


def _has_room_for_two(replica: Replica) -> bool:
    """Whether its batch, as far as known, takes two more."""
    batch_max = replica.heartbeat.batch_max
    return batch_max is None or replica.load + 2 <= batch_max
