"""The replicas as a placement sees them: who may be chosen, who may not and why.

Between two requests of a busy router few of its replicas have changed, and looking at each of
them anew would cost as much as pricing it. So the layer of a model is kept while nobody comes,
goes, begins to take work or ceases to (`ReplicaTable.roll`), and of those that have more or less in
work since (`ReplicaTable.stirred`) the targets are made anew. Time changes it too: it is kept until
the one that has been silent for longest is late. And it is kept where it is the same for all who
ask for the model: of a whole fleet, for a policy that judges load by itself, with nobody in line
before and nowhere to avoid.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from mesh.core.model.request import Request
from mesh.core.placement.receipt import CandidateLayer
from mesh.core.placement.residency import EXCLUDED, Residency
from mesh.core.policies.base import Sampling, Target
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica import Replica
from mesh.core.view.replica_sampling import ALL_MAX, HOLDERS_MAX
from mesh.core.view.replica_table import OTHER_MODEL, ReplicaTable
from schemas.decision import CandidateKind
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.residency import Label

KEPT_MAX = 64  # models

FreeReplicas = list[Replica]
BusyReplicas = list[tuple[Replica, str]]
RoundTripsByRegion = Mapping[RegionId, float | None]


@dataclass(slots=True)
class CachedLayer:
    """The layer of one model."""

    layer: CandidateLayer
    places: dict[ReplicaId, int]  # of each in `layer.free`
    busy: frozenset[str]  # names of the others in it
    rtt_s: RoundTripsByRegion
    silent_since: float  # the one of the whole fleet that was heard of first


class CandidateCache:
    """Makes them, and keeps the latest."""

    def __init__(
        self,
        replicas: ReplicaTable,
        peers: PeerTable,
        residency: Residency,
        dice: Random,
        late_s: float,
    ) -> None:
        """`late_s`: a replica that has been silent for longer is not given work."""
        self._replicas = replicas
        self._peers = peers
        self._residency = residency
        self._dice = dice
        self._late_s = late_s
        self._kept: dict[ModelId, CachedLayer] = {}
        self._roll = replicas.roll  # of those kept

    def layer(
        self,
        request: Request,
        avoid: Collection[str],
        now: float,
        ahead: int,
        *,
        sampling: Sampling | None,
        busy_too: bool,
    ) -> CandidateLayer:
        """To be read, until it is asked for the next one.

        Of a large fleet some, if the policy says whom it wants to see (`sampling`) and any is
        available. Who wants certain ground sees everybody: few may stand there, and a sample hold
        none.
        """
        wanted, model = self._residency.wanted(request), request.model
        if sampling is not None and wanted is None and len(self._replicas) > ALL_MAX:
            some = serving = self._replicas.serving(model)
            if len(serving) > ALL_MAX:
                holders = sampling.holders(request, HOLDERS_MAX)
                some = self._replicas.sample_serving(model, holders, self._dice)
            # The line is everybody's: to those few comes their part of it.
            share = ahead * len(some) / max(1, len(serving))
            layer = self._made(model, some, wanted, avoid, now, share, busy_too=busy_too)
            if layer.free:
                return layer
        if not busy_too or wanted is not None or avoid or ahead or self._replicas.adopted_by_peer:
            everybody = self._replicas
            return self._made(model, everybody, wanted, avoid, now, ahead, busy_too=busy_too)
        return self._of_all(model, now)

    def _of_all(self, model: ModelId, now: float) -> CandidateLayer:
        """What is kept, brought up to date, or else made anew."""
        rtt_s = self._rtt_s()
        self._bring_up_to_date()
        kept = self._kept.get(model)
        if kept is not None and now - kept.silent_since <= self._late_s and kept.rtt_s == rtt_s:
            return kept.layer
        layer = self._made(model, self._replicas, None, (), now, 0, busy_too=True)
        # Who doesn't say how much it takes may cease to with any hand-off.
        if len(layer) and all(one.heartbeat.outstanding_max is not None for one in self._replicas):
            silent_since = min(one.seen_at for one in self._replicas)
            if now - silent_since > self._late_s:  # it would be of no use
                return layer
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            places = {ReplicaId(target.name): place for place, target in enumerate(layer.free)}
            busy = frozenset(target.name for target, _ in layer.busy)
            self._kept[model] = CachedLayer(layer, places, busy, rtt_s, silent_since)
        return layer

    def _bring_up_to_date(self) -> None:
        """Those that were given work, or were heard of, since the last time."""
        stirred = self._replicas.stirred()
        if self._roll != self._replicas.roll:
            self._roll = self._replicas.roll
            self._kept.clear()
        for model, kept in list(self._kept.items()):
            for replica in stirred:
                place = kept.places.get(replica.heartbeat.replica)
                if place is not None:
                    [kept.layer.free[place]] = _targets([replica], kept.rtt_s, 0)
                elif replica.heartbeat.replica in kept.busy:
                    del self._kept[model]
                    break

    def _made(
        self,
        model: ModelId,
        replicas: Iterable[Replica],
        wanted: frozenset[Label] | None,
        avoid: Collection[str],
        now: float,
        ahead: float,
        *,
        busy_too: bool,
    ) -> CandidateLayer:
        free, others = self._replicas.partition_available(
            model, now, busy_too=busy_too, among=replicas
        )
        if wanted is not None:
            free, others = self._sorted_by_label(wanted, free, others)
        if avoid:
            others += [(one, "failed before") for one in free if one.heartbeat.replica in avoid]
            free = [one for one in free if one.heartbeat.replica not in avoid]
        kind = CandidateKind.REPLICA
        busy = [
            (Target(replica.heartbeat.replica, replica.load, kind, None, replica), why)
            for replica, why in others
            if why != OTHER_MODEL
        ]
        return CandidateLayer(kind, _targets(free, self._rtt_s(), ahead), busy)

    def _sorted_by_label(
        self, wanted: frozenset[Label], free: FreeReplicas, others: BusyReplicas
    ) -> tuple[FreeReplicas, BusyReplicas]:
        """Before anything else: those outside are none of the candidates, whatever they are."""
        inside: FreeReplicas = []
        outside: BusyReplicas = []
        for replica in free:
            if self._residency.takes_replica(wanted, replica):
                inside.append(replica)
            else:
                outside.append((replica, EXCLUDED))
        for replica, why in others:
            if why != OTHER_MODEL and not self._residency.takes_replica(wanted, replica):
                why = EXCLUDED
            outside.append((replica, why))
        return inside, outside

    def _rtt_s(self) -> RoundTripsByRegion:
        return {region: self._peers.rtt_s(region) for region in self._replicas.regions()}


def _targets(replicas: Sequence[Replica], rtt_s: RoundTripsByRegion, ahead: float) -> list[Target]:
    kind, new = CandidateKind.REPLICA, tuple.__new__
    # Made past their own `__new__`, which takes twice as long, for everybody.
    return [
        new(
            Target,
            (
                (beat := replica.heartbeat).replica,
                replica.inside + replica.on_the_way.count,
                kind,
                rtt_s[beat.region],
                replica,
                None,
                ahead,
            ),
        )
        for replica in replicas
    ]
