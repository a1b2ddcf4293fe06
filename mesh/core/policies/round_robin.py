"""Round robin: each in turn, by name. The baseline that knows nothing.

The turn is kept as a name, not an index, so that targets coming and going (full, not full)
don't make it favour whoever stands first.
"""

from collections.abc import Sequence

from mesh.core.policies.base import Choice, Memoryless, Target
from mesh.core.prompt import Prompt
from schemas.ids import ModelId


class RoundRobin(Memoryless):
    """Next in order of name after the last one chosen."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, model: ModelId, prompt: Prompt, targets: Sequence[Target]) -> Choice:
        """The next target in turn."""
        names = sorted(target.name for target in targets)
        self._last = next((name for name in names if name > self._last), names[0])
        return Choice(self._last, "next in turn")
