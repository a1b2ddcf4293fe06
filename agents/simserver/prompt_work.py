"""Work that generates nothing: `/v1/rerank`, `/v1/score`, `/tokenize`, `/detokenize` and
`/v1/chat/completions/render` of a simulated engine. Scores mean nothing: they are made of hashes of
the texts.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, Field

from agents.sim import text as tokens
from agents.simserver.requests import ApiError, Part, RequestParser, id_prompt, invalid
from schemas.settings import Advice

RENDER = "/v1/chat/completions/render"  # of vLLM from 0.30 on; routers in front of it ask for it


@dataclass(frozen=True, slots=True)
class PromptWork:
    """One checked request. `inputs`: the tokens of each prompt to compute; `body`: the answer."""

    inputs: tuple[bytes, ...]
    body: bytes
    content_type: str = "application/json"


def _texts(given: object) -> list[str]:
    each = [given] if isinstance(given, str) else given
    if isinstance(each, list) and each and all(isinstance(text, str) and text for text in each):
        return each
    raise ValueError("must be a string or a list of strings, none of them empty")


Texts = Annotated[list[str], BeforeValidator(_texts), Advice("must be a text or a list of texts")]


class _Rerank(Part):
    model: Any = None
    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    top_n: Annotated[int | None, Field(ge=0)] = None


class _Score(Part):
    model: Any = None
    text_1: Texts
    text_2: Texts


class _Tokenize(Part):
    model: Any = None
    prompt: str


class _Detokenize(Part):
    model: Any = None
    tokens: Annotated[list[int], Field(min_length=1)]


def rerank(parser: RequestParser, raw: bytes) -> PromptWork:
    """A /v1/rerank body. Raises ApiError."""
    body = _Rerank.read(raw)
    inputs = _pairs([body.query] * len(body.documents), body.documents)
    scores = sorted(enumerate(map(_score, inputs)), key=lambda each: -each[1])
    results = [
        {"index": at, "document": {"text": body.documents[at]}, "relevance_score": score}
        for at, score in scores[: body.top_n or None]
    ]
    answer = {"id": "rerank", "model": parser.model(body.model), "usage": _usage(inputs)}
    return PromptWork(inputs, orjson.dumps({**answer, "results": results}))


def score(parser: RequestParser, raw: bytes) -> PromptWork:
    """A /v1/score body: one text with each, or as many with as many. Raises ApiError."""
    body = _Score.read(raw)
    one, two = body.text_1, body.text_2
    if len(one) == 1:
        one = one * len(two)
    if len(one) != len(two):
        raise invalid("text_1 must be one text, or as many as text_2", "text_1")
    inputs = _pairs(one, two)
    data = [{"index": at, "object": "score", "score": _score(each)} for at, each in
            enumerate(inputs)]  # fmt: skip
    answer = {"object": "list", "model": parser.model(body.model), "usage": _usage(inputs)}
    return PromptWork(inputs, orjson.dumps({**answer, "data": data}))


def tokenize(parser: RequestParser, raw: bytes) -> PromptWork:
    """A /tokenize body. Raises ApiError."""
    if b'"messages"' in raw:
        data = parser.chat(raw).prompt
    else:
        body = _Tokenize.read(raw)
        parser.model(body.model)
        data = tokens.text_tokens(body.prompt)
    ids = _ids(data)
    answer = {"count": len(ids), "max_model_len": parser.max_model_len, "tokens": ids}
    return PromptWork((), orjson.dumps(answer))


def render(parser: RequestParser, raw: bytes) -> PromptWork:
    """A RENDER body: the tokens of a chat. Raises ApiError."""
    data = parser.chat(raw).prompt
    return PromptWork((), orjson.dumps({"token_ids": _ids(data)}))


def detokenize(parser: RequestParser, raw: bytes) -> PromptWork:
    """A /detokenize body. Raises ApiError."""
    body = _Detokenize.read(raw)
    parser.model(body.model)
    try:
        data = id_prompt(body.tokens)
    except ValueError as error:
        raise ApiError(400, str(error), "tokens") from None
    return PromptWork((), orjson.dumps({"prompt": data.rstrip(b"\0").decode("utf-8", "replace")}))


def _ids(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


def _pairs(one: list[str], two: list[str]) -> tuple[bytes, ...]:
    pairs = zip(one, two, strict=True)
    return tuple(tokens.text_tokens(left) + tokens.text_tokens(right) for left, right in pairs)


def _score(given: bytes) -> float:
    return int.from_bytes(hashlib.blake2b(given, digest_size=4).digest()) / 2**32


def _usage(inputs: tuple[bytes, ...]) -> dict[str, int]:
    return {"total_tokens": sum(map(tokens.count, inputs))}
