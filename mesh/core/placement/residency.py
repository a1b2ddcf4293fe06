"""Residency: the hard filter of candidates by label, before any policy.

It fails closed. A place carries a label only if mesh.toml gives it to the place's region *and* the
place does not deny it: a replica's heartbeats may name fewer labels, a peer's digests must name
its labels. So a region can't attract prompts by claiming more than the file gives it, and a region
of an older version, whose digests name no labels, gets no labelled requests.

A request that no region of the map may serve is refused for good (403), and a place without the
label is listed as EXCLUDED. If a region that may serve it is away (restarting, cut off, silent),
the request is held like any other, and ends as 503 with a time to retry, however long it takes. In
neither case does it go anywhere else.
"""

from mesh.core.model.request import Request
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import Refusal
from schemas.ids import RegionId
from schemas.residency import NOTHING, Ground, Label, Labels, labels_text, narrowed

# Why a candidate in a receipt could not be chosen.
EXCLUDED = "residency"  # it carries none of the labels
AWAY = "silent"  # it carries one, and its routers are silent

CarriedLabels = frozenset[Label]


class Residency:
    """Which places a request may go to, for one router."""

    def __init__(self, home: RegionId, ground: Ground) -> None:
        self._carried = {region: frozenset(labels) for region, labels in ground.carried}
        self._home = home
        self._confined = ground.confined_to(home)
        self.is_confined = bool(self._confined)  # this router's clients, to labels of its region
        self._listeners = [self._region(region) for region in ground.listeners(home)]

    def wanted(self, request: Request) -> frozenset[Label] | None:
        """Labels, one of which a place must carry; None if it may go anywhere.

        A peer's request is confined by its own labels alone.
        """
        return self.wanted_by(request.residency, is_foreign=bool(request.hops))

    def wanted_by(self, labels: Labels, *, is_foreign: bool) -> frozenset[Label] | None:
        """The same for any request with these labels."""
        if not labels and not self._confined:
            return None
        return narrowed(labels, NOTHING if is_foreign else self._confined)

    def of_replica(self, replica: Replica) -> CarriedLabels:
        """The labels it carries: its region's, less those that its heartbeats don't name."""
        beat = replica.heartbeat
        carried = self._region(beat.region)
        return carried if beat.residency is None else carried.intersection(beat.residency)

    def of_peer(self, region: RegionId, peer: Peer) -> CarriedLabels:
        """The labels it carries: its own on the map that its digests name."""
        named = {label for digest in peer.digests.values() for label in digest.residency or ()}
        return self._region(region) & named

    def takes_replica(self, wanted: CarriedLabels | None, replica: Replica) -> bool:
        """Whether that replica may serve it."""
        return wanted is None or not wanted.isdisjoint(self.of_replica(replica))

    def takes_peer(self, wanted: CarriedLabels | None, region: RegionId, peer: Peer) -> bool:
        """Whether that region may serve it now."""
        return self.keeps_from_peer(wanted, region, peer) is None

    def keeps_from_peer(
        self, wanted: CarriedLabels | None, region: RegionId, peer: Peer
    ) -> str | None:
        """Why that region may not serve it: EXCLUDED, or AWAY; None if it may."""
        if self._confined and self._confined.isdisjoint(self._region(region)):
            return EXCLUDED
        if wanted is None or not wanted.isdisjoint(self.of_peer(region, peer)):
            return None
        is_away = not peer.digests and not wanted.isdisjoint(self._region(region))
        return AWAY if is_away else EXCLUDED

    def is_secret(self, request: Request) -> bool:
        """Whether some region that receives this router's prefixes must not get this prompt's."""
        wanted = self.wanted(request)
        return wanted is not None and any(map(wanted.isdisjoint, self._listeners))

    def forbids(self, request: Request) -> str | None:
        """Why no region of the map may serve this request; None if some may."""
        return self.forbids_labels(self.wanted(request))

    def forbids_labels(self, wanted: CarriedLabels | None) -> str | None:
        """The same for these labels, one of which a place must carry."""
        if wanted is None or not all(map(wanted.isdisjoint, self._carried.values())):
            return None
        named = labels_text(wanted) or "labels that have none in common"
        return f"no region that can be asked from here carries {named}"

    def within(self, request: Request) -> str:
        """For messages: the labels that places must carry; empty if none."""
        wanted = self.wanted(request)
        return "" if wanted is None else f" that carries {labels_text(wanted)}"

    def refuses_here(self, request: Request, replicas: ReplicaTable) -> Refusal | None:
        """The refusal of a peer's request that no replica here may serve, free or not."""
        wanted = self.wanted(request)
        if wanted is None or any(self.takes_replica(wanted, one) for one in replicas):
            return None
        never = wanted.isdisjoint(self._region(self._home))
        return Refusal.RESIDENCY if never else Refusal.NO_REPLICA

    def _region(self, region: RegionId) -> CarriedLabels:
        return self._carried.get(region, NOTHING)
