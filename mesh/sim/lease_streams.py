"""The leases of the twin's regions: a stream beside each, claims on their way, who listens to whom.

A stream stands on its region's server, so it goes on when the router there has crashed, and keeps
its numbers. Claims, answers and what a stream says again cross the network's links with their
delay, jitter, loss and cuts. `taken` remembers every write that a stream took, for those who want
to know afterwards who owned what.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mesh.core import effects as fx
from mesh.core import events as ev
from mesh.sim.event_queue import EventQueue
from mesh.sim.network import Network
from mesh.sim.place import Asker
from mesh.sim.topology import Topology
from schemas.ids import RegionId
from schemas.state import Lease


class Router(Asker, Protocol):
    """A router, as far as leases go."""

    def feed(self, event: ev.Event) -> None:
        """Something has happened to it."""


@dataclass(frozen=True, slots=True)
class Write:
    """A write that a stream took."""

    at: float
    seq: int
    lease: Lease


class LeaseStreams:
    """Of all regions. `performers` are one router's."""

    def __init__(
        self,
        queue: EventQueue,
        network: Network,
        routers: Mapping[RegionId, Router],
        topology: Topology,
        say_alive: Callable[[RegionId], None],
    ) -> None:
        """`say_alive`: lets a region's router tell agents at once what it owns."""
        self.taken: dict[RegionId, list[Write]] = {}
        self.adopters: dict[RegionId, dict[RegionId, Asker]] = {}  # who hears its heartbeats
        self._queue = queue
        self._network = network
        self._routers = routers
        self._topology = topology
        self._say_alive = say_alive
        self._down: set[RegionId] = set()

    def performers(self, site: RegionId) -> dict[type, Callable[[Any], None]]:
        """How effects of the router at `site` are performed."""
        return {
            fx.ClaimLease: lambda effect: self._claim(site, effect),
            fx.OwnershipChanged: lambda effect: self._changed(site, effect),
        }

    def stop(self, region: RegionId) -> None:
        """JetStream is gone there: nobody answers, and nothing is forgotten."""
        self._down.add(region)

    def resume(self, region: RegionId) -> None:
        """It is back."""
        self._down.discard(region)

    def was_adopted(self, region: RegionId) -> bool:
        """Whether its agents have ever heard of another owner."""
        return region in self.adopters

    def adopters_of(self, region: RegionId) -> Iterator[Asker]:
        """Who hears its heartbeats beside its own router."""
        yield from self.adopters.get(region, {}).values()

    def _claim(self, site: RegionId, claim: fx.ClaimLease) -> None:
        region = claim.lease.region
        self._network.send_state(site, region, self._arrived, site, claim)

    def _arrived(self, site: RegionId, claim: fx.ClaimLease) -> None:
        region = claim.lease.region
        writes = self.taken.setdefault(region, [])
        last = len(writes)
        if region in self._down:
            answer = ev.LeaseAnswered(claim.number, granted=False, seq=None)
        elif claim.expected != last:
            answer = ev.LeaseAnswered(claim.number, granted=False, seq=last)
        else:
            writes.append(Write(self._queue.now, last + 1, claim.lease))
            self._say_again(region, ev.LeaseHeard(claim.lease, last + 1))
            answer = ev.LeaseAnswered(claim.number, granted=True, seq=last + 1)
        self._network.send_state(region, site, self._routers[site].feed, answer)

    def _say_again(self, region: RegionId, heard: ev.LeaseHeard) -> None:
        for site in (region, *self._topology.peers_of(region, self._routers)):
            self._network.send_state(region, site, self._routers[site].feed, heard)

    def _changed(self, site: RegionId, effect: fx.OwnershipChanged) -> None:
        if effect.region != site:
            self._network.send(site, effect.region, self._listen, effect, self._routers[site])
        self._say_alive(site)

    def _listen(self, effect: fx.OwnershipChanged, router: Asker) -> None:
        ears = self.adopters.setdefault(effect.region, {})
        if effect.owned:
            ears[router.site] = router
        else:
            ears.pop(router.site, None)
