"""`sglang-router`: the placement of this program, and of vllm-router, to the letter. Twin only.

Source: sglang-router 0.3.2 (sgl-project/sglang, `sgl-model-gateway/src/policies/cache_aware.rs` and
`tree.rs`), vllm-router 0.1.17 (vllm-project/router, `src/policies/cache_aware.rs`), and where both
sent requests to idle and busy engines. The rule is `cache-aware`'s, with the defaults of
their command lines. Where that one draws between equals, these two do not:

- Of the engines with the fewest requests, the first in the router's own order. That is a hash
  table's, another in every process, whatever the command line says; here it is drawn once.
- Of the engines that got the longest matching prefix, the one that got it first, however busy.

Their trees are cut to 2^26 and 2^25 characters an engine every minute or two; here they are not.
vllm-router asks every engine to render a prompt before it decides: WorldConfig.decides_after_s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Target
from mesh.core.policies.cache_aware import CacheAware, CacheAwareOptions


@dataclass(frozen=True, slots=True)
class SglangRouterOptions(CacheAwareOptions):
    """The defaults of both command lines."""

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5


class SglangRouter(CacheAware):
    """Cache-aware without a draw."""

    def __init__(
        self, dice: Random, blocks_max: int, options: SglangRouterOptions, engines: Iterable[str]
    ) -> None:
        """`engines`: the names of all of them."""
        super().__init__(dice, blocks_max, options)
        order = sorted(engines)
        dice.shuffle(order)
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
