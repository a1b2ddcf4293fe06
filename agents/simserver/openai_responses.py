"""`/v1/responses` of a simulated engine, which keeps the latest responses, as vLLM does on demand.

A request is read as the chat of the same words, so both hit the same KV.
"""

from typing import Annotated, Any

import orjson
from pydantic import BeforeValidator, PositiveInt

from agents.simserver.requests import ApiError, Flag, GenerationRequest, Part, RequestParser
from agents.simserver.responses import AnswerText

KEPT_MAX = 1024
TEXT_PARTS = ("input_text", "output_text", "text")


def _chat_message(item: object) -> dict[str, Any]:
    match item:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
        case {"role": str(role), "content": [*parts]}:
            return {"role": role, "content": "".join(map(_part_text, parts))}
        case {"type": str(), **fields}:
            return {"role": "tool", "content": orjson.dumps(fields).decode()}
    raise ValueError("must be a string or a list of messages and other items")


def _part_text(part: object) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in TEXT_PARTS:
            return text
    raise ValueError("every part must be text, as this model reads only that")


def _messages(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if isinstance(given, list) and given:
        return list(map(_chat_message, given))
    raise ValueError("must be a string or a list of items, and not empty")


class _Body(Part):
    model: Any = None
    input: Annotated[list[dict[str, Any]], BeforeValidator(_messages)]
    instructions: str | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    store: bool | None = None
    max_output_tokens: PositiveInt | None = None
    tools: Any = None
    stream: Flag = False
    stamp: Flag = False


class KeptResponses:
    """The conversations of the latest responses, by their ids."""

    def __init__(self) -> None:
        self._turns: dict[str, list[dict[str, Any]]] = {}

    def read(self, parser: RequestParser, raw: bytes, own_id: str) -> tuple[str, GenerationRequest]:
        """A /v1/responses body: the id of its answer, which is kept from now on unless it is not to
        be, and what to generate. `own_id`: for a request that gives none. Raises ApiError."""
        body = _Body.read(raw)
        before: list[dict[str, Any]] = []
        if (previous := body.previous_response_id) is not None:
            if previous not in self._turns:
                message = f"Response with id {previous!r} not found."
                raise ApiError(404, message, "previous_response_id")
            before = self._turns[previous]
        messages = before + body.input
        first = [{"role": "system", "content": body.instructions}] if body.instructions else []
        chat = {"model": body.model, "messages": first + messages}
        chat["max_tokens"] = body.max_output_tokens
        more = {"tools": body.tools, "stream": body.stream, "stamp": body.stamp}
        job = parser.chat(orjson.dumps(chat | more))
        name = body.request_id or own_id
        if body.store is not False:
            while len(self._turns) >= KEPT_MAX:
                del self._turns[next(iter(self._turns))]
            said = {"role": "assistant", "content": job.answer.text}
            self._turns[name] = [*messages, said]
        return name, job


class ResponseRenderer:
    """The answer to one request, whole or as events; see `responses.SseRenderer`."""

    def __init__(
        self, job: GenerationRequest, response_id: str, created: int, attempt: str = ""
    ) -> None:
        """`attempt`: what names this one in stamps."""
        self._job, self._words, self._number = job, AnswerText(job, attempt), 0
        self._frame = {"id": response_id, "object": "response", "created_at": created}
        self._frame |= {"model": job.model, "error": None, "instructions": None, "metadata": {}}
        self._frame |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        self._item = {"id": f"item_{response_id}", "type": "message", "role": "assistant"}

    def whole(self, cached_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""
        return orjson.dumps(self._completed(cached_tokens))

    def opening(self) -> bytes:
        """What precedes the first token."""
        response = {**self._frame, "status": "in_progress", "output": [], "usage": None}
        item = {**self._item, "status": "in_progress", "content": []}
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._of_part("response.content_part.added", part=_part("")),
            )
        )

    def tokens(self, start: int, end: int) -> bytes:
        """One event for each of the tokens `start` to `end`."""
        texts = filter(None, map(self._words.token, range(start, end)))
        name = "response.output_text.delta"
        return b"".join(self._of_part(name, delta=text, logprobs=[]) for text in texts)

    def closing(self, cached_tokens: int) -> bytes:
        """The text once more, and the whole response with its usage."""
        text, response = self._words.whole(), self._completed(cached_tokens)
        item = response["output"][0]
        return b"".join(
            (
                self._of_part("response.output_text.done", text=text, logprobs=[]),
                self._of_part("response.content_part.done", part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def _completed(self, cached_tokens: int) -> dict[str, Any]:
        job, text = self._job, self._words.whole()
        is_cut = job.answer.finish_reason == "length"
        return {
            **self._frame,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [{**self._item, "status": "completed", "content": [_part(text)]}],
            "usage": {
                "input_tokens": job.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached_tokens},
                "output_tokens": job.answer.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": job.prompt_tokens + job.answer.tokens,
            },
        }

    def _of_part(self, name: str, **fields: object) -> bytes:
        where = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        return self._event(name, **where, **fields)

    def _event(self, name: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        data = orjson.dumps({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
