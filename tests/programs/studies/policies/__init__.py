"""Policies that studies compare `mesh` with, and that no router and no `mesh sim` offers.

`oracle` sees the engines' true state. `mesh-everywhere` is the `mesh` policy with the replicas of
all regions as candidates. Both run inside a `GlobalView`. `dynamo` and `llm-d-precise` are ordinary
policies of one router that know exactly what engines hold, as late as KV events bring it.
`sglang-router` places as that program does.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, PolicyMakers, Tunable, find_maker
from mesh.core.policies.base import Policy
from mesh.core.policies.mesh import MeshPolicy
from mesh.sim.world import World
from tests.programs.studies.policies.dynamo_kv import DynamoKv, DynamoOptions
from tests.programs.studies.policies.global_view import GlobalView
from tests.programs.studies.policies.llm_d_precise import LlmDPrecise, PreciseOptions
from tests.programs.studies.policies.oracle import Oracle, OracleOptions
from tests.programs.studies.policies.sglang_router import SglangRouter, SglangRouterOptions

ORACLE, MESH_EVERYWHERE = "oracle", "mesh-everywhere"
DYNAMO, LLM_D_PRECISE = "dynamo", "llm-d-precise"
SGLANG_ROUTER = "sglang-router"


class StudyPolicies:
    """The makers of one world: one instance a world, because its routers share policies."""

    def __init__(self) -> None:
        self._shared: dict[object, GlobalView] = {}

    def __call__(self, world: World) -> PolicyMakers:
        """The live router's makers, and those of studies."""

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
        self, kind: object, world: World, dice: Random, inside: Callable[[], Policy]
    ) -> GlobalView:
        if kind not in self._shared:
            self._shared[kind] = GlobalView(world, inside(), dice)
        return self._shared[kind]


def _check_no_peers(world: World, name: str) -> None:
    if any(world.peers_of(region) for region in world.routers):
        raise ValueError(
            f"policy {name} has no rule for peer regions: "
            "use --topology central:REGION or region-local"
        )


def checked_policy(name: str) -> str:
    """A policy that studies have. Raises ValueError that names the known ones."""
    no_world: Any = None  # nothing is made
    find_maker(name, StudyPolicies()(no_world))
    return name
