"""Cache-aware: the rule of SGLang's router, which vLLM's router took over.

While the loads are out of balance, by an absolute *and* a relative measure, the shortest queue;
otherwise the holder of the longest prefix, if it holds more than `cache_threshold` of the prompt,
or else the shortest queue again. The prompt is entered for the chosen one.

The two settings that are common are 0.5/32/1.1 (the library) and 0.3/64/1.5 (its command line).
As published, a match may end at a worker that can't be used now, and is lost; here only available
targets are matched. Older versions gave a miss to the worker with the smallest tree; the load is
what later ones look at, and the better guess of where there is room.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Target, least_loaded
from mesh.core.policies.indexed import Indexed, part


@dataclass(frozen=True, slots=True)
class CacheAwareOptions:
    """`balance_abs` in requests; `balance_rel` times the least load."""

    cache_threshold: float = 0.5
    balance_abs: int = 32
    balance_rel: float = 1.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise ValueError(f"cache_threshold is a part of one, not {self.cache_threshold}")
        if self.balance_abs < 0:
            raise ValueError(f"balance_abs must be 0 or more, not {self.balance_abs}")
        if not 1.0 <= self.balance_rel < math.inf:
            raise ValueError(f"balance_rel must be 1 or more, not {self.balance_rel}")


class CacheAware(Indexed):
    """Longest prefix while loads are in balance."""

    def __init__(self, dice: Random, blocks_max: int, options: CacheAwareOptions) -> None:
        super().__init__(dice, blocks_max)
        self._options = options

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The holder, unless it holds too little or the loads differ too much."""
        loads = [target.load for target in targets]
        least, most = min(loads), max(loads)
        if self._is_imbalanced(least, most):
            return self._shortest(request, targets, f"imbalance: loads from {least} to {most}")
        holders, blocks = self._holders(request, targets)
        ratio = part(blocks, request)
        if ratio > self._options.cache_threshold:
            target = least_loaded(holders, self._dice)
            return Choice(target, f"holds {ratio:.0%} of the prompt", blocks)
        return self._shortest(request, targets, f"best match {ratio:.0%}, least load {least}")

    def _is_imbalanced(self, least: int, most: int) -> bool:
        options = self._options
        return most - least > options.balance_abs and most > options.balance_rel * least

    def _shortest(self, request: Request, targets: Sequence[Target], reason: str) -> Choice:
        target = least_loaded(targets, self._dice)
        return Choice(target, reason, self._held_by(request, target))
