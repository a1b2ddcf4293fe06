"""Every replica of every region as a candidate of every router, at once and without delay.

A router of the mesh sees its own replicas by their heartbeats and a peer region by one digest.
Here each router sees what the router of every region sees at this moment, and names the replica
that is to serve: a request for a far one is forwarded as any other, and the router there does as
it was told. What is on its way to a region is known to all. Nothing of this could be built; the
difference to what can be is the price of federation.

All routers share one instance of the policy inside, so what one of them has learned or placed,
all know.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar

from mesh.core.gossip.news import News
from mesh.core.gossip.siblings import Siblings
from mesh.core.gossip.told import ToldPrefixes
from mesh.core.policies.base import Ageing, Choice, Policy, Spot, Target, least_loaded
from mesh.core.region.replica import Replica
from mesh.core.requests.request import Request, Served
from mesh.sim.ask import number_of
from schemas.decision import CandidateKind
from schemas.ids import RegionId, RequestId

if TYPE_CHECKING:
    from mesh.sim.world import World


@dataclass(slots=True)
class Told:
    """Where one request is to be served. `on_its_way`: the router there has not seen it yet."""

    choice: Choice
    name: str
    tokens: int
    on_its_way: bool

    @property
    def spot(self) -> Spot:
        """Its replica, as the policy inside knows it."""
        return Spot(CandidateKind.REPLICA, self.name)


class Everywhere:
    """One policy over all replicas, at every router of a world with the topology `mesh`."""

    joint: ClassVar[bool] = True
    judges_load: ClassVar[bool] = True

    def __init__(self, world: "World", inside: Policy, dice: Random) -> None:
        self._world = world
        self._dice = dice
        self._inside = inside
        self._told: dict[RequestId, Told] = {}

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The replica that the policy inside picks of all, or the way to it."""
        if request.hops:
            return self._as_told(request, targets)
        ways = {one.name: (one, way) for one, way in self._all(request, targets, now)}
        if not ways:
            return Choice(None, "no replica of any region is free")
        candidates = [one for one, _ in ways.values()]
        choice = self._inside.choose(_unique(request), candidates, now)
        if choice.target is None:
            return choice._replace(scores=())
        _, way = ways[choice.target.name]
        is_far = way.kind is CandidateKind.PEER
        told = Told(choice, choice.target.name, request.prompt.tokens, is_far)
        self._told[request.request_id] = told
        return choice._replace(target=way, scores=())

    def hit_ratio(self, request: Request) -> float:
        """As the policy inside knows it."""
        return self._inside.hit_ratio(request)

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """Told to the policy inside once, by the router whose client asks."""
        told = self._told.get(request.request_id)
        if request.answer_inbox is None and told is not None:
            self._inside.placed(_unique(request), told.spot, now)

    def began(self, request: Request, spot: Spot, now: float) -> None:
        """Its first token has come."""
        told = self._told.get(request.request_id)
        if told is not None:
            self._inside.began(_unique(request), told.spot, now)

    def served(self, request: Request, spot: Spot, served: Served, now: float) -> None:
        """Its whole answer has come."""
        told = self._told.get(request.request_id)
        if told is not None:
            self._inside.served(_unique(request), told.spot, served, now)

    def left(self, request: Request, spot: Spot, now: float) -> None:
        """The attempt is over."""
        told = self._told.pop(request.request_id, None)
        if told is not None:
            self._inside.left(_unique(request), told.spot, now)

    def forget(self, spot: Spot) -> None:
        """A replica is gone; of regions nothing is remembered."""
        if spot.kind is CandidateKind.REPLICA:
            self._inside.forget(spot)

    def expire(self, now: float) -> None:
        """Every router ticks; the policy inside takes as many turns."""
        if isinstance(self._inside, Ageing):
            self._inside.expire(now)

    def tell(self, news: News) -> None:
        """Whoever sees everything needs no news."""

    def hear(self, told: ToldPrefixes) -> None:
        """Nor to be told any."""

    def share(self, siblings: Siblings) -> None:
        """All routers share the one inside."""

    def _all(
        self, request: Request, targets: Sequence[Target], now: float
    ) -> Iterator[tuple[Target, Target]]:
        """Our own replicas, and those of every region that could be forwarded to; and the way."""
        coming: dict[str, list[Told]] = {}
        for told in self._told.values():
            if told.on_its_way:
                coming.setdefault(told.name, []).append(told)
        for target in targets:
            if target.replica is not None:
                yield _with(target, target.replica, coming.get(target.name, []), now), target
                continue
            core = self._world.routers[RegionId(target.name)].core
            if core is None:
                continue
            for replica in core.replicas:
                name = replica.heartbeat.replica
                if core.replicas.unavailable_because(replica, request.model, now, busy_too=True):
                    continue
                seen = Target(name, replica.load, CandidateKind.REPLICA, target.rtt_s, replica)
                yield _with(seen, replica, coming.get(name, []), now), target

    def _as_told(self, request: Request, targets: Sequence[Target]) -> Choice:
        told = self._told.get(request.request_id)
        if told is not None:
            told.on_its_way = False
            for target in targets:
                if target.name == told.name:
                    return told.choice._replace(target=target, scores=())
        target = least_loaded(targets, self._dice)
        return Choice(target, "the replica that was named is not there any more")


def _unique(request: Request) -> Request:
    """Keys tell requests apart in one router; inside, those of all routers meet."""
    return replace(request, key=number_of(request.request_id))


def _with(target: Target, replica: Replica, coming: Sequence[Told], now: float) -> Target:
    """The target with what is on its way to its region and meant for it."""
    if not coming:
        return target
    sent = deepcopy(replica.on_the_way)
    for number, told in enumerate(coming, 1):
        held = told.choice.held_tokens or 0
        sent.add(-number, told.tokens, told.tokens - held, now)
    load = target.load + len(coming)
    return target._replace(load=load, replica=replace(replica, on_the_way=sent))
