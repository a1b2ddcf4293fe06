"""`sglang-router`, `vllm-router`: the placement of these two programs, to the letter. Twin only.

Source: sglang-router 0.3.2 (sgl-project/sglang, `sgl-model-gateway/src/policies/cache_aware.rs` and
`tree.rs`), vllm-router 0.1.17 (vllm-project/router, `src/policies/cache_aware.rs`), and what both
did with engines that were asked in a known order. The rule is `cache-aware`'s, with the defaults of
their command lines. Where that one draws between equals, these two do not:

- Of the engines with the fewest requests, the first in the router's own order. sglang-router's is
  that in which its engines answered its first questions, so near ones come first; here it is that
  of the world. vllm-router's is a hash table's, another in every process; here it is drawn once.
- Of the engines that got the longest matching prefix, the one that got it first, however busy.

Their trees are cut to 2^26 and 2^25 characters an engine every minute or two; here they are not.
vllm-router asks every engine to render a prompt before it decides: WorldConfig.decides_after_s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Target
from mesh.core.policies.cache_aware import CacheAware, CacheAwareOptions

if TYPE_CHECKING:
    from mesh.sim.world import World


@dataclass(frozen=True, slots=True)
class RustRouterOptions(CacheAwareOptions):
    """The defaults of both command lines."""

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5


class RustRouter(CacheAware):
    """Cache-aware without a draw."""

    def __init__(
        self, dice: Random, blocks_max: int, options: RustRouterOptions, order: Sequence[str]
    ) -> None:
        """`order`: the engines' names, of equals the first gets a request."""
        super().__init__(dice, blocks_max, options)
        self._place = {name: place for place, name in enumerate(order)}
        self._first_holder: dict[int, str] = {}  # of each block

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        super().placed(request, spot, now)
        for block in request.prompt.hashes:
            self._first_holder.setdefault(block, spot.name)

    def forget(self, spot: Destination) -> None:
        super().forget(spot)
        held = self._first_holder.items()
        self._first_holder = {block: name for block, name in held if name != spot.name}

    def _holders(self, request: Request, targets: Sequence[Target]) -> tuple[list[Target], int]:
        name, blocks = "", 0
        for block in request.prompt.hashes:
            if block not in self._first_holder:
                break
            name, blocks = self._first_holder[block], blocks + 1
        found = [target for target in targets if target.name == name]
        return found, blocks if found else 0

    def _shortest(self, request: Request, targets: Sequence[Target], reason: str) -> Choice:
        target = min(targets, key=lambda one: (one.load, self._place[one.name]))
        return Choice(target, reason, self._held_by(request, target))


def sglang_router(
    world: "World", dice: Random, blocks: int, options: RustRouterOptions
) -> RustRouter:
    """Near engines answer its first questions first: the world names its router's region first."""
    return RustRouter(dice, blocks, options, list(world.replicas))


def vllm_router(
    world: "World", dice: Random, blocks: int, options: RustRouterOptions
) -> RustRouter:
    """In an order that no one chose."""
    order = sorted(world.replicas)
    dice.shuffle(order)
    return RustRouter(dice, blocks, options, order)
