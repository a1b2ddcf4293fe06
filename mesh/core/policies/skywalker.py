"""SkyWalker: 3.2 and Algorithm 1 (MAXPREFIXMATCH), over chained block hashes.

The available target with the longest matching prefix; among several that hold it equally far,
the least loaded. A match shorter than `explore_below` of the prompt does not bind (the paper
explores "when the prefix hit ratio is low, e.g. < 50 %"): then the least loaded target is
chosen, and the prompt is entered for it all the same, or affinity would never start.

Who is available, replicas before peers, and what is held are the rest of the paper: the placer's
(`placement.py`) and the tables' business.
"""

from collections.abc import Sequence
from random import Random

from mesh.core.policies.base import Choice, Target, least_loaded
from mesh.core.policies.indexed import Indexed, part
from mesh.core.requests.request import Request


class SkyWalker(Indexed):
    """Longest prefix among the available, least load when that is too short to matter."""

    def __init__(self, dice: Random, blocks_max: int, explore_below: float) -> None:
        super().__init__(dice, blocks_max)
        self._explore_below = explore_below

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The target that holds most of the prompt, if that is enough to matter."""
        holders, blocks = self._holders(request, targets)
        ratio = part(blocks, request)
        if holders and ratio >= self._explore_below:
            target = least_loaded(holders, self._dice)
            return Choice(target, f"holds {ratio:.0%} of the prompt", blocks)
        target = least_loaded(targets, self._dice)
        reason = f"explore: best match {ratio:.0%}, least load {target.load}"
        return Choice(target, reason, self._held_by(request, target))
