"""Power of two choices: of two targets taken at random, the less loaded one.

Two probes keep the longest queue almost as short as looking at all would, and without everybody
rushing to the one emptiest replica while the news of it is old (Mitzenmacher, 2001).
"""

from collections.abc import Sequence
from random import Random

from mesh.core.policies.base import Choice, Layered, Score, Target
from mesh.core.requests.request import Request


class PowerOfTwo(Layered):
    """The less loaded of two."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """One of two, or the only one."""
        two = sample_two(targets, self._dice)
        target = min(two, key=_load)
        looked_at = [Score(one, terms={"load": float(one.load)}) for one in two]
        loads = " and ".join(str(one.load) for one in two)
        return Choice(target, f"less loaded of two: {loads} requests", scores=looked_at)


def sample_two(targets: Sequence[Target], dice: Random) -> list[Target]:
    """Two different targets in random order, so that a tie is no one's advantage; or the one."""
    return dice.sample(targets, min(2, len(targets)))


def _load(target: Target) -> int:
    return target.load
