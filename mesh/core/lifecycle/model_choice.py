"""The model of requests that name an alias: chosen at arrival, and again when nothing serves it.

What is served is what a replica within the request's labels may be given at this moment; where no
target is, what may come back (`KnownModels`), for which requests are held. A held request moves to
another target once no place serves the one it has; its conversation returns with that one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from mesh.core.lifecycle.admission import Admission
from mesh.core.lifecycle.timeouts import Timeouts
from mesh.core.model import effects as fx
from mesh.core.model.model_targets import ModelTargets
from mesh.core.model.served_names import is_keeper_name, model_of, served_name
from mesh.core.model.settings import RouterSettings
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.requests.record import RequestRecord
from schemas.ids import ModelId
from schemas.residency import Labels


class Known(Protocol):
    """Names of what is served, or may be again."""

    names: tuple[ModelId, ...]

    def __contains__(self, name: ModelId) -> bool: ...


class ModelChoice:
    """One router's."""

    def __init__(
        self,
        settings: RouterSettings,
        timeouts: Timeouts,
        held: HoldQueue,
        admission: Admission,
        known: Known,
        effects: list[fx.Effect],
    ) -> None:
        self._timeouts, self._held, self._admission = timeouts, held, admission
        self._known, self._effects = known, effects
        self.follow(settings)

    def follow(self, settings: RouterSettings) -> None:
        """Choose by these from now on; what was chosen before holds."""
        self.targets = ModelTargets(settings.models)
        limits = {rule.name: rule.queue_delay_s_max for rule in settings.models}
        most = {rule.name: rule.hold_max for rule in settings.models}
        self._admission.delay.limit_s = settings.queue_delay_s_max
        self._admission.delay.model_limit_s = {
            name: limit for name, limit in limits.items() if limit is not None
        }
        self._held.model_max = {name: limit for name, limit in most.items() if limit is not None}

    def of(
        self, asked: ModelId, conversation: int, path: str, labels: Labels, now: float
    ) -> ModelId | None:
        """The model that serves this conversation's request for an alias; None if none does and
        none is known to come back."""
        tests: tuple[Callable[[ModelId], bool], ...] = (
            lambda name: self._is_served(served_name(name, path), labels, now),
            lambda name: served_name(name, path) in self._known,
            lambda name: not self._known.names,  # as a router that has just started
        )
        found = (self.targets.choose(asked, conversation, test) for test in tests)
        return next((model for model in found if model is not None), None)

    def _is_served(self, name: ModelId, labels: Labels, now: float) -> bool:
        return self._timeouts.serving((name, labels, False), now) > 0

    def other(self, record: RequestRecord, now: float) -> ModelId | None:
        """What may serve it instead, by its served name, if no place serves what it has: on a
        place that has not failed this request."""
        request = record.request
        asked = request.asked
        if asked is None or asked.model not in self.targets.aliases:
            return None
        if is_keeper_name(request.model) or self._timeouts.others_serve(record):
            return None
        model = model_of(request.model)
        path = request.model.removeprefix(model)  # " on /…", or empty

        def may_serve(name: ModelId) -> bool:
            other = ModelId(name + path)
            is_served = self._is_served(other, request.residency, now)
            return is_served and self._timeouts.others_serve(record, other)

        found = self.targets.choose(asked.model, asked.conversation, may_serve, without=model)
        return None if found is None else ModelId(found + path)

    def retarget(self, record: RequestRecord, now: float) -> None:
        """Have another model serve a held request, if it must and one can.

        Its prompt keeps the hashes that it has by the model before: they find nothing.
        """
        request = record.request
        if request.asked is None or (model := self.other(record, now)) is None:
            return
        self._held.remove(request)
        self._admission.left(request, now)
        record.request = replace(request, model=model)
        self._held.put(record.request, comes_back=True)
        self._admission.waits(record.request, now)
        self._effects.append(fx.Retargeted(request.key, model))
