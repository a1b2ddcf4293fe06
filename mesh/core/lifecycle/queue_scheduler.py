"""Those who are held, and when they are tried again: whenever somebody may have room.

A request that may not go where there is room (that place failed it before, or it would rather
wait for another) doesn't block those behind it that may.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from mesh.core.lifecycle.hold_queue import HoldQueue, RequestKind, kind_of
from mesh.core.lifecycle.record import RequestRecord
from mesh.core.model.request import Request
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.view.bus_status import AWAY
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Placement
from schemas.ids import ModelId, ReplicaId

OTHERS_WAIT = "others wait for this model"
NOWHERE: frozenset[str] = frozenset()  # what a request avoids that nobody failed
# Requests held by choice that are asked again at every event; the price of being choosy is work
# for the router, and behind so many there is somebody who isn't.
CHOOSY_MAX = 16
# At least so long between two heartbeats that they are asked for: each asking prices everybody,
# and a hundred replicas would otherwise keep a core busy with those who wait.
ASK_AGAIN_S = 0.02


class QueueScheduler:
    """The hold queue at work."""

    def __init__(
        self,
        held: HoldQueue,
        inflight: Mapping[int, RequestRecord],
        replicas: ReplicaTable,
        placer: Placer,
        begin: Callable[[RequestRecord, PlacementResult, float], None],
    ) -> None:
        self._held = held
        self._inflight = inflight
        self._replicas = replicas
        self._placer = placer
        self._begin = begin
        # Of those held, who could have gone somewhere when last asked: keys, with their kinds.
        self._choosy: dict[int, RequestKind] = {}
        self._asked_at = float("-inf")

    def must_queue(self, newcomer: Request) -> bool:
        """Whether it has its place behind others: those for the same model who want to be on the
        same ground. Who waits for other ground must not hold up those who don't need it."""
        model, labels, _ = kind_of(newcomer)
        ours_and_theirs = (model, labels, False), (model, labels, True)
        waiting = sum(map(self._held.alike, ours_and_theirs))
        if not waiting:
            return False
        choosy = sum(
            choosing in ours_and_theirs and self._is_held(key)
            for key, choosing in self._choosy.items()
        )
        return waiting > choosy

    def place_new(self, request: Request, now: float) -> PlacementResult:
        """Where it goes: not where others wait for, but a peer may be better than a line."""
        if self._replicas.bus.is_away(now):
            return self._placer.held(request, AWAY)
        must_wait = self.must_queue(request)
        if must_wait and not self._placer.judges_load:
            return self._placer.held(request, OTHERS_WAIT)
        place = self._placer.place(request, (), now, self._held.waiting(request.model))
        if must_wait and place.placement is Placement.LOCAL:
            return self._placer.held(request, OTHERS_WAIT)
        return place

    def joined(self, request: Request, place: PlacementResult) -> None:
        """A newcomer is held, for that reason."""
        if place.by_choice and len(self._choosy) < CHOOSY_MAX:
            self._choosy[request.key] = kind_of(request)

    def _is_held(self, key: int) -> bool:
        record = self._inflight.get(key)
        return record is not None and record.held_since is not None

    def place_waiting(self, now: float) -> None:
        """Place those who wait, in the order of trying, as far as there is room."""
        if self._replicas.bus.is_away(now):
            return
        self._choosy.clear()
        self._asked_at = now
        stuck: set[tuple[RequestKind, str, frozenset[str]]] = set()
        kinds_left = self._held.kinds * self._placer.policy_count
        ahead: Counter[ModelId] = Counter()  # those of a model that stay, up to here
        for request in self._held:
            record = self._inflight[request.key]
            kind, avoid = (kind_of(request), self._placer.policy_name(request)), record.avoided(now)
            if not stuck.isdisjoint(((*kind, NOWHERE), (*kind, avoid))):
                ahead[request.model] += 1
                continue
            place = self._placer.place(request, avoid, now, ahead[request.model])
            record.decided(place)
            ahead[request.model] += place.target is None
            if place.target is not None:
                self._held.release(request)
                self._begin(record, place, now)
                continue
            if place.by_choice and len(self._choosy) < CHOOSY_MAX:
                self._choosy[request.key] = kind_of(request)
                continue
            stuck.add((*kind, avoid))
            kinds_left -= not avoid
            if not kinds_left:
                return

    def offer(self, name: ReplicaId | None, now: float) -> None:
        """Let those who wait have the room that this replica may have now.

        Where a policy judges load there may always be some: then not more often than it pays.
        """
        if not len(self._held) or (self._placer.judges_load and now - self._asked_at < ASK_AGAIN_S):
            return
        replica = None if name is None else self._replicas.get(name)
        if replica is not None and self._placer.may_go(replica, self._held.models(), now):
            self.place_waiting(now)
