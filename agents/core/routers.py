"""The routers that send work here: which are alive, how far each one's hand-offs have arrived, and
the routers of which region may send work at all. And whether an operator has drained the replica.

**Liveness.** Each router publishes a keep-alive every 500 ms, one at rest every 2 s, as it says in
each. A router that is silent for 3 s, or comes back with a new epoch, never reads its old
responses: the engine must stop generating them. Routers of another region have 7 s, in which a
broken link is repaired. Only routers with requests here are judged; keep-alives of others are
remembered (in a bounded table), to notice a restart just before a router's first request. A
keep-alive after a gap means that frames to the router may be lost. While the agent's own bus is
away no router counts as silent, for AWAY_S_MAX; when it is back, and after this process itself was
stopped, every router gets its full time again.

**Ownership.** A lease may change hands before its last owner learns of it (a stopped process, a
slow link). So leases carry fencing *terms* that rise with every change of owner, routers publish
theirs with each keep-alive, and an agent takes work only from the region with the highest term. The
bus can't check a header of a work message, but it binds each region to its keep-alive subjects, so
only keep-alives claim ownership. An adopter's work carries its term too: work under an old lease is
refused. An adopter that has not repeated its claim for ADOPTED_S is gone: the replica's own routers
are accepted again, without a term, because their lease stream may have stopped.

**Operators' orders** come with the keep-alives of the replica's own region, which read them from a
stream: so an agent needs no access to it, and the heartbeat informs every router, peer and batch
runner at once. Of routers that differ, the one with the newest record counts.

A claim counts while its region repeats it; the term that is remembered of it rises in steps
(`TERM_STEP`). So a peer that claims the highest possible term holds the replica only while it
goes on claiming, and the next honest write is above what it leaves.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from agents.core.events import DrainOrder, RouterKey
from schemas.exchange import ALIVE_S
from schemas.ids import RegionId, RouterId
from schemas.state import TERM_MAX, TERM_STEP, ReplicaState, longer_s

MISSED_S = ALIVE_S + 0.4
SILENCE_S, SILENCE_ABROAD_S = 3.0, 7.0
AWAY_S_MAX = 30.0  # clients may have left long ago, and the engine computes for them
ROUTERS_MAX = 1024
ACK_ROUTERS_MAX = 64  # of its own region and of an adopter; more than they run

STEP, STEP_S = TERM_STEP, 1.0
ORDERS_KEPT_S = 10.0  # of a router that has fallen silent, while others still speak
ADOPTED_S = 1.5  # three keep-alives of an adopter; longer than its lease


class RouterChange(NamedTuple):
    """What a keep-alive shows."""

    restarted: bool  # since its last keep-alive
    resync: bool  # its latest frames may be lost
    is_new: bool = False  # the first one of this router


@dataclass(slots=True)
class _Router:
    seen_at: float
    epoch: int | None
    requests: int
    cut_off: bool = False  # the bus was away since its last keep-alive
    missed_s: float = MISSED_S  # after its last keep-alive, as that said: some were missed


class RouterLiveness:
    """Fed with keep-alives, with the begin and end of requests, and with losses of the bus."""

    def __init__(self, region: RegionId) -> None:
        self._region = region
        self.orders = OperatorOrders()
        self._routers: dict[RouterKey, _Router] = {}
        self._away_since: float | None = None
        self._new_are_cut_off_until = -inf  # routers that are new may have been cut off as well

    def join(self, key: RouterKey, now: float) -> None:
        """One more request of this router. Pair with `leave`."""
        router = self._routers.get(key)
        if router is None:
            router = self._enter(key, now, None)
        elif router.requests == 0:
            router.seen_at, router.missed_s = now, MISSED_S
        router.requests += 1

    def leave(self, key: RouterKey) -> None:
        self._routers[key].requests -= 1

    def alive(
        self,
        key: RouterKey,
        epoch: int,
        now: float,
        order: DrainOrder | None = None,
        next_within_s: float = ALIVE_S,
    ) -> RouterChange:
        if order is not None and key.region == self._region:
            self.orders.alive(key, order, now)
        router = self._routers.get(key)
        is_new = router is None
        if router is None:
            router = self._enter(key, now, epoch)
        restarted = router.epoch is not None and router.epoch != epoch
        resync = router.cut_off or now - router.seen_at >= router.missed_s
        if resync and self._new_are_cut_off_until == inf:
            self._new_are_cut_off_until = now + SILENCE_ABROAD_S  # frames wait no longer than this
        router.seen_at, router.epoch, router.cut_off = now, epoch, False
        router.missed_s = MISSED_S
        if not router.requests:
            router.missed_s += longer_s(next_within_s, ALIVE_S)
        return RouterChange(restarted, resync, is_new)

    def bus_lost(self, now: float) -> None:
        if self._away_since is None:
            self._away_since = now

    def bus_returned(self, now: float) -> None:
        self._away_since = None
        self.restart_clock(now)

    def restart_clock(self, now: float) -> None:
        """No keep-alive could arrive until now: silence counts from here on."""
        self._new_are_cut_off_until = inf
        for router in self._routers.values():
            router.seen_at, router.cut_off = now, True

    def silent(self, now: float) -> list[RouterKey]:
        """Routers with requests here whose last keep-alive is too old."""
        if self._away_since is not None:
            lost = now - self._away_since >= AWAY_S_MAX
            return [key for key, router in self._routers.items() if lost and router.requests]
        return [
            key
            for key, router in self._routers.items()
            if router.requests and now - router.seen_at >= self._patience_s(key)
        ]

    def _patience_s(self, key: RouterKey) -> float:
        return SILENCE_S if key.region == self._region else SILENCE_ABROAD_S

    def _enter(self, key: RouterKey, now: float, epoch: int | None) -> _Router:
        if len(self._routers) >= ROUTERS_MAX:
            idle = [(one.seen_at, key) for key, one in self._routers.items() if not one.requests]
            if idle:
                del self._routers[min(idle)[1]]
        router = self._routers[key] = _Router(
            now, epoch, 0, cut_off=now < self._new_are_cut_off_until
        )
        return router


@dataclass(frozen=True, slots=True)
class HandoffNumber:
    """The router that sent a work message, and its running number there."""

    router: RouterId
    number: int
    owner: RegionId | None = None  # the router's region, where it has adopted the replica


class HandoffAcks:
    """The last hand-off number of each router: `Heartbeat.taken`; the latest routers are kept.

    A router adds to a replica's pending what it handed off beyond this number, so that two
    placements within one heartbeat don't both see an idle replica. The *last* number is kept, not
    the highest: one router's numbers arrive in order, over one connection, and a router that
    restarted counts from 1 again.

    `owner`: the region of an adopter's router, None for the replica's own region.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[RegionId | None, RouterId], int] = {}

    def record(self, handoff: HandoffNumber) -> None:
        router = (handoff.owner, handoff.router)
        self._last.pop(router, None)
        if len(self._last) >= ACK_ROUTERS_MAX:
            del self._last[next(iter(self._last))]
        self._last[router] = handoff.number

    def forget(self, router: RouterId, owner: RegionId | None = None) -> None:
        """The router restarted: its numbers start again."""
        self._last.pop((owner, router), None)

    def snapshot(self, owner: RegionId | None = None) -> dict[RouterId, int]:
        return {router: last for (of, router), last in self._last.items() if of == owner}


