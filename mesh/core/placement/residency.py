"""Who may be given a request at all: the hard filter before any policy is asked.

It fails closed. A place carries a label only if mesh.toml gives it to the place's region *and*
the place itself does not deny it: a replica may vouch for fewer labels in its heartbeats, a peer
must name its labels in its digests. So a region can't pull in prompts by claiming more than the
file says, and one that knows of no labels gets none that want some.

Two things must never be mistaken for each other. What the map forbids is *never*: no region on it
will do, so the request is refused for good (403), and a place outside is left out as EXCLUDED. Who
would do by the map and is away (restarting, cut off, silent) is *not now*: the request is held like
any other, and ends as 503 with a time to come back, however long the carriers have been away. In
neither case does it go anywhere else.

Rejected: 403 once no carrier has been heard of for two minutes (a long outage is no prohibition,
and clients don't try again after one).
"""

from mesh.core.model.request import Request
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import Refusal
from schemas.ids import RegionId
from schemas.residency import NOTHING, Ground, Label, Labels, labels_text, narrowed

# Why a candidate in a receipt could not be chosen.
EXCLUDED = "residency"  # it is not on that ground
AWAY = "silent"  # it is, and has not been heard of lately

CarriedLabels = frozenset[Label]


class Residency:
    """One router's."""

    def __init__(self, home: RegionId, ground: Ground) -> None:
        self._carried = {region: frozenset(labels) for region, labels in ground.carried}
        self._home = home
        self._confined = ground.confined_to(home)
        self._listeners = [self._region(region) for region in ground.listeners(home)]

    def wanted(self, request: Request) -> frozenset[Label] | None:
        """Labels, one of which a place must carry; None if it may go anywhere.

        What came from another region entered there, and is confined by what it says alone.
        """
        return self.wanted_by(request.residency, is_foreign=bool(request.hops))

    def wanted_by(self, labels: Labels, *, is_foreign: bool) -> frozenset[Label] | None:
        """The same of any request that says these labels."""
        if not labels and not self._confined:
            return None
        return narrowed(labels, NOTHING if is_foreign else self._confined)

    def of_replica(self, replica: Replica) -> CarriedLabels:
        """The labels it carries: of its region's, those that its agent vouches for."""
        beat = replica.heartbeat
        carried = self._region(beat.region)
        return carried if beat.residency is None else carried.intersection(beat.residency)

    def of_peer(self, region: RegionId, peer: Peer) -> CarriedLabels:
        """The labels it carries: of those on the map, what its routers know of."""
        told = {label for digest in peer.digests.values() for label in digest.residency or ()}
        return self._region(region) & told

    def takes_replica(self, wanted: CarriedLabels | None, replica: Replica) -> bool:
        """Whether that replica will do."""
        return wanted is None or not wanted.isdisjoint(self.of_replica(replica))

    def takes_peer(self, wanted: CarriedLabels | None, region: RegionId, peer: Peer) -> bool:
        """Whether that region will do at this moment."""
        return self.keeps_from_peer(wanted, region, peer) is None

    def keeps_from_peer(
        self, wanted: CarriedLabels | None, region: RegionId, peer: Peer
    ) -> str | None:
        """Why that region will not do: EXCLUDED, or AWAY; None if it will.

        To a confined router, few will do for anything.
        """
        if self._confined and self._confined.isdisjoint(self._region(region)):
            return EXCLUDED
        if wanted is None or not wanted.isdisjoint(self.of_peer(region, peer)):
            return None
        is_away = not peer.digests and not wanted.isdisjoint(self._region(region))
        return AWAY if is_away else EXCLUDED

    def is_secret(self, request: Request) -> bool:
        """Whether some region that hears of our prefixes must not hear of this one's."""
        wanted = self.wanted(request)
        return wanted is not None and any(map(wanted.isdisjoint, self._listeners))

    def forbids(self, request: Request) -> str | None:
        """Why this request can go nowhere, today and tomorrow; None if it may yet."""
        wanted = self.wanted(request)
        if wanted is None or not all(map(wanted.isdisjoint, self._carried.values())):
            return None
        said = labels_text(wanted) or "labels that have none in common"
        return f"no region that can be asked from here carries {said}"

    def within(self, request: Request) -> str:
        """What a message says of the places that will do: empty if any will."""
        wanted = self.wanted(request)
        return "" if wanted is None else f" that carries {labels_text(wanted)}"

    def refuses_here(self, request: Request, replicas: ReplicaTable) -> Refusal | None:
        """What to tell a peer whose request no replica of this region may take, free or not."""
        wanted = self.wanted(request)
        if wanted is None or any(self.takes_replica(wanted, one) for one in replicas):
            return None
        never = wanted.isdisjoint(self._region(self._home))
        return Refusal.RESIDENCY if never else Refusal.NO_REPLICA

    def _region(self, region: RegionId) -> CarriedLabels:
        return self._carried.get(region, NOTHING)
