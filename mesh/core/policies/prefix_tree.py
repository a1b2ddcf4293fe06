"""Prefix tree: SkyWalker 3.2, Algorithm 1 (MAXPREFIXMATCH), over chained block hashes.

The available target with the longest matching prefix; among several that hold it equally far,
the least loaded. A match shorter than `explore_below` of the prompt does not bind (the paper
explores "when the prefix hit ratio is low, e.g. < 50 %"): then the least loaded target is
chosen, and the prompt is entered for it all the same, or affinity would never start.

The index follows what was placed, not what engines have: it is an approximation, bounded to
about what an engine's memory holds.
"""

from collections.abc import Sequence
from random import Random

from mesh.core.policies.base import Choice, Target, least_loaded
from mesh.core.prefix_index import PrefixIndex
from mesh.core.prompt import Prompt
from schemas.ids import ModelId


class PrefixTree:
    """Longest prefix among the available, least load when that is too short to matter."""

    def __init__(self, dice: Random, *, blocks_max: int, explore_below: float) -> None:
        self._dice = dice
        self._explore_below = explore_below
        self._index: PrefixIndex[str] = PrefixIndex(blocks_max)

    def choose(self, model: ModelId, prompt: Prompt, targets: Sequence[Target]) -> Choice:
        """The target that holds most of the prompt, if that is enough to matter."""
        match = self._index.match(prompt.hashes, (target.name for target in targets))
        ratio = match.blocks / len(prompt.hashes) if prompt.hashes else 0.0
        if match.blocks and ratio >= self._explore_below:
            deepest = set(match.owners)
            owners = [target for target in targets if target.name in deepest]
            target = least_loaded(owners, self._dice)
            return Choice(target.name, f"holds {ratio:.0%} of the prompt", match.blocks)
        target = least_loaded(targets, self._dice)
        held = self._index.matched_blocks(target.name, prompt.hashes)
        return Choice(
            target.name, f"explore: best match {ratio:.0%}, least load {target.load}", held
        )

    def placed(self, model: ModelId, prompt: Prompt, name: str) -> None:
        """Its prefill will leave the prompt's KV there."""
        self._index.insert(name, prompt.hashes)

    def forget(self, name: str) -> None:
        """Its KV is gone with it."""
        self._index.forget(name)
