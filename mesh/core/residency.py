"""Who may be given a request at all: the hard filter before any policy is asked.

It fails closed. A place carries a label only if mesh.toml gives it to the place's region *and*
the place itself does not deny it: a replica may vouch for fewer labels in its heartbeats, a peer
must name its labels in its digests. So a region can't pull in prompts by claiming more than the
file says, and one that knows of no labels gets none that want some.

Whom nobody may serve is refused for good (403) as soon as that is certain: by the map, when no
region on it will do, and by experience, when nobody who would do has been heard of for KEPT_S.
Until then it is held like a request for a model whose replicas are away, because a restart or a
cut link is a wait and not "never".
"""

from collections.abc import Iterable

from mesh.core.peers import Peer, PeerTable
from mesh.core.replicas import Replica, ReplicaTable
from mesh.core.request import Request
from schemas.ids import RegionId
from schemas.residency import NOTHING, Ground, Label, labels_text, narrowed

KEPT_S = 120.0  # as the name of a model outlives its last replica (`models.py`)
LOOK_S = 1.0  # between two looks at who is there
KINDS_MAX = 1024  # different sets of labels that are remembered

EXCLUDED = "residency"  # why a candidate in a receipt could not be chosen

Carried = frozenset[Label]


class Residency:
    """One router's. Give `look` the tables at every tick."""

    def __init__(self, home: RegionId, ground: Ground) -> None:
        self._carried = {region: frozenset(labels) for region, labels in ground.carried}
        self._confined = ground.confined_to(home)
        self._listeners = [self._region(region) for region in ground.listeners(home)]
        self._heard: dict[Carried, float] = {}  # who was there last with just these labels
        self._looked_at: float | None = None

    def wanted(self, request: Request) -> frozenset[Label] | None:
        """Labels, one of which a place must carry; None if it may go anywhere.

        What came from another region entered there, and is confined by what it says alone.
        """
        if not request.residency and not self._confined:
            return None
        return narrowed(request.residency, NOTHING if request.hops else self._confined)

    def of_replica(self, replica: Replica) -> Carried:
        """The labels it carries: of its region's, those that its agent vouches for."""
        beat = replica.heartbeat
        carried = self._region(beat.region)
        return carried if beat.residency is None else carried.intersection(beat.residency)

    def of_peer(self, region: RegionId, peer: Peer) -> Carried:
        """The labels it carries: of those on the map, what its routers know of."""
        told = {label for digest in peer.digests.values() for label in digest.residency or ()}
        return self._region(region) & told

    def takes_replica(self, wanted: Carried | None, replica: Replica) -> bool:
        """Whether that replica will do."""
        return wanted is None or not wanted.isdisjoint(self.of_replica(replica))

    def takes_peer(self, wanted: Carried | None, region: RegionId, peer: Peer) -> bool:
        """Whether that region will do; to a confined router, few do for anything."""
        if self._confined and self._confined.isdisjoint(self._region(region)):
            return False
        return wanted is None or not wanted.isdisjoint(self.of_peer(region, peer))

    def may_send_on(self, request: Request, region: RegionId) -> bool:
        """Whether a peer's request may go on to that region from here; a confined region's server
        lets it out under the labels alone that it is confined to."""
        if not self._confined:
            return True
        return not (self._confined & self._region(region)).isdisjoint(request.residency)

    def is_secret(self, request: Request) -> bool:
        """Whether some region that hears of our prefixes must not hear of this one's."""
        wanted = self.wanted(request)
        return wanted is not None and any(map(wanted.isdisjoint, self._listeners))

    def forbids(self, request: Request, now: float) -> str | None:
        """Why this request can go nowhere, today and tomorrow; None if it may yet."""
        wanted = self.wanted(request)
        if wanted is None:
            return None
        self._begin(now)
        said = labels_text(wanted) or "labels that have none in common"
        if all(map(wanted.isdisjoint, self._carried.values())):
            return f"no region that can be asked from here carries {said}"
        for carried, heard_at in self._heard.items():
            if now - heard_at <= KEPT_S and not wanted.isdisjoint(carried):
                return None
        return f"nobody who carries {said} has been heard of for {KEPT_S:g} s"

    def forbids_here(self, request: Request, replicas: ReplicaTable) -> bool:
        """Whether no replica of this region may take a peer's request, free or not."""
        wanted = self.wanted(request)
        return wanted is not None and not any(self.takes_replica(wanted, one) for one in replicas)

    def look(self, replicas: ReplicaTable, peers: PeerTable, now: float) -> None:
        """See who is there; at most every LOOK_S."""
        self._begin(now)
        if not self._carried or (self._looked_at is not None and now - self._looked_at < LOOK_S):
            return
        self._looked_at = now
        self._hear((self.of_replica(replica) for replica in replicas), now)
        self._hear((self.of_peer(region, peer) for region, peer in peers if peer.digests), now)

    def _region(self, region: RegionId) -> Carried:
        return self._carried.get(region, NOTHING)

    def _begin(self, now: float) -> None:
        # Whoever is on the map is given time to be heard of.
        if not self._heard:
            self._heard = dict.fromkeys(self._carried.values(), now)

    def _hear(self, found: Iterable[Carried], now: float) -> None:
        for carried in set(found):
            if carried in self._heard or len(self._heard) < KINDS_MAX:
                self._heard[carried] = now
