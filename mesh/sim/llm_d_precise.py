"""`llm-d-precise`: llm-d's scheduler with exact caches. Twin only.

Source: llm-d/llm-d-router, `deploy/config/epp-precise-prefix-cache-config.yaml` at 03b2c38: the
scores of `mesh.core.policies.llm_d`, with weights prefix 2, KV 1, queue 1, where the prefix score
is the part of the prompt's 64-token blocks that a replica holds by its KV events.

`relative` 1 is the precise scorer of the earlier llm-d-inference-scheduler (`scorer/utils.go`,
`indexedScoresToNormalizedScoredPods`): blocks held, scaled so that of the replicas that hold any
the least is 0 and the most is 1; all are 1 if they are equal. A few blocks' difference decides
between holders as thousands do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from agents.sim.kv_cache import BLOCK_TOKENS
from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Target
from mesh.core.policies.llm_d import LlmD, LlmDOptions, Signals
from mesh.sim.cache_copies import CacheCopies
from mesh.sim.workload import HASH_TOKENS

if TYPE_CHECKING:
    from mesh.sim.world import World


@dataclass(frozen=True, slots=True)
class PreciseOptions(LlmDOptions):
    """The weights. `relative`: 1 to scale the prefix score between the holders, or 0.

    `speculative_s`: seconds for which a prompt that was sent to a replica counts as held there.
    """

    queue: float = 1.0
    kv: float = 1.0
    prefix: float = 2.0
    relative: int = 0
    speculative_s: float = 0.0

    def __post_init__(self) -> None:
        super(PreciseOptions, self).__post_init__()
        if self.relative not in (0, 1):
            raise ValueError(f"relative is 0 or 1, not {self.relative}")
        if not 0.0 <= self.speculative_s < math.inf:
            raise ValueError(f"speculative_s must be 0 or more, not {self.speculative_s}")


class LlmDPrecise(LlmD):
    """The highest weighted sum, by what engines have reported to hold."""

    def __init__(
        self, world: "World", dice: Random, blocks_max: int, options: PreciseOptions
    ) -> None:
        super().__init__(dice, blocks_max, options)
        self._relative = bool(options.relative)
        self._caches = CacheCopies(world, options.speculative_s)
        self._now = 0.0

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The best, by the caches as known now."""
        self._now = now
        return super().choose(request, targets, now)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """Remember it for `speculative_s`. The index that follows placements is not used."""
        if request.answer_inbox is None:
            self._caches.sent(spot.name, self._caches.prompt(request)[1], now)

    def _depths(self, request: Request, targets: Sequence[Target]) -> dict[str, int]:
        """How many leading blocks of HASH_TOKENS tokens each of these holds."""
        _, keys = self._caches.prompt(request)
        each = HASH_TOKENS // BLOCK_TOKENS
        return {
            target.name: self._caches.matched(target, keys, self._now) // each for target in targets
        }

    def _ranks(self, signals: Signals) -> list[tuple[int, float]]:
        if self._relative:
            blocks, whole = between_holders(signals.blocks)
            signals = signals._replace(blocks=blocks, blocks_whole=whole)
        return super()._ranks(signals)


def between_holders(blocks: Sequence[int]) -> tuple[list[int], int]:
    """Blocks beyond the least holder's, and how many are the most; those equal to 1 of 1."""
    held = [count for count in blocks if count]
    least, most = min(held, default=0), max(held, default=0)
    if least == most:
        return [int(count > 0) for count in blocks], 1
    return [count - least if count else 0 for count in blocks], most - least
