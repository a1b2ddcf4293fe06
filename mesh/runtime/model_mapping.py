"""Requests that name an alias: the model that serves them, written into their bodies.

Everything else of the body stays as the client wrote it, and so does the engine's answer: it names
the model that served.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.core.model.model_targets import Asked, conversation_of, unknown_model
from mesh.core.model.served_names import keeper_name, kept_name, served_name
from mesh.core.router import RouterCore
from mesh.http.callers import models_for
from mesh.http.form_parts import model_place
from mesh.http.read_request import BodyBudget, ParsedRequest
from mesh.session.body_model import ModelPlace, with_model
from schemas.exchange import LARGE_BYTES
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.request_headers import CONTENT_TYPE, ENGINE_HEADERS
from schemas.residency import Labels
from schemas.response_ids import ResponsePlace
from schemas.state import ModelCard

NOT_ONCE = "model must be there once, as a text: this name is mapped to another model here"


def conversation(parsed: ParsedRequest, tenant: str | None) -> int:
    """The hash of its conversation."""
    options = parsed.options
    return conversation_of(
        tenant or "", options.session, parsed.fields.text.data, parsed.request_id
    )


def _both(
    name: Callable[[RegionId, ReplicaId | None], ModelId], place: ResponsePlace
) -> tuple[ModelId, ModelId]:
    """What asks for the replica there, and for its region alone."""
    return name(place.region, place.replica), name(place.region, None)


class ModelMapping:
    """One router's. `clock`: by which its core is fed."""

    def __init__(self, core: RouterCore, bodies: BodyBudget, clock: Callable[[], float]) -> None:
        self._core = core
        self._bodies, self._clock = bodies, clock

    def apply(
        self, parsed: ParsedRequest, residency: Labels, caller: Caller | None
    ) -> Asked | None:
        """Give a request the model that serves it, and the objective that it does not name; what it
        asked for, if it was mapped. Raises RequestRefused if nothing serves its model."""
        targets, name, asked = self._core.state.targets, parsed.model, None
        if targets.rules:
            if name in targets.aliases:
                asked = self._map(parsed, residency, caller)
            if parsed.options.slo_ttft_s is None:
                slo_ttft_s = targets.slo_ttft_s(name, parsed.model)
                if slo_ttft_s is not None:
                    parsed.options = replace(parsed.options, slo_ttft_s=slo_ttft_s)
        models = self._core.known_models()
        if models and parsed.model not in models:
            raise RequestRefused(Fault.MODEL_UNKNOWN, self.unknown(name, caller), "model")
        return asked

    def _map(self, parsed: ParsedRequest, residency: Labels, caller: Caller | None) -> Asked:
        tenant = None if caller is None else caller.tenant
        asked, now = Asked(parsed.model, conversation(parsed, tenant)), self._clock()
        model = self._keeper_of(parsed, asked) or self._core.model_for(
            asked.model, asked.conversation, parsed.path, residency, now
        )
        if model is None:
            raise RequestRefused(Fault.MODEL_UNKNOWN, self.unknown(asked.model, caller), "model")
        before = len(parsed.body)
        parsed.body, parsed.model_place = with_model(parsed.body, placed(parsed), model)
        parsed.model = model
        more = len(parsed.body) - before
        self._bodies.settle(0, more)
        parsed.kept_bytes += more
        return asked

    def names_of(self, parsed: ParsedRequest) -> Collection[ModelId]:
        """Of what may serve it: any of them."""
        place = parsed.previous
        if parsed.call is not None:
            return () if place is None else _both(kept_name, place)
        shares = self._core.state.targets.aliases.get(parsed.model, ())
        models = parsed.model, *(target for target, _ in shares)
        names = [served_name(model, parsed.path) for model in models]
        if place is None:
            return names
        return [one for name in names for one in _both(partial(keeper_name, name), place)]

    def _keeper_of(self, parsed: ParsedRequest, asked: Asked) -> ModelId | None:
        """The target that the replica serves which has what the request goes on with."""
        place, path, core = parsed.previous, parsed.path, self._core
        if place is None:
            return None

        def is_kept(model: ModelId) -> bool:
            name = served_name(model, path)
            return any(map(core.is_served, _both(partial(keeper_name, name), place)))

        return self._core.state.targets.choose(asked.model, asked.conversation, is_kept)

    def unknown(self, model: str, caller: Caller | None) -> str:
        """The error for a model that is not there; nothing of what the caller may not name."""
        targets = self._core.state.targets
        known = models_for(caller, targets.known(self._core.known_models()))
        names = models_for(caller, [ModelId(model)])
        to = ", ".join(target for name in names for target, _ in targets.aliases.get(name, ()))
        return unknown_model(model, known) + (f"; it goes to {to}" if to else "")

    def card(self, model: ModelId) -> ModelCard:
        """As an engine describes it; of an alias, what goes for most of its conversations."""
        shares = self._core.state.targets.aliases.get(model)
        if shares is None:
            return self._core.model_card(model)
        main = max(shares, key=lambda each: each[1])[0]
        cards = [self._core.model_card(target) for target, share in shares if share > 0.0]
        lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
        card = self._core.model_card(main)
        return replace(card, root=main, parent=None, max_model_len=min(lengths, default=None))


def placed(parsed: ParsedRequest) -> ModelPlace:
    """Where its body names the model. Raises RequestRefused where that can't be replaced."""
    place = parsed.model_place
    if place is None and len(parsed.body) <= LARGE_BYTES:
        form_type = (parsed.for_engine or {}).get(ENGINE_HEADERS[CONTENT_TYPE].on_bus, "")
        place = model_place(parsed.body, form_type)
    if place is None:
        raise RequestRefused(Fault.INVALID, NOT_ONCE, "model")
    return place
