"""What a router does by the clock, at the live pace: ticks, digests, pings, signs of life.

A sign of life is handed to the agents that answer to this router, because only those judge it; the
first one after a start goes to every agent, for those remember an epoch; and so does every one in
a region that was ever adopted, for its agents must know whose they are.
"""

from collections.abc import Callable, Sequence

from mesh.core.model import events as ev
from mesh.core.router import RouterCore
from mesh.sim.event_queue import CoalescingSender, EventQueue
from mesh.sim.network import Network
from mesh.sim.place import Worker
from mesh.sim.router import SimRouter
from schemas.ids import RegionId
from schemas.state import Digest

TICK_S = 0.05
ALIVE_S = 0.5
PING_S = 1.0


class Pulse:
    """One router's. `begin` at every start of the router; a crash ends it by itself."""

    def __init__(
        self,
        router: SimRouter,
        peers: Sequence[SimRouter],
        replicas: Sequence[Worker],
        queue: EventQueue,
        network: Network,
        digest_gap_s: float,
        was_adopted: Callable[[RegionId], bool],
    ) -> None:
        """`replicas`: all of the world. `digest_gap_s`: 0 for news at once."""
        self._router = router
        self._peers = peers
        self._queue = queue
        self._network = network
        self._was_adopted = was_adopted
        self._epoch = 0
        self._digests: CoalescingSender[Digest] = CoalescingSender(
            queue, digest_gap_s, self._publish
        )
        self._sites: dict[RegionId, list[Worker]] = {}
        for replica in replicas:
            self._sites.setdefault(replica.site, []).append(replica)

    def begin(self, epoch: int) -> None:
        """The router has just been opened with the core of this epoch."""
        core = self._router.core
        assert core is not None
        self._epoch = epoch
        self._alive(core, first=True)
        self._tick(core)
        self._ping(core)

    def publish(self, digest: Digest) -> None:
        """Tell the peers how this region is."""
        self._digests.offer(digest)

    def _publish(self, digest: Digest) -> None:
        for peer in self._peers:
            self._network.send_state(self._router.site, peer.site, peer.hear_digest, digest)

    def _tick(self, core: RouterCore) -> None:
        if self._router.core is core:
            self._router.tick()
            self._queue.after(TICK_S, self._tick, core)

    def say_alive(self) -> None:
        """A sign of life out of turn: what is owned has changed."""
        if self._router.core is not None:
            self._say_alive(self._router.core, first=False)

    def _alive(self, core: RouterCore, *, first: bool = False) -> None:
        if self._router.core is core:
            self._say_alive(core, first=first)
            self._queue.after(ALIVE_S, self._alive, core)

    def _say_alive(self, core: RouterCore, *, first: bool) -> None:
        here, owned = self._router.site, core.ownership.owned
        for site, replicas in self._sites.items():
            term = owned.get(site)
            is_new = first or (term is not None and (site != here or self._was_adopted(site)))
            self._network.send(here, site, self._tell, replicas, self._epoch, is_new, term)

    def _tell(self, replicas: Sequence[Worker], epoch: int, is_new: bool, term: int | None) -> None:
        for replica in replicas:
            if is_new or replica.answers_to(self._router):
                replica.hear_alive(self._router.site, self._router.name, epoch, term)

    def _ping(self, core: RouterCore) -> None:
        if self._router.core is not core:
            return
        for peer in self._peers:
            self._network.send_state(
                self._router.site, peer.site, self._pong, peer, self._queue.now
            )
        self._queue.after(PING_S, self._ping, core)

    def _pong(self, peer: SimRouter, sent_at: float) -> None:
        if peer.core is not None:
            self._network.send_state(
                peer.site, self._router.site, self._measured, peer.site, sent_at
            )

    def _measured(self, peer: RegionId, sent_at: float) -> None:
        self._router.feed(ev.RttMeasured(peer, self._queue.now - sent_at))
