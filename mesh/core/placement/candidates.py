"""The candidates of a placement: the available replicas and peers, and why others are not.

Between two requests of a busy router few of its replicas have changed, and examining each anew
costs as much as pricing it. So a model's layer of replicas is kept until a replica comes or goes,
or begins or ceases to take work (`ReplicaTable.roll`), a round trip changes, or a replica is late.
Of replicas whose load has changed since (`ReplicaTable.changed`) the targets are made anew. It is
kept only where it is the same for all requests for the model: of a whole fleet, for a policy that
judges load by itself, with no request held before and no place to avoid.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from mesh.core.model.request import Request
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
REFUSED_BEFORE = "it refused or failed before"
FOR_OTHERS = "it is kept for tenants that have had less"
NOT_LOADED = "another replica has the adapter"
NO_LOAD_FOR_COPY = "a copy loads no adapter"

RoundTripsByRegion = Mapping[RegionId, float | None]


@dataclass(slots=True)
class CandidateLayer:
    """Replicas, or peers, that serve the model."""

    kind: CandidateKind
    free: list[Target] = field(default_factory=list)
    busy: list[tuple[Target, str]] = field(default_factory=list)  # and why it may not be chosen

    def __len__(self) -> int:
        return len(self.free) + len(self.busy)

    def without(self, kept_from: Collection[str]) -> "CandidateLayer":
        """One in which these are not free, as they are kept for other tenants."""
        if not kept_from:
            return self
        busy = [(target, FOR_OTHERS) for target in self.free if target.name in kept_from]
        free = [target for target in self.free if target.name not in kept_from]
        return CandidateLayer(self.kind, free, self.busy + busy)


@dataclass(slots=True)
class CachedLayer:
    """The layer of one model."""

    layer: CandidateLayer
    places: dict[ReplicaId, int]  # of each replica in `layer.free`
    busy: frozenset[str]  # names of the others in it
    rtt_s: RoundTripsByRegion
    silent_since: float  # the earliest time from which silence of one of the whole fleet counts


class CandidateCache:
    """Makes the layers, and keeps those of replicas."""

    def __init__(
        self,
        replicas: ReplicaTable,
        peers: PeerTable,
        residency: Residency,
        dice: Random,
        late_s: float,
    ) -> None:
        """`late_s`: a replica that has been silent for longer gets no work."""
        self._replicas = replicas
        self._peers = peers
        self._residency = residency
        self._dice = dice
        self._late_s = late_s
        self._kept: dict[ModelId, CachedLayer] = {}
        self._roll = replicas.roll  # of those kept
        self.may_forward = True

    def of_replicas(
        self,
        request: Request,
        avoid: Collection[str],
        now: float,
        ahead: int,
        *,
        sampling: Sampling | None,
        busy_too: bool,
        kept_from: Collection[str] = (),
    ) -> CandidateLayer:
        """The local replicas; valid until the next call. Those in `kept_from` are not free.

        Of a large fleet a sample, if the policy names the replicas that it must contain
        (`sampling`) and any of the sample is available. A request that requires labels gets all:
        few replicas may carry them, and a sample none.
        """
        table, model = self._replicas, request.model
        is_open = not request.residency and not self._residency.is_confined
        wanted: frozenset[Label] | None = None
        if not is_open:
            wanted = self._residency.wanted(request)
        if sampling is not None and wanted is None and len(table.by_name) > ALL_MAX:
            some = serving = table.serving(model)
            if len(serving) > ALL_MAX:
                holders = sampling.holders(request, HOLDERS_MAX)
                some = table.sample_serving(model, holders, self._dice)
            # The hold queue is shared by all replicas: these few get their part of it.
            share = ahead * len(some) / max(1, len(serving))
            layer = self._made(model, some, wanted, avoid, now, share, busy_too=busy_too)
            layer = layer.without(kept_from)
            if layer.free:
                layer = self._judged(layer, request, avoid, now, busy_too=busy_too)
                if layer.free:
                    return layer
        if not busy_too or wanted is not None or avoid or ahead or table.adopted_by_peer:
            replicas = table.by_name.values()
            layer = self._made(model, replicas, wanted, avoid, now, ahead, busy_too=busy_too)
        else:
            layer = self._of_all(model, now)
        return self._judged(layer.without(kept_from), request, avoid, now, busy_too=busy_too)

    def of_peers(
        self,
        request: Request,
        avoid: Collection[str],
        now: float,
        *,
        busy_too: bool,
        queue_max: int | None = None,
    ) -> CandidateLayer:
        """The peer regions. Those with a longer hold queue than `queue_max` are busy."""
        layer = CandidateLayer(CandidateKind.PEER)
        if not self._peers.by_region:
            return layer
        residency, wanted = self._residency, self._residency.wanted(request)
        for region, peer in self._peers.by_region.items():
            why = residency.keeps_from_peer(wanted, region, peer)
            if why is None:
                why = self._peers.unavailable_because(
                    peer,
                    request.model,
                    now,
                    busy_too=busy_too,
                    labels=wanted,
                    queue_max=queue_max,
                )
            queue, seen = peer.queue, peer.seen_within(wanted)
            load = queue + len(peer.forwarded_at)
            target = Target(region, load, layer.kind, peer.rtt_s, None, seen, queue)
            if why is None and region not in avoid:
                layer.free.append(target)
            else:
                layer.busy.append((target, why or REFUSED_BEFORE))
        if self._peers.failing.places:
            layer = self._without_failing(layer, request, avoid, now)
        return layer

    def _judged(
        self,
        layer: CandidateLayer,
        request: Request,
        avoid: Collection[str],
        now: float,
        *,
        busy_too: bool,
    ) -> CandidateLayer:
        """Local replicas without those that fail, and without slow ones that have their share."""
        if self._replicas.failing.places:
            layer = self._without_failing(layer, request, avoid, now)
        if not busy_too and request.model in self._replicas.unloaded:
            layer = _loaded_first(layer, request.model)
        if (slow := self._replicas.slow).by_key and len(layer.free) > 1:
            barred = {
                target.name: (target, why)
                for target in layer.free
                if (why := slow.bars(target.name, request.model))
            }
            if 0 < len(barred) < len(layer.free):
                free = [target for target in layer.free if target.name not in barred]
                layer = CandidateLayer(layer.kind, free, [*layer.busy, *barred.values()])
        return layer

    def _without_failing(
        self, layer: CandidateLayer, request: Request, avoid: Collection[str], now: float
    ) -> CandidateLayer:
        """Without places whose last answers failed, if any other place may answer the request."""
        is_local = layer.kind is CandidateKind.REPLICA
        failing = self._replicas.failing if is_local else self._peers.failing
        barred = [
            (target, why)
            for target in layer.free
            if (why := failing.bars(target.name, request.model, now, has_failed=bool(avoid)))
        ]
        if not barred:
            return layer
        names = {target.name for target, _ in barred}
        free = [target for target in layer.free if target.name not in names]
        if not free and not self._is_answered_elsewhere(request, avoid, now):
            return layer
        return CandidateLayer(layer.kind, free, layer.busy + barred)

    def _is_answered_elsewhere(self, request: Request, avoid: Collection[str], now: float) -> bool:
        """Whether a place that is not failing, and has not failed it, may answer it now or soon."""
        table, peers, model = self._replicas, self._peers, request.model
        wanted = self._residency.wanted(request)
        for replica in table.serving(model):
            name = replica.heartbeat.replica
            if (
                name not in avoid
                and table.serves(replica, model)
                and now - replica.silent_from <= self._late_s
                and table.failing.bars(name, model, now, has_failed=bool(avoid)) is None
                and self._residency.takes_replica(wanted, replica)
            ):
                return True
        if not (request.kind.may_leave and self.may_forward):
            return False
        return any(
            region not in avoid
            and self._residency.keeps_from_peer(wanted, region, peer) is None
            and peers.unavailable_because(peer, model, now, busy_too=True, labels=wanted) is None
            and peers.failing.bars(region, model, now, has_failed=bool(avoid)) is None
            for region, peer in peers
        )

    def _of_all(self, model: ModelId, now: float) -> CandidateLayer:
        """The kept layer, brought up to date, or a new one."""
        replicas, rtt_s = self._replicas.by_name.values(), self._rtt_s()
        self._bring_up_to_date()
        kept = self._kept.get(model)
        if kept is not None and kept.rtt_s == rtt_s:
            if now - kept.silent_since > self._late_s:
                kept.silent_since = min([one.silent_from for one in replicas])
            if now - kept.silent_since <= self._late_s:
                return kept.layer
        layer = self._made(model, replicas, None, (), now, 0, busy_too=True)
        # A replica that doesn't report how much it takes may cease to with any hand-off.
        if len(layer) and all(one.heartbeat.outstanding_max is not None for one in replicas):
            silent_since = min([one.silent_from for one in replicas])
            if now - silent_since > self._late_s:  # it can't be kept
                return layer
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            places = {ReplicaId(target.name): place for place, target in enumerate(layer.free)}
            busy = frozenset(target.name for target, _ in layer.busy)
            self._kept[model] = CachedLayer(layer, places, busy, rtt_s, silent_since)
        return layer

    def _bring_up_to_date(self) -> None:
        """Make the targets anew whose replicas have changed since the last time."""
        table, changed = self._replicas, self._replicas.changed
        if self._roll != table.roll:
            self._roll = table.roll
            self._kept.clear()
        for model, kept in list(self._kept.items()) if changed else ():
            if not kept.busy.isdisjoint(changed):
                del self._kept[model]
                continue
            free, places = kept.layer.free, kept.places
            replicas = [table.by_name[name] for name in changed if name in places]
            for target in _targets(replicas, kept.rtt_s, 0):
                free[places[ReplicaId(target.name)]] = target
        changed.clear()

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
            others += [(one, REFUSED_BEFORE) for one in free if one.heartbeat.replica in avoid]
            free = [one for one in free if one.heartbeat.replica not in avoid]
        kind = CandidateKind.REPLICA
        busy = [
            (Target(replica.heartbeat.replica, replica.load, kind, None, replica), why)
            for replica, why in others
            if why != OTHER_MODEL
        ]
        return CandidateLayer(kind, _targets(free, self._rtt_s(), ahead), busy)

    def _sorted_by_label(
        self, wanted: frozenset[Label], free: list[Replica], others: list[tuple[Replica, str]]
    ) -> tuple[list[Replica], list[tuple[Replica, str]]]:
        """Replicas without the labels are EXCLUDED, whatever else keeps them from being chosen."""
        within: list[Replica] = []
        outside: list[tuple[Replica, str]] = []
        for replica in free:
            if self._residency.takes_replica(wanted, replica):
                within.append(replica)
            else:
                outside.append((replica, EXCLUDED))
        for replica, why in others:
            if why != OTHER_MODEL and not self._residency.takes_replica(wanted, replica):
                why = EXCLUDED
            outside.append((replica, why))
        return within, outside

    def _rtt_s(self) -> RoundTripsByRegion:
        known = self._peers.rtt_s
        return {region: known.get(region) for region in self._replicas.loss_detectors}


def targets_of(replicas: Sequence[Replica]) -> list[Target]:
    """Replicas of this region as candidates, without a hold queue before them."""
    return _targets(replicas, {one.heartbeat.region: 0.0 for one in replicas}, 0)


def _loaded_first(layer: CandidateLayer, adapter: ModelId) -> CandidateLayer:
    """For a policy that prices no load: those that have it loaded; where none is free, those that
    are loading it; else all."""
    loads = [_loads(target.replica, adapter) for target in layer.free]
    least = min(loads, default=0)
    found = CandidateLayer(layer.kind, busy=layer.busy.copy())
    for target, load in zip(layer.free, loads, strict=True):
        if load == least:
            found.free.append(target)
        else:
            found.busy.append((target, NOT_LOADED))
    return found


def of_loaded(layer: CandidateLayer, adapter: ModelId) -> CandidateLayer:
    """The layer for a copy, whose answer nobody gets: an adapter that is loaded for it could take
    the place of one that clients use."""
    found = CandidateLayer(layer.kind, busy=layer.busy.copy())
    for target in layer.free:
        if target.replica is None or not target.replica.load_s(adapter):
            found.free.append(target)
        else:
            found.busy.append((target, NO_LOAD_FOR_COPY))
    return found


def _loads(replica: Replica | None, adapter: ModelId) -> int:
    """0: it has the adapter; 1: it is loading it; 2: it would have to."""
    assert replica is not None, "a local one"
    beat = replica.heartbeat
    return 2 if adapter in beat.loadable else int(adapter in beat.loading)


def _targets(replicas: Sequence[Replica], rtt_s: RoundTripsByRegion, ahead: float) -> list[Target]:
    kind, new = CandidateKind.REPLICA, tuple.__new__
    # `Target.__new__` takes twice as long, and this runs for every candidate.
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
                None,
            ),
        )
        for replica in replicas
    ]
