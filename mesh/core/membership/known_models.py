"""Names of models that are served, or were until a while ago.

A model whose last replica only restarts must not turn into "no such model", which clients do not
retry. Requests for it are held. Nor must a model that a router, which has just started, has not
heard of yet: requests for it wait until the router `has_listened` for a while.
"""

import math
from collections.abc import Iterable

from mesh.core.model.served_names import is_for_others, is_model
from schemas.ids import ModelId

KEPT_S = 120.0  # an engine that loads its weights anew takes about a minute
LISTENS_S = 2.0  # from the first report on: agents and peers report several times in that
LOOKS_EVERY_S = 0.1  # for a model that a request waits for
MODELS_MAX = 4096


class KnownModels:
    """Names of models that are served, or were within KEPT_S."""

    def __init__(self) -> None:
        self.listens_s, self._listens_until = LISTENS_S, math.inf
        self.has_listened = False
        self._seen_at: dict[ModelId, float] = {}  # those on optional paths too
        self.names: tuple[ModelId, ...] = ()  # of models, in order

    def __contains__(self, name: ModelId) -> bool:
        return name in self._seen_at

    def see(self, models: Iterable[ModelId], now: float) -> None:
        known = len(self._seen_at)
        if math.isinf(self._listens_until):
            self._listens_until = now + self.listens_s
        for model in models:
            is_new = model not in self._seen_at
            if is_new and (len(self._seen_at) >= MODELS_MAX or not is_for_others(model)):
                continue
            self._seen_at[model] = now
        if len(self._seen_at) != known:
            self.names = tuple(sorted(filter(is_model, self._seen_at)))

    def expire(self, now: float) -> None:
        """Forget models that no replica has served for KEPT_S."""
        self.has_listened = now >= self._listens_until
        old = [model for model, seen_at in self._seen_at.items() if now - seen_at > KEPT_S]
        for model in old:
            del self._seen_at[model]
        if old:
            self.names = tuple(sorted(filter(is_model, self._seen_at)))
