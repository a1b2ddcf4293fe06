"""The policies that only a twin can have, beside those of the live router.

`oracle` knows what is really so (`mesh.sim.oracle`). `mesh-everywhere` is the `mesh` policy
with all regions' replicas before its eyes at once (`mesh.sim.everywhere`): what federation costs
is the difference between it and `mesh`.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from mesh.core.policies import POLICIES, Makers, find_maker
from mesh.core.policies.base import Policy
from mesh.core.policies.mesh import Mesh
from mesh.core.policies.options import Tunable
from mesh.core.settings import RouterSettings
from mesh.sim.everywhere import Everywhere
from mesh.sim.oracle import Oracle, OracleOptions

if TYPE_CHECKING:
    from mesh.sim.world import World

ORACLE, MESH_EVERYWHERE = "oracle", "mesh-everywhere"
TWIN_ONLY = (ORACLE, MESH_EVERYWHERE)
DEFAULT = OracleOptions()


class TwinPolicies:
    """The makers of one world: a new instance for each, because its routers share policies."""

    def __init__(self) -> None:
        self._shared: dict[object, Everywhere] = {}

    def __call__(self, world: "World") -> Makers:
        """The live router's makers, and those of the twin."""

        def oracle(settings: RouterSettings, dice: Random, options: OracleOptions) -> Policy:
            return self._one(options, world, dice, lambda: Oracle(world, dice, options))

        def everywhere(settings: RouterSettings, dice: Random) -> Policy:
            return self._one(MESH_EVERYWHERE, world, dice, lambda: Mesh(settings, dice))

        return {**POLICIES, ORACLE: Tunable(DEFAULT, oracle), MESH_EVERYWHERE: everywhere}

    def _one(
        self, kind: object, world: "World", dice: Random, inside: Callable[[], Policy]
    ) -> Everywhere:
        if kind not in self._shared:
            self._shared[kind] = Everywhere(world, inside(), dice)
        return self._shared[kind]


def checked_twin_policy(name: str) -> str:
    """A policy that the twin has. Raises ValueError that names the known ones."""
    nowhere: Makers = {
        ORACLE: Tunable(DEFAULT, _not_alone),
        MESH_EVERYWHERE: lambda settings, dice: _not_alone(settings, dice, DEFAULT),
    }
    find_maker(name, {**POLICIES, **nowhere})
    return name


def _not_alone(settings: RouterSettings, dice: Random, options: OracleOptions) -> Policy:
    raise AssertionError("a policy that sees a world is made by one")
