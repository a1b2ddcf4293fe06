"""An offline request as `OfflineAdmission` knows it, what may be decided about one, and what the
agent reads of its body: how much it may generate; and the engine's priority.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import orjson

from agents.core.latency_predictor import BatchLoad
from agents.core.offline_profile import TOKENS_MAX
from schemas.engine_routes import ANY_TOKEN_LIMIT

ANSWER_TOKENS = 1024  # where a request doesn't bound its answer
CHOICES_MAX = 128
PROMPTS_MAX = 4096
PARSED_BYTES_MAX = 1024 * 1024  # parsing takes 5 to 8 ms a MiB, in which the agent waits

Fields = dict[str, Any]


class OfflineRequest(NamedTuple):
    """One request from the bus. `kv_tokens`: of its prompts, those that may be cached included."""

    key: Hashable
    prompt_tokens: int  # to be computed
    answer_tokens_max: int  # of one answer
    kv_tokens: int = 0
    answers: int = 1  # of all its prompts, each a sequence of the engine's batch; it may be none
    prompts: int = 1  # `prompt_tokens` and `kv_tokens` are of all together

    @property
    def tokens(self) -> int:
        """Of the memory, at its end."""
        answers_tokens = min(self.answers * self.answer_tokens_max, TOKENS_MAX)
        return max(self.kv_tokens, self.prompt_tokens) + answers_tokens

    def decoding(self, load: BatchLoad) -> BatchLoad:
        """An iteration with all its answers beside `load`, at their end."""
        prompt_tokens = max(self.kv_tokens, self.prompt_tokens) // self.prompts
        return load.with_decodes(self.answers, prompt_tokens + self.answer_tokens_max)


class Admit(NamedTuple):
    """Send it to the engine now."""

    key: Hashable


class GiveBack(NamedTuple):
    """It has not been sent to the engine, and won't be."""

    key: Hashable


class Abort(NamedTuple):
    """Abort it at the engine; report `ended` when it has left."""

    key: Hashable


Decision = Admit | GiveBack | Abort


def read_fields(body: bytes) -> Fields | None:
    """The body as an object: None if it is none, which the engine will say. A long one is not read,
    and has no field."""
    if len(body) > PARSED_BYTES_MAX:
        return {}
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def read_request(
    key: Hashable, prompt_tokens: int, fields: Fields | None, *, generates: bool = True
) -> OfflineRequest:
    """A request with these fields, whose prompts have `prompt_tokens` together."""
    if not generates:
        return OfflineRequest(key, prompt_tokens, 0, answers=0)
    if fields is None:
        return OfflineRequest(key, prompt_tokens, 1)
    tokens = next((found for name in ANY_TOKEN_LIMIT if (found := _count(fields.get(name)))), None)
    choices = max(_count(fields.get("n")) or 1, _count(fields.get("best_of")) or 1)
    prompts, given = 1, fields.get("prompt")
    if isinstance(given, list) and given and type(given[0]) is not int:
        prompts = min(len(given), PROMPTS_MAX)  # each is answered
    return OfflineRequest(
        key,
        prompt_tokens,
        min(tokens or ANSWER_TOKENS, TOKENS_MAX),
        answers=min(choices, CHOICES_MAX) * prompts,
        prompts=prompts,
    )


def with_priority(body: bytes, fields: Fields, priority: int) -> bytes:
    """The body with the engine's own field; a long one, which is not parsed, gets it at its end."""
    if fields or len(body) <= PARSED_BYTES_MAX:
        return orjson.dumps({**fields, "priority": priority})
    text = body.rstrip()
    is_object = text.startswith(b"{") and text.endswith(b"}")
    return text[:-1] + b',"priority":%d}' % priority if is_object else body


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
