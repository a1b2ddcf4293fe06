"""Work that peers ask for: what this region takes, and what it needs for its own clients.

A peer's request is placed on a local replica, held in the region's own hold queue, or
refused at once with the reason. It is held only where the policy judges load: others forward to who
is free, so whoever isn't refuses (SkyWalker 3.3).

Nothing is taken that would spoil the region's own goal for first tokens (`own_ttft_goal_s`). With
a goal, nothing foreign is taken while any of the region's own clients wait for the model, and
after taking it, one replica at least must be able to begin with a client of ours in time. For each
replica that has room,

    (prompt tokens queued there + the foreign one's, if it goes there + the client's) × seconds
    per token + what every first token costs

must be within the goal for one of them. The client is imagined to have as much to compute as
the request in hand. A replica whose speed is not known yet counts as in time, as everywhere:
nobody is turned away for a guess.

Rejected: a share of the replicas kept for own work (idle GPUs whenever no client comes), and a
limit on foreign requests (says nothing of how long they are).

Peers' requests that wait here: in the region's one line, at their place by arrival.

A request goes to the region where its first token is expected soonest, and that may be one where
it must wait as well, because its prefix is there or because the line is shorter. It waits there as
those of the region's own clients do and is told from them only by where its end is said: its own
router keeps the client, and hears HELD at once and every HELD_S, or PLACED, or REFUSED.

Rejected: refusing at once whoever can't be placed, and letting its own region ask again. News of a
free place reaches that region half a round trip later than those who wait beside the replica, so
between two busy regions nothing would be exchanged, and each would compute every prefix itself.

Whoever asked may be gone meanwhile. It isn't told to us: when the request is placed, its router
tells the replica to stop.
"""

from mesh.core.lifecycle.admission import Admission
from mesh.core.lifecycle.hold_queue import HoldQueue
from mesh.core.lifecycle.queue_scheduler import QueueScheduler
from mesh.core.lifecycle.record import RequestRecord
from mesh.core.model import effects as fx
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.exchange import HELD_S, Refusal

HELD_MAX = 128  # bodies are kept with them, in the one budget for all bodies


class ForwardedQueue:
    """Knows who of those held is a guest, and keeps their routers informed."""

    def __init__(self, held: HoldQueue, effects: list[fx.Effect]) -> None:
        self._held = held
        self._effects = effects
        self._announced_at: dict[int, float] = {}  # by key

    @property
    def is_full(self) -> bool:
        """Whether no more may wait here."""
        return len(self._announced_at) >= HELD_MAX or self._held.is_full

    def wait(self, request: Request, now: float) -> None:
        """It has joined the line."""
        self._notify_held(request, now)

    def check(self, request: Request, now: float) -> None:
        """A tick: say so again, if it is a guest and time."""
        if now - self._announced_at.get(request.key, now) >= HELD_S:
            self._notify_held(request, now)

    def leave(self, request: Request) -> None:
        """It waits no more."""
        self._announced_at.pop(request.key, None)

    def _notify_held(self, request: Request, now: float) -> None:
        assert request.answer_inbox is not None
        self._announced_at[request.key] = now
        self._effects.append(fx.TellHeld(request.answer_inbox, request.hops))


class ForwardedRequests:
    """Decides on peers' requests; does nothing."""

    def __init__(
        self,
        settings: RouterSettings,
        replicas: ReplicaTable,
        placer: Placer,
        line: QueueScheduler,
        guests: ForwardedQueue,
        admission: Admission,
    ) -> None:
        self._goal_s = settings.own_ttft_goal_s
        self._replicas = replicas
        self._placer = placer
        self._scheduler = line
        self._queue = guests
        self._admission = admission

    def place(self, request: Request, now: float, *, draining: bool) -> PlacementResult | Refusal:
        """The local replica that it goes to, or that it may wait, or why not."""
        if draining:
            return Refusal.DRAINING
        if request.warm:
            return Refusal.NOT_IDLE
        may_wait = self._goal_s is None and self._placer.judges_load
        if not may_wait and self._scheduler.must_queue(request):
            return self._placer.forbids_here(request) or Refusal.OWN_WORK
        place = self._scheduler.place_new(request, now)
        if place.placement is not Placement.LOCAL:
            why = self._placer.forbids_here(request)
            if why is not None or not may_wait or self._queue.is_full:
                return why or Refusal.NO_REPLICA
            too_long = self._admission.too_long(
                RequestRecord(request), place, now
            )  # its wait at home counts
            return place if too_long is None else Refusal.NO_REPLICA
        if self._goal_s is not None and not self._leaves_room(request, place, self._goal_s, now):
            return Refusal.OWN_WORK
        return place

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
            if not _has_second_place(replica):
                return False
            foreign_tokens = place.prefill_tokens
        s_per_token = replica.heartbeat.prefill_s_per_token
        if s_per_token is None:
            return True
        queued = replica.prefill_queue_tokens(now, s_per_token) or 0.0
        tokens = queued + foreign_tokens + place.prefill_tokens
        return tokens * s_per_token + (replica.heartbeat.prefill_base_s or 0.0) <= goal_s


def _has_second_place(replica: Replica) -> bool:
    """Whether its batch, as far as it is known, takes two more."""
    batch_max = replica.heartbeat.batch_max
    return batch_max is None or replica.load + 2 <= batch_max
