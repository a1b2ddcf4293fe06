"""What the twin's routers send beside requests: digests, pings, keepalives, prefixes and leases.

The messages are the live ones, over the network's links with their delay, jitter, loss and cuts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.router import RouterCore
from mesh.sim.event_queue import CoalescingSender
from mesh.sim.network import RegionPair
from mesh.sim.replica import SimReplica
from mesh.sim.router import SimRouter
from schemas.gossip import PEERS, TrieAnswer, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RegionId, RouterId
from schemas.state import Digest, Lease

if TYPE_CHECKING:
    from mesh.sim.world import World

TICK_S = 0.05
ALIVE_S = 0.5
PING_S = 1.0

Performers = dict[type, Callable[[Any], None]]


class RouterTimers:
    """One router's ticks, digests, pings and keepalives, at the live intervals.

    `begin` at every start of the router; a crash ends them. A keepalive goes to the agents that
    hold answers for this router, because only those use it. The first one after a start goes to
    every agent, for those keep the router's epoch; so does each in a region that was ever adopted,
    for its agents must know their owner.
    """

    def __init__(self, world: "World", router: SimRouter, digest_gap_s: float) -> None:
        """`digest_gap_s`: the least time between two digests; 0 publishes every change at once."""
        self._world = world
        self._router = router
        self._peers = [
            peer for region in world.peers_of(router.site) for peer in world.region_routers[region]
        ]
        self._queue = world.queue
        self._network = world.network
        self._epoch = 0
        self.digests: CoalescingSender[Digest] = CoalescingSender(
            world.queue, digest_gap_s, self._publish
        )
        self._sites: dict[RegionId, list[SimReplica]] = {}
        for replica in world.replicas.values():
            self._sites.setdefault(replica.site, []).append(replica)

    def begin(self, epoch: int) -> None:
        """The router has just been opened with the core of this epoch."""
        core = self._router.core
        assert core is not None
        self._epoch = epoch
        self._send_keepalives(core, is_first=True)
        self._queue.after(ALIVE_S, self._keepalive, core)
        self._tick(core)
        self._ping(core)

    def _publish(self, digest: Digest) -> None:
        for peer in self._peers:
            self._send_state(peer.site, peer.receive_digest, digest)

    def _send_state(self, to: RegionId, call: Callable[..., object], *args: Any) -> None:
        self._network.send_state(self._router.site, to, call, *args)

    def _tick(self, core: RouterCore) -> None:
        if self._router.core is core:
            self._router.tick()
            self._queue.after(TICK_S, self._tick, core)

    def owner_changed(self) -> None:
        """A keepalive out of turn: the leases that this router's region holds have changed."""
        if self._router.core is not None:
            self._send_keepalives(self._router.core)

    def _keepalive(self, core: RouterCore) -> None:
        if self._router.core is core:
            self._send_keepalives(core)
            self._queue.after(ALIVE_S, self._keepalive, core)

    def _send_keepalives(self, core: RouterCore, *, is_first: bool = False) -> None:
        here, owned = self._router.site, core.ownership.owned
        for site, replicas in self._sites.items():
            term = owned.get(site)
            was_adopted = site in self._world.leases.adopters
            to_all = is_first or (term is not None and (site != here or was_adopted))
            self._network.send(
                here, site, self._receive_keepalive, replicas, self._epoch, to_all, term
            )

    def _receive_keepalive(
        self, replicas: list[SimReplica], epoch: int, to_all: bool, term: int | None
    ) -> None:
        for replica in replicas:
            if to_all or replica.answers_to(self._router):
                replica.receive_keepalive(self._router.site, self._router.name, epoch, term)

    def _ping(self, core: RouterCore) -> None:
        if self._router.core is not core:
            return
        for peer in self._peers:
            self._send_state(peer.site, self._pong, peer, self._queue.now)
        self._queue.after(PING_S, self._ping, core)

    def _pong(self, peer: SimRouter, sent_at: float) -> None:
        if peer.core is not None:
            here = self._router.site
            self._network.send_state(peer.site, here, self._measured, peer.site, sent_at)

    def _measured(self, peer: RegionId, sent_at: float) -> None:
        self._router.feed(ev.RttMeasured(peer, self._queue.now - sent_at))


