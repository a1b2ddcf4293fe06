"""E2 with parts of it taken away, for the order of its ablation (Preble, Figure 5)."""

import math
from collections.abc import Callable

from mesh.core.policies import PolicyMakers
from mesh.core.policies.e2 import E2, E2Options
from mesh.sim.world import World

NEVER_WARM = 10**12  # requests per target before loads are compared: rebalancing never applies


def with_ablations(makers: Callable[[World], PolicyMakers]) -> Callable[[World], PolicyMakers]:
    """The same policies and `e2-alone`, `e2-balanced`."""
    return lambda world: {
        **makers(world),
        "e2-alone": lambda settings, dice: E2(
            dice,
            blocks_max=settings.index_blocks_max,
            window_s=E2Options().window_s,
            warm=NEVER_WARM,
        ),
        "e2-balanced": lambda settings, dice: E2(
            dice,
            blocks_max=settings.index_blocks_max,
            window_s=E2Options().window_s,
            imbalr=math.inf,
        ),
    }
