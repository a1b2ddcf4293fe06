"""The models of batch jobs' lines: aliases are mapped as for clients' requests.

A line is mapped when a runner takes it, and then keeps its model as long as that runner has it. A
conversation is told by the prompt; what serves is what some replica, here or in another region, has
at that moment, and where nothing does, the line waits for the target of its conversation.
"""

from collections.abc import Callable, Collection

from mesh.batch.records import Line
from mesh.core.model.model_targets import ModelTargets, conversation_of
from mesh.core.model.prompt import PromptInvalid, PromptText
from mesh.core.model.served_names import served_name
from mesh.session.body_model import model_in_json, with_model
from schemas.ids import ModelId


class LineModels:
    """One runner's. `served`: served names of what replicas have."""

    def __init__(
        self,
        targets: ModelTargets | None = None,
        served: Callable[[], Collection[ModelId]] = frozenset,
    ) -> None:
        self._targets = ModelTargets() if targets is None else targets
        self._served = served

    def of(
        self, line: Line, asked: ModelId, text: PromptText, tenant: str
    ) -> tuple[ModelId, bytes]:
        """The model that is to serve a line, and the body for it. Raises PromptInvalid if the
        model can't be replaced there."""
        if asked not in self._targets.aliases:
            return asked, line.body
        which = conversation_of(tenant, None, text.data, f"{line.job}:{line.number}")
        served = self._served()
        model = self._targets.choose(
            asked, which, lambda name: served_name(name, line.url) in served
        ) or self._targets.choose(asked, which, lambda _: True)
        place = model_in_json(line.body)
        if model is None or place is None:
            raise PromptInvalid("model must be there once: it is mapped to another one", "model")
        return model, with_model(line.body, place, model)[0]
