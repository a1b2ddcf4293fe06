"""Which models the mesh is known to serve: who served a minute ago is late, not unknown.

A model whose only replica restarts must not turn into "no such model" (clients do not try
those again), so names outlive their replicas for a while; requests for them are held meanwhile.
"""

from collections.abc import Iterable

from schemas.ids import ModelId

KEPT_S = 120.0  # an engine that loads its weights anew takes about a minute
MODELS_MAX = 4096


class ModelNames:
    """Names of models, each with when it was last heard of."""

    def __init__(self) -> None:
        self._heard_at: dict[ModelId, float] = {}

    def hear(self, models: Iterable[ModelId], now: float) -> None:
        """Somebody serves these."""
        for model in models:
            if model in self._heard_at or len(self._heard_at) < MODELS_MAX:
                self._heard_at[model] = now

    def expire(self, now: float) -> None:
        """Forget what nobody has served for KEPT_S."""
        for model, heard_at in list(self._heard_at.items()):
            if now - heard_at > KEPT_S:
                del self._heard_at[model]

    def known(self) -> tuple[ModelId, ...]:
        """All of them, by name."""
        return tuple(sorted(self._heard_at))
