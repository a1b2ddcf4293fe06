"""`/v1/messages` of a simulated engine: Anthropic's shape of requests, answers and events.

A request is read as the chat of the same words, so both hit the same KV.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, PositiveInt

from agents.simserver.prompt_work import PromptWork
from agents.simserver.requests import (
    Flag,
    GenerationRequest,
    Part,
    RequestParser,
    Stops,
    message_text,
)
from agents.simserver.responses import EventRenderer
from schemas.prompt_writing import BILLING_HEADER
from schemas.settings import Advice

STOPS = {"stop": "end_turn", "length": "max_tokens"}


def _text(content: object) -> str:
    """The text of parts; uses and results of tools as JSON."""
    if isinstance(content, list):
        content = [
            {"type": "text", "text": orjson.dumps(part).decode()}
            if isinstance(part, dict) and str(part.get("type")).startswith("tool_")
            else part
            for part in content
        ]
    return message_text(content)


def _system(content: object) -> str:
    """The system prompt, as vLLM reads it: without blocks that name Claude Code's billing."""
    if isinstance(content, list):
        content = [part for part in content if not _is_billing(part)]
    return _text(content)


def _is_billing(part: object) -> bool:
    return isinstance(part, dict) and str(part.get("text")).startswith(BILLING_HEADER)


Text = Annotated[str, BeforeValidator(_text)]


def _role(role: object) -> object:
    """As vLLM takes them: Claude Code sends system turns, and has sent "ctx" and "msg"."""
    return "user" if role in ("ctx", "msg") else role


class _Message(Part):
    role: Annotated[Literal["user", "assistant", "system"], BeforeValidator(_role)]
    content: Text


class _Body(Part):
    model: Any = None
    messages: Annotated[
        list[_Message], Field(min_length=1), Advice("must be a list with at least one message")
    ]
    system: Annotated[str, BeforeValidator(_system)] = ""
    tools: Any = None

    def chat(self) -> dict[str, Any]:
        """The chat of the same words."""
        messages = [{"role": each.role, "content": each.content} for each in self.messages]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return {"model": self.model, "messages": messages, "tools": self.tools}


class _Generation(_Body):
    max_tokens: PositiveInt
    stream: Flag = False
    stop_sequences: Stops = Field(default_factory=list)
    stamp: Flag = False


def read_messages(parser: RequestParser, raw: bytes) -> GenerationRequest:
    """A /v1/messages body. Raises ApiError."""
    body = _Generation.read(raw)
    more = {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences}
    return parser.chat(orjson.dumps(body.chat() | more | {"stamp": body.stamp}))


def count_tokens(parser: RequestParser, raw: bytes) -> PromptWork:
    """A /v1/messages/count_tokens body. Raises ApiError."""
    job = parser.chat(orjson.dumps(_Body.read(raw).chat() | {"max_tokens": 1}))
    return PromptWork((), orjson.dumps({"input_tokens": job.prompt_tokens}))


def error_body(status: int, message: str) -> bytes:
    """An error as Anthropic's clients expect it."""
    kind = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}.get(
        status, "invalid_request_error" if status < 500 else "api_error"
    )
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


def _usage(job: GenerationRequest, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": job.prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


class MessageRenderer(EventRenderer):
    """Messages."""

    def __init__(self, job: GenerationRequest, message_id: str, attempt: str) -> None:
        super().__init__(job, attempt)
        self._message = {"id": message_id, "type": "message", "role": "assistant"}
        self._message |= {"model": job.model}
        self._stop = {"stop_reason": STOPS[job.answer.finish_reason], "stop_sequence": None}

    def whole(self, cached_tokens: int) -> bytes:
        content = [{"type": "text", "text": self._words.whole()}]
        usage = _usage(self._job, cached_tokens, self._job.answer.tokens)
        return orjson.dumps({**self._message, "content": content, **self._stop, "usage": usage})

    def opening(self) -> bytes:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._message, **nothing, "usage": _usage(self._job, 0, 0)}
        block = {"type": "text", "text": ""}
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block=block
        )

    def token(self, text: str) -> bytes:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def closing(self, cached_tokens: int) -> bytes:
        usage = _usage(self._job, cached_tokens, self._job.answer.tokens)
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=self._stop, usage=usage),
                _event("message_stop"),
            )
        )


def _event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))
