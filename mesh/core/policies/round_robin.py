"""Round robin: each in turn, by name. The baseline that knows nothing.

The turn is kept as a name, not an index, so that targets coming and going (full, not full)
don't make it favour whoever stands first; and per model, so that one model's requests don't
skip the turn of another's replicas.
"""

from collections.abc import Sequence

from mesh.core.policies.base import Choice, Memoryless, Target
from mesh.core.prompt import Prompt
from schemas.ids import ModelId

MODELS_MAX = 256  # whose turns are remembered; the longest unused is forgotten


class RoundRobin(Memoryless):
    """Next in order of name after the last one chosen."""

    def __init__(self) -> None:
        self._last: dict[ModelId, str] = {}

    def choose(self, model: ModelId, prompt: Prompt, targets: Sequence[Target]) -> Choice:
        """The next target in turn."""
        names = sorted(target.name for target in targets)
        last = self._last.pop(model, "")
        name = next((name for name in names if name > last), names[0])
        if len(self._last) >= MODELS_MAX:
            del self._last[next(iter(self._last))]
        self._last[model] = name
        return Choice(name, "next in turn")
