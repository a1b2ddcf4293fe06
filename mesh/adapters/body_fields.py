"""The few fields of a body that the router reads, checked. The engine judges all others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from mesh.adapters.problem import Problem
from mesh.adapters.wishes import IN_BODY
from mesh.core.prefixes.prompt import PromptInvalid, PromptText, prompt_text
from schemas.http import CHAT, Fault
from schemas.ids import MODEL_CHARS_MAX


@dataclass(frozen=True, slots=True)
class BodyFields:
    """What a body says to the router. Values are plain: they cross to another process."""

    model: str
    wishes: Mapping[str, str]  # the fields that wishes are read from, those that are text
    text: PromptText


def read_fields(path: str, body: bytes) -> BodyFields:
    """Read a whole body, sent to that path. Raises Problem for anything an engine should not see.

    Holds its thread, and the interpreter, for up to seconds where a body is large.
    """
    fields = _json_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        raise Problem(Fault.INVALID, "model must be the name of a model, as a string", "model")
    if not isinstance(fields.get("stream"), bool | None):
        raise Problem(Fault.INVALID, "stream must be true or false", "stream")
    try:
        text = prompt_text(fields, chat=path == CHAT)
    except PromptInvalid as error:
        raise Problem(Fault.INVALID, str(error), error.param) from error
    wishes = {name: given for name in IN_BODY if isinstance(given := fields.get(name), str)}
    return BodyFields(model, wishes, text)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(Fault.INVALID, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Problem(Fault.INVALID, "the body must be a JSON object")
    return fields
