"""`/v1/embeddings` of a simulated engine: what is asked, and vectors that mean nothing.

A vector is made of a hash of its input: equal inputs, equal vectors of length 1. With `dimensions`
it is the beginning of the whole one, as of models that are trained for that.
"""

import base64
import hashlib
import math
from array import array
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from agents.sim import text as tokens
from agents.simserver.prompt_work import PromptWork
from agents.simserver.requests import Part, RequestParser, id_prompt, invalid
from schemas.settings import Advice

DIMENSIONS = 256
INPUTS_MAX = 2048  # OpenAI's limit
_ADVICE = "input must be a string or a list of strings, of token ids or of lists of token ids"


def _inputs(given: object) -> tuple[bytes, ...]:
    alone = isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0]))
    each = [given] if alone else given
    if not isinstance(each, list) or not each:
        raise ValueError(_ADVICE)
    if len(each) > INPUTS_MAX:
        raise ValueError(f"input has more than {INPUTS_MAX} items")
    return tuple(map(_input_tokens, each))


def _input_tokens(given: object) -> bytes:
    if isinstance(given, str) and given:
        return tokens.text_tokens(given)
    if isinstance(given, list) and given and all(map(_is_id, given)):
        return id_prompt(given)
    raise ValueError(f"{_ADVICE}, none of them empty")


def _is_id(value: object) -> bool:
    return type(value) is int


class _Body(Part):
    model: Any = None
    input: Annotated[tuple[bytes, ...], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[
        int | None, Field(ge=1, le=DIMENSIONS), Advice(f"dimensions are from 1 to {DIMENSIONS}")
    ] = None


def embeddings(parser: RequestParser, raw: bytes) -> PromptWork:
    """A /v1/embeddings body. Raises ApiError."""
    body = _Body.read(raw)
    longest = max(map(tokens.count, body.input))
    if longest > parser.max_model_len:
        message = (
            f"an input has {longest} tokens; this engine's context is "
            f"{parser.max_model_len} tokens: shorten it"
        )
        raise invalid(message, "input", "context_length_exceeded")
    model, is_base64 = parser.model(body.model), body.encoding_format == "base64"
    vectors = (_vector(each, body.dimensions or DIMENSIONS) for each in body.input)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, is_base64)}
        for index, vector in enumerate(vectors)
    ]
    prompt_tokens = sum(map(tokens.count, body.input))
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    answer = {"object": "list", "data": data, "model": model, "usage": usage}
    return PromptWork(body.input, orjson.dumps(answer))


def _vector(given: bytes, dimensions: int) -> list[float]:
    numbers = array("i", hashlib.shake_128(given).digest(4 * dimensions))
    length = math.hypot(*numbers) or 1.0
    return [number / length for number in numbers]


def _encoded(vector: list[float], is_base64: bool) -> object:
    """Base64 of 32-bit floats, the lowest byte first."""
    if not is_base64:
        return vector
    numbers = array("f", vector)
    return base64.b64encode(numbers.tobytes()).decode()
