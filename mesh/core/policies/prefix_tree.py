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

from mesh.core.policies.base import Choice, Layered, Spot, Target, least_loaded
from mesh.core.prefix_index import PrefixIndex
from mesh.core.request import Request


class PrefixTree(Layered):
    """Longest prefix among the available, least load when that is too short to matter."""

    def __init__(self, dice: Random, *, blocks_max: int, explore_below: float) -> None:
        self._dice = dice
        self._explore_below = explore_below
        self._index: PrefixIndex[str] = PrefixIndex(blocks_max)

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The target that holds most of the prompt, if that is enough to matter."""
        hashes = request.prompt.hashes
        match = self._index.match(hashes, (target.name for target in targets))
        ratio = match.blocks / len(hashes) if hashes else 0.0
        if match.blocks and ratio >= self._explore_below:
            deepest = set(match.owners)
            owners = [target for target in targets if target.name in deepest]
            target = least_loaded(owners, self._dice)
            return Choice(target, f"holds {ratio:.0%} of the prompt", match.blocks)
        target = least_loaded(targets, self._dice)
        held = self._index.matched_blocks(target.name, hashes)
        return Choice(target, f"explore: best match {ratio:.0%}, least load {target.load}", held)

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that anyone has, free or not."""
        return self._index.hit_ratio(request.prompt.hashes)

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """Its prefill will leave the prompt's KV there."""
        self._index.insert(spot.name, request.prompt.hashes, now)

    def forget(self, spot: Spot) -> None:
        """Its KV is gone with it."""
        self._index.forget(spot.name)
