"""Models that nobody serves: after a while their lines get an error instead of waiting on."""

from collections.abc import Collection, Iterable

from schemas.ids import ModelId

MODELS_MAX = 4096  # that are remembered


class UnservedModels:
    """Since when nobody has served each model for which lines came."""

    LINES_MAX = 256  # of one model that are ended each second

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[ModelId, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, model: object) -> bool:
        """Whether lines came for it, and nobody has served it since."""
        return model in self._since

    def restart(self, now: float) -> None:
        """Nothing could be heard of any replica until now."""
        self._since = dict.fromkeys(self._since, now)

    def overdue(
        self, waiting: Iterable[ModelId], served: Collection[ModelId], now: float
    ) -> list[ModelId]:
        """Those of the models with waiting lines that nobody has served for too long."""
        for model in [one for one in self._since if one in served]:
            del self._since[model]
        found = []
        for model in waiting:
            if model not in self._since:
                if model in served:
                    continue
                if len(self._since) >= MODELS_MAX:
                    del self._since[next(iter(self._since))]
                self._since[model] = now
            if now - self._since[model] >= self._patience_s:
                found.append(model)
        return found
