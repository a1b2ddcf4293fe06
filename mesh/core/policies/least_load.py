"""Least load: the target with the fewest requests in it or on their way there."""

from collections.abc import Sequence
from random import Random

from mesh.core.policies.base import Choice, Layered, Target, least_loaded
from mesh.core.requests.request import Request


class LeastLoad(Layered):
    """Fewest requests; ties at random."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The least loaded target."""
        target = least_loaded(targets, self._dice)
        return Choice(target, f"least load: {target.load} requests")
