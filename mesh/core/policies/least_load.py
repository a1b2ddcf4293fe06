"""Least load: the target with the fewest requests in it or on their way there."""

from collections.abc import Sequence
from random import Random

from mesh.core.policies.base import Choice, Memoryless, Target, least_loaded
from mesh.core.prompt import Prompt
from schemas.ids import ModelId


class LeastLoad(Memoryless):
    """Fewest requests; ties at random."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def choose(self, model: ModelId, prompt: Prompt, targets: Sequence[Target]) -> Choice:
        """The least loaded target."""
        target = least_loaded(targets, self._dice)
        return Choice(target.name, f"least load: {target.load} requests")
