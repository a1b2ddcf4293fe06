"""The leases of the twin's regions: a stream beside each, claims on their way, who listens to whom.

A stream stands on its region's server, so it goes on when the router there has crashed, and keeps
its numbers. Claims, answers and what a stream says again cross the network's links with their
delay, jitter, loss and cuts. `taken` remembers every write that a stream took, for those who want
to know afterwards who owned what.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.sim.config import SimTopology
from mesh.sim.event_queue import EventQueue
from mesh.sim.network import Network
from mesh.sim.place import Asker
from schemas.ids import RegionId, RouterId
from schemas.state import Lease


class Router(Asker, Protocol):
    """A router, as far as leases go."""

    name: RouterId

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
        crews: Mapping[RegionId, Sequence[Router]],
        topology: SimTopology,
        say_alive: Callable[[Origin], None],
    ) -> None:
        """`crews`: all routers of each region. `say_alive`: lets one of them tell agents at once
        what it owns."""
        self.taken: dict[RegionId, list[Write]] = {}
        self.adopters: dict[RegionId, dict[Origin, Asker]] = {}  # who hears its heartbeats
        self._queue = queue
        self._network = network
        self._crews = crews
        self._topology = topology
        self._say_alive = say_alive
        self._down: set[RegionId] = set()

    def performers(self, origin: Origin) -> dict[type, Callable[[Any], None]]:
        """How effects of that router are performed."""
        return {
            fx.ClaimLease: lambda effect: self._claim(origin, effect),
            fx.OwnershipChanged: lambda effect: self._say_alive(origin),
            fx.HearReplicas: lambda effect: self._hear(origin, effect),
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
        """Who hears its heartbeats beside its own routers."""
        yield from self.adopters.get(region, {}).values()

    def _claim(self, origin: Origin, claim: fx.ClaimLease) -> None:
        self._network.send_state(origin.region, claim.lease.region, self._arrived, origin, claim)

    def _arrived(self, origin: Origin, claim: fx.ClaimLease) -> None:
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
        asker = self._router(origin)
        self._network.send_state(region, asker.site, asker.feed, answer)

    def _say_again(self, region: RegionId, heard: ev.LeaseHeard) -> None:
        for site in (region, *self._topology.peers_of(region, self._crews)):
            for router in self._crews[site]:
                self._network.send_state(region, site, router.feed, heard)

    def _hear(self, origin: Origin, effect: fx.HearReplicas) -> None:
        self._network.send(origin.region, effect.region, self._listen, effect, origin)

    def _listen(self, effect: fx.HearReplicas, origin: Origin) -> None:
        ears = self.adopters.setdefault(effect.region, {})
        if effect.wanted:
            ears[origin] = self._router(origin)
        else:
            ears.pop(origin, None)

    def _router(self, origin: Origin) -> Router:
        [router] = [one for one in self._crews[origin.region] if one.name == origin.router]
        return router
