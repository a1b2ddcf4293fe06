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
replica of unknown speed counts as in time. Rejected: replicas reserved for own work (idle GPUs),
and a limit on the number of foreign requests (it ignores their length).

A held request of a peer waits like those of the region's own clients, at its place by arrival: its
prefix may be here, or this queue be shorter. Its own router keeps the client, and receives HELD at
once and every HELD_S, then PLACED or REFUSED. While it waits, its prefix may be evicted here or
another region have room. So whenever it is tried, other regions are priced as well, and once one of
them is clearly cheaper it is handed back: refused as ELSEWHERE, to be placed by its own router,
which chooses by what it knows itself. Rejected: refusing it and letting its region ask
again: that region learns half a round trip late that a replica is free, so between two busy
regions no request would be exchanged. A client that hangs up meanwhile is not reported here: when
the request is placed, its router cancels it at the replica.
"""

from mesh.core.lifecycle.admission import Admission
from mesh.core.lifecycle.queue_scheduler import QueueScheduler
from mesh.core.model import effects as fx
from mesh.core.model.request import Request
from mesh.core.model.served_names import is_keeper_name
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.requests.record import RequestRecord
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.exchange import HELD_S, Refusal
from schemas.ids import ModelId

HELD_MAX = 128  # bodies are kept with them, in the one budget for all bodies


class ForwardedQueue:
    """Peers' requests in the hold queue: their routers are sent HELD now and then."""

    def __init__(self, held: HoldQueue, effects: list[fx.Effect]) -> None:
        self._held = held
        self._effects = effects
        self._announced_at: dict[int, float] = {}  # by key

    def is_full_for(self, request: Request) -> bool:
        return len(self._announced_at) >= HELD_MAX or self._held.is_full_for(request)

    def check(self, request: Request, now: float) -> None:
        """A tick: send HELD again if it is a peer's request and time."""
        if now - self._announced_at.get(request.key, now) >= HELD_S:
            self.notify(request, now)

    def leave(self, request: Request) -> None:
        self._announced_at.pop(request.key, None)

    def notify(self, request: Request, now: float) -> None:
        assert request.answer_inbox is not None
        self._announced_at[request.key] = now
        self._effects.append(fx.TellHeld(request.answer_inbox, request.hops))


class ForwardedRequests:
    """Decides on peers' requests; changes no state."""

    def __init__(
        self,
        settings: RouterSettings,
        replicas: ReplicaTable,
        placer: Placer,
        scheduler: QueueScheduler,
        queue: ForwardedQueue,
        admission: Admission,
    ) -> None:
        self.follow(settings)
        self._replicas = replicas
        self._placer = placer
        self._scheduler = scheduler
        self._queue = queue
        self._admission = admission

    def follow(self, settings: RouterSettings) -> None:
        """Decide by these from now on."""
        self._goal_s = settings.own_ttft_goal_s

    def place(self, request: Request, now: float, *, draining: bool) -> PlacementResult | Refusal:
        """A placement on a local replica, a hold, or the reason for refusing it."""
        if draining:
            return Refusal.DRAINING
        if request.warm:
            return Refusal.NOT_IDLE
        if is_keeper_name(request.model):
            if self._is_gone(request.model):
                return Refusal.NOT_KEPT
            if self._replicas.drains(request.model):
                return Refusal.KEEPER_DRAINS
        may_wait = self._goal_s is None and self._placer.judges_load
        if not may_wait and self._scheduler.must_queue(request):
            return self._placer.forbids_here(request) or Refusal.OWN_WORK
        place = self._scheduler.place_new(request, now)
        if place.placement is not Placement.LOCAL:
            why = self._placer.forbids_here(request)
            if why is not None or not may_wait or self._queue.is_full_for(request):
                return why or Refusal.NO_REPLICA
            # Its wait at home counts.
            too_long = self._admission.delay.too_long(RequestRecord(request), place, now)
            return place if too_long is None else Refusal.NO_REPLICA
        if self._goal_s is not None and not self._leaves_room(request, place, self._goal_s, now):
            return Refusal.OWN_WORK
        return place

    def _is_gone(self, keeper: ModelId) -> bool:
        """Whether no replica has that name; a router that knows none can't say."""
        return len(self._replicas) > 0 and not self._replicas.serving(keeper)

    def _leaves_room(
        self, request: Request, place: PlacementResult, goal_s: float, now: float
    ) -> bool:
        return any(
            self._in_time(replica, place, goal_s, now)
            for replica in self._replicas
            if self._replicas.unavailable_because(replica, request.model, now) is None
        )

    def _in_time(self, replica: Replica, place: PlacementResult, goal_s: float, now: float) -> bool:
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
