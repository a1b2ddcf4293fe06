"""Those who are held, and when they are tried again: whenever somebody may have room.

A request that may not go where there is room (that place failed it before, or it would rather
wait for another) doesn't block those behind it that may.
"""

from collections.abc import Callable, Mapping

from mesh.core.hold_queue import HoldQueue
from mesh.core.inflight import Inflight
from mesh.core.placement import Place, Placer
from mesh.core.replicas import ReplicaTable
from schemas.ids import ModelId, ReplicaId

NOWHERE: frozenset[str] = frozenset()  # what a request avoids that nobody failed
# Requests held by choice that are asked again at every event; the price of being choosy is work
# for the router, and behind so many there is somebody who isn't.
CHOOSY_MAX = 16


class Line:
    """The hold queue at work."""

    def __init__(
        self,
        held: HoldQueue,
        inflight: Mapping[int, Inflight],
        replicas: ReplicaTable,
        placer: Placer,
        begin: Callable[[Inflight, Place, float], None],
    ) -> None:
        self._held = held
        self._inflight = inflight
        self._replicas = replicas
        self._placer = placer
        self._begin = begin
        self._choosy = 0  # of those held, who could have gone somewhere when last asked

    def must_be_joined(self, model: ModelId) -> bool:
        """Whether a newcomer for that model has its place behind others."""
        return self._held.waiting(model) > self._choosy

    def try_all(self, now: float) -> None:
        """Place those who wait, in the order of trying, as far as there is room."""
        self._choosy = 0
        stuck: set[tuple[ModelId, frozenset[str]]] = set()
        models_left = len(self._held.models())
        for request in self._held:
            record = self._inflight[request.key]
            avoid = record.avoided(now)
            if not stuck.isdisjoint(((request.model, NOWHERE), (request.model, avoid))):
                continue
            place = self._placer.place(request, avoid, now)
            if place.target is not None:
                self._held.release(request)
                self._begin(record, place, now)
                continue
            if place.by_choice and self._choosy < CHOOSY_MAX:
                self._choosy += 1
                continue
            stuck.add((request.model, avoid))
            models_left -= not avoid
            if not models_left:
                return

    def offer(self, name: ReplicaId | None, now: float) -> None:
        """Let those who wait have the room that this replica may have now."""
        replica = None if name is None else self._replicas.get(name)
        if replica is not None and self._placer.may_go(replica, self._held.models(), now):
            self.try_all(now)
