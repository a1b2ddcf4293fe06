"""Which model, tenant and region a request's series are labelled with: a bounded choice.

Clients and peers name models and regions. A name gets a label of its own if this mesh has it and
there is room; otherwise it is counted under OTHER. Each set of labels costs memory for ever, here
and in the Prometheus that reads it.
"""

from collections.abc import Callable, Collection, Iterable

from mesh.core.model.served_names import model_of
from schemas.ids import ModelId

MODELS_MAX = 16
TENANTS_MAX = 32
SETS_MAX = 128  # of model, tenant and region together
OTHER = "other"  # label of a name without one of its own

LabelSet = tuple[str, str, str]  # model, tenant, region that served


class RequestLabels:
    """One router's."""

    def __init__(self, models: Callable[[], Collection[str]], regions: Iterable[str]) -> None:
        """`models`: those that this mesh has. `regions`: its regions."""
        self._known_models = models
        self._regions = frozenset(regions)
        self._models: set[str] = set()
        self._aliases: set[str] = set()
        self._tenants: set[str] = set()
        self._sets: dict[LabelSet, LabelSet] = {}

    def of(self, model: str, tenant: str, region: str) -> LabelSet:
        """The labels of a request; empty for no tenant, and for no region that served it."""
        return self._sets.get((model, tenant, region)) or self._new(model, tenant, region)

    def model(self, name: str) -> str:
        """The label of a model, or of a model on an optional path: the same."""
        name = model_of(ModelId(name))
        if name in self._models:
            return name
        if len(self._models) < MODELS_MAX and name in self._known_models():
            self._models.add(name)
            return name
        return OTHER

    def alias(self, name: str) -> str:
        """The label of a name that mesh.toml maps to a model; files that are read again may have
        others."""
        if name not in self._aliases:
            if len(self._aliases) >= MODELS_MAX:
                return OTHER
            self._aliases.add(name)
        return name

    def _new(self, model: str, tenant: str, region: str) -> LabelSet:
        region = region if not region or region in self._regions else OTHER
        labels = self.model(model), self._tenant(tenant), region
        if labels not in self._sets:
            if len(self._sets) >= SETS_MAX:
                return OTHER, OTHER, region
            self._sets[labels] = labels
        return labels

    def _tenant(self, name: str) -> str:
        if not name or name in self._tenants:
            return name
        if len(self._tenants) < TENANTS_MAX:
            self._tenants.add(name)
            return name
        return OTHER
