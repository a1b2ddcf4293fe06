"""Round robin: each in turn, by name. The baseline that knows nothing.

The turn is kept as a name, not an index, so that targets coming and going (full, not full)
don't make it favour whoever stands first; and per model, so that one model's requests don't
skip the turn of another's replicas.
"""

from collections.abc import Sequence

from mesh.core.policies.base import Choice, Layered, Target
from mesh.core.requests.request import Request
from schemas.ids import ModelId

MODELS_MAX = 256  # whose turns are remembered; the longest unused is forgotten


class RoundRobin(Layered):
    """Next in order of name after the last one chosen."""

    def __init__(self) -> None:
        self._last: dict[ModelId, str] = {}

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The next target in turn."""
        ordered = sorted(targets, key=_name)
        last = self._last.pop(request.model, "")
        target = next((target for target in ordered if target.name > last), ordered[0])
        if len(self._last) >= MODELS_MAX:
            del self._last[next(iter(self._last))]
        self._last[request.model] = target.name
        return Choice(target, "next in turn")


def _name(target: Target) -> str:
    return target.name