class OperatorOrders:
    """Whether an operator has drained this replica, by what its region's routers read.

    The orders of the last router that was alive hold until another one brings newer ones: a region
    that loses all its routers keeps its replicas drained.
    """

    def __init__(self) -> None:
        self._by_router: dict[RouterKey, tuple[DrainOrder, float]] = {}
        self.is_drained = False

    def alive(self, router: RouterKey, order: DrainOrder, now: float) -> None:
        """A router of the replica's own region has published the order that it knows of."""
        known = self._by_router
        if router not in known and len(known) >= ACK_ROUTERS_MAX:
            del known[min(known, key=lambda name: known[name][1])]
        known[router] = (order, now)
        for name, (_, seen_at) in list(known.items()):
            if now - seen_at > ORDERS_KEPT_S:
                del known[name]
        self.is_drained = max(known.values())[0].drained

    def applied_to(self, state: ReplicaState) -> ReplicaState:
        """The state of a replica whose engine and agent are in that one."""
        drains = self.is_drained and state is ReplicaState.READY
        return ReplicaState.DRAINING if drains else state


@dataclass(slots=True)
class Fence:
    """Which region owns one replica, by the claims in keep-alives; checked before work is taken."""

    home: RegionId
    term: int = 0  # the highest one claimed, as far as it is believed
    _claimed: int = 0  # by the owner, as it published it
    _ceiling: int = STEP  # of `term`, since `_stepped_at`
    _stepped_at: float = -inf
    _owner: RegionId | None = None  # None while no region has claimed it
    _claimed_at: float = -inf

    def owner(self, now: float) -> RegionId | None:
        """The region that has adopted the replica; None while its own region owns it."""
        if self._owner in (None, self.home) or now - self._claimed_at > ADOPTED_S:
            return None
        return self._owner

    def claim(self, owner: RegionId, term: int, now: float) -> None:
        """That region claims the replica under this term; a term above TERM_MAX is no claim."""
        if term > TERM_MAX:
            return
        is_fresh = now - self._claimed_at <= ADOPTED_S
        known = self._claimed if is_fresh else self.term
        if term > known or (owner == self._owner and term >= self.term):
            self._claimed, self._owner, self._claimed_at = term, owner, now
            if now - self._stepped_at >= STEP_S:
                self._stepped_at, self._ceiling = now, self.term + STEP
            self.term = max(self.term, min(term, self._ceiling))

    def admits(self, owner: RegionId, term: int | None, now: float) -> bool:
        """Whether to take work from a router of `owner` that hands it over under this term."""
        adopter = self.owner(now)
        if adopter is None:
            return owner == self.home
        return owner == adopter and term is not None and term >= self._claimed
