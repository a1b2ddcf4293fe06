"""Work that peers ask for: what this region takes, and what it needs for its own clients.

A peer's request is placed on a local replica, held in the region's one line (`guests.py`), sent on
to another region if it may pass more than one (`hops_max`), or refused at once with the reason. It
is held only where the policy judges load: others forward to who is free, so whoever isn't refuses
(SkyWalker 3.3).

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
"""

from mesh.core.federation.guests import Guests
from mesh.core.placing.placement import Place, Placer
from mesh.core.region.replica import Replica
from mesh.core.region.replicas import ReplicaTable
from mesh.core.requests.inflight import Inflight
from mesh.core.requests.request import Request
from mesh.core.settings import RouterSettings
from mesh.core.waiting.admission import Admission
from mesh.core.waiting.line import Line
from schemas.decision import Placement
from schemas.exchange import Refusal


class ForeignWork:
    """Decides on peers' requests; does nothing."""

    def __init__(
        self,
        settings: RouterSettings,
        replicas: ReplicaTable,
        placer: Placer,
        line: Line,
        guests: Guests,
        admission: Admission,
    ) -> None:
        self._goal_s = settings.own_ttft_goal_s
        self._replicas = replicas
        self._placer = placer
        self._line = line
        self._guests = guests
        self._admission = admission

    def place(self, request: Request, now: float, *, draining: bool) -> Place | Refusal:
        """The local replica or other region it goes to, or that it may wait, or why not."""
        if draining:
            return Refusal.DRAINING
        if request.warm:
            return Refusal.NOT_IDLE
        may_wait = self._goal_s is None and self._placer.judges_load
        if not may_wait and self._line.must_be_joined(request):
            return self._placer.forbids_here(request) or Refusal.OWN_WORK
        place = self._line.place_newcomer(request, now)
        if place.placement is Placement.PEER:
            return place
        if place.placement is not Placement.LOCAL:
            why = self._placer.forbids_here(request)
            if why is not None or not may_wait or self._guests.is_full:
                return why or Refusal.NO_REPLICA
            too_long = self._admission.too_long(
                Inflight(request), place, now
            )  # its wait at home counts
            return place if too_long is None else Refusal.NO_REPLICA
        if self._goal_s is not None and not self._leaves_room(request, place, self._goal_s, now):
            return Refusal.OWN_WORK
        return place

    def _leaves_room(self, request: Request, place: Place, goal_s: float, now: float) -> bool:
        return any(
            self._in_time(replica, place, goal_s, now)
            for replica in self._replicas
            if self._replicas.unavailable_because(replica, request.model, now) is None
        )

    def _in_time(self, replica: Replica, place: Place, goal_s: float, now: float) -> bool:
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