class PrefixGossip:
    """Prefix gossip between all routers: the core's effects carried, lost, and counted.

    `sent_bytes` are counted per link and direction as `schemas.gossip.size_bytes` says, whether
    they arrive or not. What crosses a link once reaches every router of the region there.
    """

    def __init__(self, world: "World") -> None:
        self.sent_bytes: dict[RegionPair, int] = {}
        self._world = world

    def performers(self, origin: Origin) -> Performers:
        """How this router's effects are performed."""
        return {
            fx.PublishTrie: lambda effect: self._publish(origin, effect.delta),
            fx.PublishToSiblings: lambda effect: self._send(
                origin, origin.region, effect.delta, ev.SiblingSeen(effect.delta)
            ),
            fx.AskTrie: lambda effect: self._ask(origin, effect.region, effect.ask),
            fx.AnswerTrie: lambda effect: self._answer(origin, effect.inbox, effect.answer),
        }

    def _publish(self, origin: Origin, delta: TrieDelta) -> None:
        for region in (*self._world.peers_of(origin.region), origin.region):
            self._send(origin, region, delta, ev.TrieSeen(delta))

    def _ask(self, origin: Origin, region: RegionId, ask: TrieAsk) -> None:
        """The inbox names the region and the router that asked, and the stream."""
        inbox = f"{origin.region}/{origin.router}/{ask.stream}"
        event = ev.TrieAsked(ask, origin.region, inbox)
        self._send(origin, region, ask, event, RouterId(ask.router))

    def _answer(self, origin: Origin, inbox: str, answer: TrieAnswer) -> None:
        region, router, stream = inbox.split("/")
        event: ev.Event
        if isinstance(answer, TriePart):
            is_peers = int(stream) == PEERS
            event = ev.TriePartSeen(answer) if is_peers else ev.SiblingPartSeen(answer)
        else:
            event = ev.TrieSeen(answer)
        self._send(origin, RegionId(region), answer, event, RouterId(router))

    def _send(
        self,
        origin: Origin,
        to: RegionId,
        message: TrieAnswer | TrieAsk,
        event: ev.Event,
        only: RouterId | None = None,
    ) -> None:
        if to != origin.region:
            link = (origin.region, to)
            self.sent_bytes[link] = self.sent_bytes.get(link, 0) + size_bytes(message)
        for router in self._world.region_routers[to]:
            if router.origin != origin and only in (None, router.name):
                self._world.network.send_state(origin.region, to, router.feed, event)


@dataclass(frozen=True, slots=True)
class LeaseWrite:
    """A write that a stream accepted."""

    at: float
    seq: int
    lease: Lease


class LeaseStreams:
    """The lease streams of all regions, and the adopters that receive heartbeats.

    A stream is part of its region's server, so it goes on when the router there has crashed, and
    keeps its numbers. `writes` has every write that a stream accepted.
    """

    def __init__(self, world: "World") -> None:
        self.writes: dict[RegionId, list[LeaseWrite]] = {}
        # Of each region that was ever adopted: the routers that receive its heartbeats.
        self.adopters: dict[RegionId, dict[Origin, SimRouter]] = {}
        self._world = world
        self._network = world.network
        self._down: set[RegionId] = set()

    def performers(self, origin: Origin) -> Performers:
        """How this router's effects are performed."""
        return {
            fx.ClaimLease: partial(self._claim, origin),
            fx.OwnershipChanged: lambda effect: self._world.timers[origin].owner_changed(),
            fx.HearReplicas: lambda effect: self._network.send(
                origin.region, effect.region, self._subscribe, effect, origin
            ),
        }

    def stop(self, region: RegionId) -> None:
        """JetStream stops there: it answers nothing, and forgets nothing."""
        self._down.add(region)

    def resume(self, region: RegionId) -> None:
        self._down.discard(region)

    def adopters_of(self, region: RegionId) -> Iterator[SimRouter]:
        """The routers that receive its heartbeats beside its own."""
        yield from self.adopters.get(region, {}).values()

    def _claim(self, origin: Origin, claim: fx.ClaimLease) -> None:
        self._network.send_state(origin.region, claim.lease.region, self._write, origin, claim)

    def _write(self, origin: Origin, claim: fx.ClaimLease) -> None:
        """A claim has arrived at its region's stream."""
        region = claim.lease.region
        writes = self.writes.setdefault(region, [])
        last = len(writes)
        if region in self._down:
            answer = ev.LeaseAnswered(claim.number, granted=False, seq=None)
        elif claim.expected != last:
            answer = ev.LeaseAnswered(claim.number, granted=False, seq=last)
        else:
            writes.append(LeaseWrite(self._world.queue.now, last + 1, claim.lease))
            self._republish(region, ev.LeaseHeard(claim.lease, last + 1))
            answer = ev.LeaseAnswered(claim.number, granted=True, seq=last + 1)
        router = self._world.router(origin)
        self._network.send_state(region, router.site, router.feed, answer)

    def _republish(self, region: RegionId, lease: ev.LeaseHeard) -> None:
        for site in (region, *self._world.peers_of(region)):
            for router in self._world.region_routers[site]:
                self._network.send_state(region, site, router.feed, lease)
        for runner in self._world.runners_of(region):
            self._network.send_state(region, region, runner.feed, lease)

    def _subscribe(self, effect: fx.HearReplicas, origin: Origin) -> None:
        adopters = self.adopters.setdefault(effect.region, {})
        if effect.wanted:
            adopters[origin] = self._world.router(origin)
        else:
            adopters.pop(origin, None)
