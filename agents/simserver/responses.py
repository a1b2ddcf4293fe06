"""Responses as bytes, whole or broken on purpose.

Everything but the words is rendered once per request, so a streamed token costs one join of three
byte strings: an answer is plain ASCII letters and spaces (stamps: digits and slashes too), which
JSON takes as they are. Each wake-up writes all tokens that came out since the last one. A client
that reads slowly holds up only its own handler: tokens not yet written are a number, not a queue.
"""

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import orjson
from aiohttp import web

from agents.simserver.driver import TokenStream
from agents.simserver.faults import Break, FaultSwitchboard
from agents.simserver.requests import GenerationRequest

DONE = b"data: [DONE]\n\n"
_SLOT = "\x00"  # JSON writes it as the six characters below; nothing after it holds them
_SLOT_JSON = rb"\u0000"


def prompt_mark(prompt: bytes) -> str:
    """Sixteen hexadecimal digits that name a prompt, given as `agents.sim.text` has it."""
    return hashlib.blake2b(prompt, digest_size=8).hexdigest()


def stamp(mark: str, attempt: str, index: int) -> str:
    """A token of a request with stamps: the prompt, the attempt, and the token's index from 0.

    `attempt` differs for every request that any engine process takes, so a reader sees if an answer
    was made of two, or if a token is missing or repeated.
    """
    return f"{mark}/{attempt}/{index} "


class AnswerText:
    """The text of one answer as its client sees it."""

    def __init__(self, job: GenerationRequest, attempt: str) -> None:
        self._job = job
        self._attempt = attempt
        self._mark = prompt_mark(job.prompt) if job.stamped else ""

    def token(self, at: int) -> str:
        """The client's text of one token; empty behind a stop sequence."""
        if self._job.stamped:
            return stamp(self._mark, self._attempt, at)
        return self._job.answer.shown(at, at + 1)

    def whole(self) -> str:
        if self._job.stamped:
            return "".join(map(self.token, range(self._job.answer.tokens)))
        return self._job.answer.text[: self._job.answer.visible]


def usage(job: GenerationRequest, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class EventRenderer(ABC):
    """The answer to one request in the shapes of some API."""

    def __init__(self, job: GenerationRequest, attempt: str) -> None:
        """`attempt`: what names this one in stamps."""
        self._job, self._words = job, AnswerText(job, attempt)

    @abstractmethod
    def whole(self, cached_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def opening(self) -> bytes:
        """What precedes the first token."""

    @abstractmethod
    def token(self, text: str) -> bytes:
        """The event of one token."""

    @abstractmethod
    def closing(self, cached_tokens: int) -> bytes:
        """What follows the last token: why it ended, and the usage."""

    def tokens(self, start: int, end: int) -> bytes:
        """The events of the tokens `start` to `end`."""
        texts = filter(None, map(self._words.token, range(start, end)))
        return b"".join(map(self.token, texts))


class SseRenderer(EventRenderer):
    """Chats and completions."""

    def __init__(
        self, job: GenerationRequest, response_id: str, created: int, attempt: str = ""
    ) -> None:
        super().__init__(job, attempt)
        self._frame = {
            "id": response_id,
            "object": "chat.completion.chunk" if job.chat else "text_completion",
            "created": created,
            "model": job.model,
        }
        delta: dict[str, Any] = {"content": _SLOT}
        self._before, self._after = self._event(self._choice(delta, _SLOT)).rsplit(_SLOT_JSON, 1)

    def whole(self, cached_tokens: int) -> bytes:
        job, text = self._job, self._words.whole()
        message = {"role": "assistant", "content": text}
        content = {"message": message} if job.chat else {"text": text}
        reason = job.answer.finish_reason
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion" if job.chat else "text_completion"
        numbers = usage(job, job.answer.tokens, cached_tokens)
        answer = {**self._frame, "object": kind, "choices": [choice], "usage": numbers}
        return orjson.dumps(answer)

    def opening(self) -> bytes:
        return self._event(self._choice({"role": "assistant", "content": ""}, "")) * self._job.chat

    def token(self, text: str) -> bytes:
        return self._before + text.encode() + self._after

    def closing(self, cached_tokens: int) -> bytes:
        finish = self._event(self._choice({}, "", self._job.answer.finish_reason))
        if not self._job.include_usage:
            return finish + DONE
        numbers = usage(self._job, self._job.answer.tokens, cached_tokens)
        last = orjson.dumps({**self._frame, "choices": [], "usage": numbers})
        return b"".join((finish, b"data: ", last, b"\n\n", DONE))

    def _choice(
        self, delta: dict[str, Any], text: str, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._job.chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._frame, "choices": [choice]}) + b"\n\n"


def json_response(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_ERROR = b'data: {"error":{"message":"the engine core is dead","code":500}}\n\ndata: [DONE]\n\n'
_GARBAGE = b"<html><body>502 Bad Gateway</body></html>\n\xff\xfe\x00 not: an event\n\n"
_HALF_EVENT = b'data: {"id":"chatcm'


async def send_stream(
    request: web.Request, stream: TokenStream, events: EventRenderer, faults: FaultSwitchboard
) -> web.StreamResponse:
    """Send the answer as it comes out; the returned response is complete."""
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    breaks = faults.stream_break()
    if breaks is not Break.NONE:
        after_tokens = faults.now.stream_after_tokens
        await _send_broken(request, response, stream, events, breaks, after_tokens)
        return response
    sent = 0
    finished = False
    while not finished:
        await stream.wait(sent)
        finished = stream.finished
        payload = events.opening() if sent == 0 else b""
        payload += events.tokens(sent, stream.tokens)
        sent = stream.tokens
        if finished:
            payload += events.closing(stream.cached_tokens)
        await response.write(payload)
    await response.write_eof()
    return response


async def _send_broken(
    request: web.Request,
    response: web.StreamResponse,
    stream: TokenStream,
    events: EventRenderer,
    breaks: Break,
    after_tokens: int,
) -> None:
    await stream.wait(after_tokens - 1)
    payload = b""
    if after_tokens:
        payload = events.opening() + events.tokens(0, min(after_tokens, stream.tokens))
    if breaks is Break.CUT:
        await response.write(payload + _HALF_EVENT)
        if request.transport is not None:
            request.transport.close()
        return
    if breaks is Break.GARBAGE:
        payload += _GARBAGE
    if breaks is Break.ERROR:
        await response.write(payload)
        await stream.wait(after_tokens)
        payload = _ERROR
    if payload:
        await response.write(payload)
    await response.write_eof()
