"""The policies that only a twin can have, beside those of the live router.

`oracle` sees the engines' true state (`mesh.sim.oracle`). `mesh-everywhere` is the `mesh` policy
with the replicas of all regions as candidates. Both run inside a `GlobalView`: every router sees
what the router of every region sees at this moment, without delay, and names the replica that is to
serve; a request for a far one is forwarded as any other, and the router there uses it. All routers
share one instance of the policy, so they share what it learned and placed. Nothing of this could be
built: the difference to `mesh` is the price of federation.

`dynamo` and `llm-d-precise` are ordinary policies of one router that know exactly what engines
hold, as late as KV events bring it. `sglang-router` places as that program does.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from mesh.core.model.request import Request, Served
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, PolicyMakers, Tunable, find_maker
from mesh.core.policies.base import Choice, Destination, Expiring, Policy, Target, least_loaded
from mesh.core.policies.mesh import MeshPolicy
from mesh.core.view.replica import Replica
from mesh.sim.dynamo_kv import DynamoKv, DynamoOptions
from mesh.sim.llm_d_precise import LlmDPrecise, PreciseOptions
from mesh.sim.oracle import Oracle, OracleOptions
from mesh.sim.sglang_router import SglangRouter, SglangRouterOptions
from mesh.sim.workload import number_of
from schemas.decision import CandidateKind
from schemas.ids import RegionId, RequestId

if TYPE_CHECKING:
    from mesh.sim.world import World

ORACLE, MESH_EVERYWHERE = "oracle", "mesh-everywhere"
DYNAMO, LLM_D_PRECISE = "dynamo", "llm-d-precise"
SGLANG_ROUTER = "sglang-router"
TWIN_ONLY = (ORACLE, MESH_EVERYWHERE, DYNAMO, LLM_D_PRECISE, SGLANG_ROUTER)


@dataclass(slots=True)
class GlobalDecision:
    """The replica for one request. `on_its_way`: the router there has not received it yet."""

    choice: Choice
    name: str
    tokens: int
    on_its_way: bool

    @property
    def spot(self) -> Destination:
        """The replica as the inner policy names it."""
        return Destination(CandidateKind.REPLICA, self.name)


class GlobalView:
    """One policy over all replicas, at every router of a world with the topology `mesh`."""

    joint: ClassVar[bool] = True
    judges_load: ClassVar[bool] = True

    def __init__(self, world: "World", inside: Policy, dice: Random) -> None:
        self._world = world
        self._dice = dice
        self._inside = inside
        self._decisions: dict[RequestId, GlobalDecision] = {}

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The replica that the inner policy picks, or the peer to forward to."""
        if request.hops:
            return self._as_decided(request, targets)
        routes = {one.name: (one, route) for one, route in self._all(request, targets, now)}
        if not routes:
            return Choice(None, "no replica of any region is free")
        candidates = [one for one, _ in routes.values()]
        choice = self._inside.choose(_unique(request), candidates, now)
        if choice.target is None:
            return choice._replace(scores=())
        _, route = routes[choice.target.name]
        is_far = route.kind is CandidateKind.PEER
        decision = GlobalDecision(choice, choice.target.name, request.prompt.tokens, is_far)
        self._decisions[request.request_id] = decision
        return choice._replace(target=route, scores=())

    def hit_ratio(self, request: Request) -> float:
        return self._inside.hit_ratio(request)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """Passed to the inner policy once, by the router of the client."""
        decision = self._decisions.get(request.request_id)
        if request.answer_inbox is None and decision is not None:
            self._inside.placed(_unique(request), decision.spot, now)

    def began(self, request: Request, spot: Destination, now: float) -> None:
        decision = self._decisions.get(request.request_id)
        if decision is not None:
            self._inside.began(_unique(request), decision.spot, now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        decision = self._decisions.get(request.request_id)
        if decision is not None:
            self._inside.served(_unique(request), decision.spot, served, now)

    def left(self, request: Request, spot: Destination, now: float) -> None:
        decision = self._decisions.pop(request.request_id, None)
        if decision is not None:
            self._inside.left(_unique(request), decision.spot, now)

    def forget(self, spot: Destination) -> None:
        """A replica is gone; there is no state of regions."""
        if spot.kind is CandidateKind.REPLICA:
            self._inside.forget(spot)

    def expire(self, now: float) -> None:
        """Every router ticks, so the inner policy expires as often."""
        if isinstance(self._inside, Expiring):
            self._inside.expire(now)

    def _all(
        self, request: Request, targets: Sequence[Target], now: float
    ) -> Iterator[tuple[Target, Target]]:
        """Each replica of this and every peer region, and the target that leads to it."""
        on_the_way: dict[str, list[GlobalDecision]] = {}
        for decision in self._decisions.values():
            if decision.on_its_way:
                on_the_way.setdefault(decision.name, []).append(decision)
        for target in targets:
            if target.replica is not None:
                yield _with(target, target.replica, on_the_way.get(target.name, []), now), target
                continue
            core = self._world.routers[RegionId(target.name)].core
            if core is None:
                continue
            for replica in core.replicas:
                name = replica.heartbeat.replica
                if core.replicas.unavailable_because(replica, request.model, now, busy_too=True):
                    continue
                seen = Target(name, replica.load, CandidateKind.REPLICA, target.rtt_s, replica)
                yield _with(seen, replica, on_the_way.get(name, []), now), target

    def _as_decided(self, request: Request, targets: Sequence[Target]) -> Choice:
        decision = self._decisions.get(request.request_id)
        if decision is not None:
            decision.on_its_way = False
            for target in targets:
                if target.name == decision.name:
                    return decision.choice._replace(target=target, scores=())
        target = least_loaded(targets, self._dice)
        return Choice(target, "the replica that was named is not there any more")


def _unique(request: Request) -> Request:
    """With a key that is unique over all routers: their own keys are unique in one."""
    return replace(request, key=number_of(request.request_id))


def _with(
    target: Target, replica: Replica, on_the_way: Sequence[GlobalDecision], now: float
) -> Target:
    """The target with the requests on their way to it added to its load."""
    if not on_the_way:
        return target
    sent = deepcopy(replica.on_the_way)
    for number, decision in enumerate(on_the_way, 1):
        held = decision.choice.held_tokens or 0
        sent.add(-number, decision.tokens, decision.tokens - held, now)
    load = target.load + len(on_the_way)
    return target._replace(load=load, replica=replace(replica, on_the_way=sent))


class TwinPolicies:
    """The makers of one world: one instance a world, because its routers share policies."""

    def __init__(self) -> None:
        self._shared: dict[object, GlobalView] = {}

    def __call__(self, world: "World") -> PolicyMakers:
        """The live router's makers, and those of the twin."""

        def oracle(settings: RouterSettings, dice: Random, options: OracleOptions) -> Policy:
            return self._one(options, world, dice, lambda: Oracle(world, dice, options))

        def everywhere(settings: RouterSettings, dice: Random) -> Policy:
            return self._one(MESH_EVERYWHERE, world, dice, lambda: MeshPolicy(settings, dice))

        def dynamo(settings: RouterSettings, dice: Random, options: DynamoOptions) -> Policy:
            _check_no_peers(world, DYNAMO)
            return DynamoKv(world, dice, options)

        def precise(settings: RouterSettings, dice: Random, options: PreciseOptions) -> Policy:
            _check_no_peers(world, LLM_D_PRECISE)
            return LlmDPrecise(world, dice, settings.index_blocks_max, options)

        def sglang(settings: RouterSettings, dice: Random, options: SglangRouterOptions) -> Policy:
            _check_no_peers(world, SGLANG_ROUTER)
            return SglangRouter(dice, settings.index_blocks_max, options, world.replicas)

        return {
            **POLICIES,
            ORACLE: Tunable(OracleOptions(), oracle),
            MESH_EVERYWHERE: everywhere,
            DYNAMO: Tunable(DynamoOptions(), dynamo),
            LLM_D_PRECISE: Tunable(PreciseOptions(), precise),
            SGLANG_ROUTER: Tunable(SglangRouterOptions(), sglang),
        }

    def _one(
        self, kind: object, world: "World", dice: Random, inside: Callable[[], Policy]
    ) -> GlobalView:
        if kind not in self._shared:
            self._shared[kind] = GlobalView(world, inside(), dice)
        return self._shared[kind]


def _check_no_peers(world: "World", name: str) -> None:
    if any(world.peers_of(region) for region in world.routers):
        raise ValueError(
            f"policy {name} has no rule for peer regions: "
            "use --topology central:REGION or region-local"
        )


def checked_twin_policy(name: str) -> str:
    """A policy that the twin has. Raises ValueError that names the known ones."""
    no_world: Any = None  # nothing is made
    find_maker(name, TwinPolicies()(no_world))
    return name
