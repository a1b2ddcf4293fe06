"""The model of requests that name an alias: chosen at arrival, and again when nothing serves it.

What is served is what a replica within the request's labels may be given at this moment; where no
target is, what may come back (`KnownModels`), for which requests are held. A held request moves to
another target once no place serves the one it has; its conversation returns with that one.

Reads: held, models, targets.
Writes: held.
"""

from collections.abc import Callable
from dataclasses import replace

from mesh.core.lifecycle import admission, timeouts
from mesh.core.model import effects as fx
from mesh.core.model.served_names import is_keeper_name, model_of, served_name
from mesh.core.requests.record import RequestRecord
from mesh.core.state import RouterState
from schemas.ids import ModelId
from schemas.residency import Labels


def choose(
    state: RouterState, asked: ModelId, conversation: int, path: str, labels: Labels, now: float
) -> ModelId | None:
    """The model that serves this conversation's request for an alias; None if none does and
    none is known to come back."""
    tests: tuple[Callable[[ModelId], bool], ...] = (
        lambda name: _is_served(state, served_name(name, path), labels, now),
        lambda name: served_name(name, path) in state.models,
        lambda name: name in state.models,  # not on that path, which is what its client is told
        lambda name: not state.models.names,  # as a router that has just started
    )
    found = (state.targets.choose(asked, conversation, test) for test in tests)
    return next((model for model in found if model is not None), None)


def _is_served(state: RouterState, name: ModelId, labels: Labels, now: float) -> bool:
    return timeouts.serving(state, (name, labels, False), now) > 0


def other(state: RouterState, record: RequestRecord, now: float) -> ModelId | None:
    """What may serve it instead, by its served name, if no place serves what it has: on a
    place that has not failed this request."""
    request = record.request
    asked = request.asked
    if asked is None or asked.model not in state.targets.aliases or record.continuations:
        return None  # what one model began, no other goes on with
    if is_keeper_name(request.model) or timeouts.others_serve(state, record):
        return None
    model = model_of(request.model)
    path = request.model.removeprefix(model)  # " on /…", or empty

    def may_serve(name: ModelId) -> bool:
        other = ModelId(name + path)
        is_served = _is_served(state, other, request.residency, now)
        return is_served and timeouts.others_serve(state, record, other)

    found = state.targets.choose(asked.model, asked.conversation, may_serve, without=model)
    return None if found is None else ModelId(found + path)


def retarget(state: RouterState, record: RequestRecord, now: float) -> None:
    """Have another model serve a held request, if it must and one can.

    Its prompt keeps the hashes that it has by the model before: they find nothing.
    """
    request = record.request
    if request.asked is None or (model := other(state, record, now)) is None:
        return
    state.held.remove(request)
    admission.left(state, request, now)
    record.request = replace(request, model=model)
    state.held.put(record.request, comes_back=True)
    admission.waits(state, record.request, now)
    state.emit(fx.Retargeted(request.key, model))
