"""`/v1/responses` of a simulated engine, which keeps the latest responses, as vLLM does on demand.

A request is read as the chat of the same words, so both hit the same KV.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import BeforeValidator, PositiveInt

from agents.simserver.requests import ApiError, Flag, GenerationRequest, Part, RequestParser
from agents.simserver.responses import EventRenderer, json_response
from schemas.response_calls import RESPONSE, RESPONSE_CANCEL, RESPONSE_INPUT

KEPT_MAX = 1024
ITEMS_LISTED = 20  # unless a client wants fewer, or more
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


@dataclass(slots=True)
class _Kept:
    """One response. `turns`: of its conversation; `given`: those of its own input; `answer`: once
    it is complete."""

    turns: list[dict[str, Any]]
    given: list[dict[str, Any]]
    answer: dict[str, Any] | None = None


class KeptResponses:
    """The latest responses and their conversations, by their ids."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def routes(self) -> list[web.RouteDef]:
        """What clients may do with a response. None can be cancelled: none is made in the
        background."""
        return [
            web.get(RESPONSE, self._show),
            web.delete(RESPONSE, self._forget),
            web.post(RESPONSE_CANCEL, self._cancel),
            web.get(RESPONSE_INPUT, self._input),
        ]

    def completed(self, name: str, answer: dict[str, Any]) -> None:
        """The answer of that id is complete; of one that is not kept nothing is."""
        if name in self._kept:
            self._kept[name].answer = answer

    def _found(self, request: web.Request) -> tuple[str, _Kept, dict[str, Any]]:
        name = request.match_info["response_id"]
        kept = self._kept.get(name)
        if kept is None or kept.answer is None:
            raise _not_found(name, "response_id")
        return name, kept, kept.answer

    async def _show(self, request: web.Request) -> web.Response:
        return json_response(self._found(request)[2])

    async def _forget(self, request: web.Request) -> web.Response:
        name, _, _ = self._found(request)
        del self._kept[name]
        return json_response({"id": name, "object": "response", "deleted": True})

    async def _cancel(self, request: web.Request) -> web.Response:
        self._found(request)
        message = "Cannot cancel a synchronous response."
        raise ApiError(400, message, "response_id", "response_not_cancellable")

    async def _input(self, request: web.Request) -> web.Response:
        name, kept, _ = self._found(request)
        items = [
            {"id": f"in_{number}_{name}", "type": "message", "role": turn["role"],
             "status": "completed", "content": [{"type": "input_text", "text": turn["content"]}]}
            for number, turn in enumerate(kept.given)
        ]  # fmt: skip
        if request.query.get("order") != "asc":
            items.reverse()
        ids = [item["id"] for item in items]
        begin = ids.index(after) + 1 if (after := request.query.get("after", "")) in ids else 0
        limit = request.query.get("limit", str(ITEMS_LISTED))
        listed = items[begin:][: int(limit) if limit.isdecimal() else ITEMS_LISTED]
        about = {"object": "list", "has_more": begin + len(listed) < len(items)}
        first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
        return json_response({**about, "data": listed, "first_id": first, "last_id": last})

    def read(self, parser: RequestParser, raw: bytes, own_id: str) -> tuple[str, GenerationRequest]:
        """A /v1/responses body: the id of its answer, which is kept from now on unless it is not to
        be, and what to generate. `own_id`: for a request that gives none. Raises ApiError."""
        body = _Body.read(raw)
        before: list[dict[str, Any]] = []
        if (previous := body.previous_response_id) is not None:
            if previous not in self._kept:
                raise _not_found(previous, "previous_response_id")
            before = self._kept[previous].turns
        messages = before + body.input
        first = [{"role": "system", "content": body.instructions}] if body.instructions else []
        chat = {"model": body.model, "messages": first + messages}
        chat["max_tokens"] = body.max_output_tokens
        more = {"tools": body.tools, "stream": body.stream, "stamp": body.stamp}
        job = parser.chat(orjson.dumps(chat | more))
        name = body.request_id or own_id
        if body.store is not False:
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            said = {"role": "assistant", "content": job.answer.text}
            self._kept[name] = _Kept([*messages, said], body.input)
        return name, job


def _not_found(name: str, param: str) -> ApiError:
    return ApiError(404, f"Response with id {name!r} not found.", param)


class ResponseRenderer(EventRenderer):
    """Responses."""

    def __init__(
        self,
        job: GenerationRequest,
        response_id: str,
        created: int,
        attempt: str,
        completed: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """`completed`: called with its id and answer."""
        super().__init__(job, attempt)
        self._name, self._on_completed, self._number = response_id, completed, 0
        self._frame = {"id": response_id, "object": "response", "created_at": created}
        self._frame |= {"model": job.model, "error": None, "instructions": None, "metadata": {}}
        self._frame |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        self._item = {"id": f"item_{response_id}", "type": "message", "role": "assistant"}

    def whole(self, cached_tokens: int) -> bytes:
        return orjson.dumps(self._completed(cached_tokens))

    def opening(self) -> bytes:
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

    def token(self, text: str) -> bytes:
        return self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def closing(self, cached_tokens: int) -> bytes:
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
        answer = {
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
        self._on_completed(self._name, answer)
        return answer

    def _of_part(self, name: str, **fields: object) -> bytes:
        where = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        return self._event(name, **where, **fields)

    def _event(self, name: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        data = orjson.dumps({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
