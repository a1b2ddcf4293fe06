"""Regions with real router cores and nothing else: leases under every fault that there is.

Messages of a region's own bus arrive, late but in order. Those between regions are late, lost, and
held up by cuts; a cut may keep a message and deliver it long after. Routers crash and come back,
streams stop answering, and every router's clock shows another time, by up to hours. What holds all
the time is checked after every event (`Broken` is raised); what must come true in the end is
asked by the tests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from schemas.ids import RegionId, RouterId

TICK_S = 0.05
PING_S = 1.0
LEASE_S = RouterSettings().lease_s
LOCAL_S = 0.002


class Broken(AssertionError):
    """What must never be, was."""


@dataclass(slots=True)
class Stream:
    """A region's lease: how many writes it took, and whether it answers."""

    last: int = 0
    is_up: bool = True


@dataclass(slots=True)
class Router:
    """One router process; `core` is None while it is down."""

    region: RegionId
    name: RouterId
    clock_s: float  # what its clock shows beyond the world's
    starts: int = 0
    core: RouterCore | None = None


@dataclass
class LeaseWorld:
    """`run` it for a while; `crash`, `start`, `cut`, `heal` in between or at set times."""

    seed: int
    regions: tuple[RegionId, ...]
    routers_each: int = 2
    loss: float = 0.0
    jitter_s: float = 0.0
    rtt_s: Callable[[RegionId, RegionId], float] = lambda one, other: 0.1
    now: float = 0.0
    streams: dict[RegionId, Stream] = field(default_factory=dict)
    routers: list[Router] = field(default_factory=list)
    cuts: dict[frozenset[RegionId], float] = field(default_factory=dict)  # and what share is kept

    def __post_init__(self) -> None:
        self.dice = Random(self.seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._both_since: dict[RegionId, float] = {}
        self._kept: list[tuple[frozenset[RegionId], Callable[..., None], tuple[Any, ...]]] = []
        self.streams = {region: Stream() for region in self.regions}
        for region in self.regions:
            for number in range(self.routers_each):
                skew_s = self.dice.uniform(0.0, 7200.0)
                self.routers.append(Router(region, RouterId(f"r{number + 1}"), skew_s))
        for router in self.routers:
            self.at(self.dice.uniform(0.0, 0.1), self.start, router)

    # What tests do.

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Let it happen then."""
        self._count += 1
        heappush(self._heap, (max(when, self.now), self._count, call, args))

    def run(self, seconds: float) -> None:
        """Let time pass, and check after every event."""
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call, args = heappop(self._heap)
            call(*args)
            self._check()
        self.now = until

    def of(self, region: RegionId) -> list[Router]:
        return [router for router in self.routers if router.region == region]

    def living(self, region: RegionId) -> bool:
        return any(router.core is not None for router in self.of(region))

    def start(self, router: Router) -> None:
        """The process begins, knowing nothing."""
        if router.core is not None:
            return
        router.starts += 1
        router.core = RouterCore(
            RouterState(
                region=router.region,
                router=router.name,
                epoch=router.starts,
                settings=RouterSettings(trie_bytes_per_s=0),
                dice=Random(f"{self.seed} {router.region} {router.name} {router.starts}"),
                peers=tuple(peer for peer in self.regions if peer != router.region),
            )
        )
        self._tick(router, router.core)
        self._ping(router, router.core)

    def crash(self, router: Router) -> None:
        """kill -9."""
        router.core = None

    def crash_all(self, region: RegionId) -> None:
        for router in self.of(region):
            self.crash(router)

    def start_all(self, region: RegionId) -> None:
        for router in self.of(region):
            self.start(router)

    def cut(self, one: RegionId, other: RegionId, kept: float = 0.0) -> None:
        """Nothing passes; that share of the messages waits for the end of it."""
        self.cuts[frozenset((one, other))] = kept

    def heal(self, one: RegionId, other: RegionId) -> None:
        link = frozenset((one, other))
        self.cuts.pop(link, None)
        waiting = [late for late in self._kept if late[0] == link]
        self._kept = [late for late in self._kept if late[0] != link]
        for _, call, args in waiting:
            self.at(self.now + self.dice.uniform(0.0, 0.1), call, *args)

    def heal_all(self) -> None:
        """The end of all faults but crashes."""
        self.loss = self.jitter_s = 0.0
        for link in list(self.cuts):
            self.heal(*link)
        for stream in self.streams.values():
            stream.is_up = True

    # What is asked of it.

    def adopters(self, region: RegionId) -> set[RegionId]:
        """Regions with a router that would place work on that region's replicas now."""
        return {
            router.region
            for router in self.routers
            if router.core is not None and region in router.core.ownership.adopted
            if router.core.ownership.is_ours(region, self.now + router.clock_s)
        }

    def home_owns(self, region: RegionId) -> bool:
        """Whether one of its own routers holds its lease, as far as it knows."""
        return any(
            router.core is not None and region in router.core.ownership.owned
            for router in self.of(region)
        )

    def terms(self, region: RegionId) -> set[int]:
        """Of all routers that think they own it."""
        owned = [r.core.ownership.owned for r in self.routers if r.core is not None]
        return {terms[region] for terms in owned if region in terms}

    def _check(self) -> None:
        for region in self.regions:
            adopters = self.adopters(region)
            if len(adopters) > 1:
                raise Broken(f"{self.now:.3f}: {region} is adopted by {sorted(adopters)}")
            if not adopters or not self.home_owns(region):
                self._both_since.pop(region, None)
                continue
            since = self._both_since.setdefault(region, self.now)
            if self.now - since > LEASE_S:
                raise Broken(f"{self.now:.3f}: {region} owns itself, and {adopters} own it too")

    # What happens by itself.

    def _tick(self, router: Router, core: RouterCore) -> None:
        if router.core is core:
            self._feed(router, ev.Tick())
            self.at(self.now + TICK_S, self._tick, router, core)

    def _ping(self, router: Router, core: RouterCore) -> None:
        if router.core is not core:
            return
        for peer in self.regions:
            if peer != router.region and self.living(peer):
                rtt_s = self.rtt_s(router.region, peer)
                self._feed(router, ev.RttMeasured(peer, rtt_s))
        self.at(self.now + PING_S, self._ping, router, core)

    def _feed(self, router: Router, event: ev.Event) -> None:
        if router.core is None:
            return
        for effect in router.core.handle(event, self.now + router.clock_s):
            if isinstance(effect, fx.PublishDigest):
                for other in self.routers:
                    if other.region != router.region:
                        self._send(router.region, other, ev.DigestSeen(effect.digest))
            elif isinstance(effect, fx.ClaimLease):
                to = effect.lease.region
                self._carry(router.region, to, self._claimed, router, router.core, effect)

    def _claimed(self, router: Router, core: RouterCore, claim: fx.ClaimLease) -> None:
        stream = self.streams[claim.lease.region]
        if not stream.is_up:
            return
        granted = claim.expected == stream.last
        if granted:
            stream.last += 1
            for other in self.routers:
                self._send(claim.lease.region, other, ev.LeaseHeard(claim.lease, stream.last))
        answer = ev.LeaseAnswered(claim.number, granted, stream.last)
        if router.core is core:  # an inbox dies with its process
            self._send(claim.lease.region, router, answer)

    def _send(self, source: RegionId, router: Router, event: ev.Event) -> None:
        self._carry(source, router.region, self._feed, router, event)

    def _carry(self, source: RegionId, to: RegionId, call: Callable[..., None], *args: Any) -> None:
        if source == to:
            self.at(self.now + self.dice.uniform(0.2, 1.0) * LOCAL_S, call, *args)
            return
        link = frozenset((source, to))
        if link in self.cuts:
            if self.dice.random() < self.cuts[link]:
                self._kept.append((link, call, args))
        elif self.dice.random() >= self.loss:
            late_s = self.dice.expovariate(1 / self.jitter_s) if self.jitter_s else 0.0
            self.at(self.now + self.rtt_s(source, to) / 2 + late_s, call, *args)


def faults(world: LeaseWorld, seconds: float) -> Iterator[str]:
    """Put faults of all kinds into that stretch of time; says which, for the one who must look."""
    dice = world.dice
    pairs = [(a, b) for a in world.regions for b in world.regions if a < b]
    for _ in range(dice.randrange(2, 9)):
        at, until = sorted(world.now + dice.uniform(0.0, seconds) for _ in range(2))
        kind = dice.choice(("router", "region", "region", "cut", "stream"))
        region, pair = dice.choice(world.regions), dice.choice(pairs)
        if kind == "router":
            router = dice.choice(world.routers)
            world.at(at, world.crash, router)
            world.at(until, world.start, router)
            yield f"{router.region}/{router.name} is down from {at:.2f} to {until:.2f}"
        elif kind == "region":
            world.at(at, world.crash_all, region)
            world.at(until, world.start_all, region)
            yield f"{region} is down from {at:.2f} to {until:.2f}"
        elif kind == "cut":
            kept = dice.choice((0.0, 0.5, 1.0))
            world.at(at, world.cut, *pair, kept)
            world.at(until, world.heal, *pair)
            yield f"{pair} is cut from {at:.2f} to {until:.2f}, {kept} of its messages kept"
        else:
            stream = world.streams[region]
            world.at(at, setattr, stream, "is_up", False)
            world.at(until, setattr, stream, "is_up", True)
            yield f"the stream of {region} stands still from {at:.2f} to {until:.2f}"
