"""Responses as bytes, whole or broken on purpose.

Everything but the words is rendered once per request, so a streamed token costs one join of three
byte strings: an answer is plain ASCII letters and spaces (stamps: digits and slashes too), which
JSON takes as they are. Each wake-up writes all tokens that came out since the last one. A client
that reads slowly holds up only its own handler: tokens not yet written are a number, not a queue.
"""

import hashlib
from typing import Any, Protocol

import orjson
from aiohttp import web

from agents.sim.text import SimulatedAnswer
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


def whole(
    job: GenerationRequest,
    response_id: str,
    created: int,
    cached_tokens: int,
    attempt: str = "",
) -> bytes:
    """The body of an answer that is not streamed."""
    text = AnswerText(job, attempt).whole()
    content = {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
    return orjson.dumps(
        {
            "id": response_id,
            "object": "chat.completion" if job.chat else "text_completion",
            "created": created,
            "model": job.model,
            "choices": [
                {
                    "index": 0,
                    **content,
                    "logprobs": None,
                    "finish_reason": job.answer.finish_reason,
                }
            ],
            "usage": usage(job, job.answer.tokens, cached_tokens),
        }
    )


class EventRenderer(Protocol):
    """An answer in the shapes of some API."""

    def whole(self, cached_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""

    def opening(self) -> bytes:
        """What precedes the first token."""

    def tokens(self, start: int, end: int) -> bytes:
        """The events of the tokens `start` to `end`."""

    def closing(self, cached_tokens: int) -> bytes:
        """What follows the last token."""


class SseRenderer:
    def __init__(
        self, job: GenerationRequest, response_id: str, created: int, attempt: str = ""
    ) -> None:
        """`attempt`: what names this one in stamps."""
        self._job = job
        self._answer: SimulatedAnswer = job.answer
        self._words, self._attempt = AnswerText(job, attempt), attempt
        self._frame = {
            "id": response_id,
            "object": "chat.completion.chunk" if job.chat else "text_completion",
            "created": created,
            "model": job.model,
        }
        delta: dict[str, Any] = {"content": _SLOT}
        self._before, self._after = self._event(self._choice(delta, _SLOT)).rsplit(_SLOT_JSON, 1)

    def whole(self, cached_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""
        job, frame = self._job, self._frame
        return whole(
            job, str(frame["id"]), int(str(frame["created"])), cached_tokens, self._attempt
        )

    def opening(self) -> bytes:
        """What precedes the first token: a chat's role."""
        return self._event(self._choice({"role": "assistant", "content": ""}, "")) * self._job.chat

    def tokens(self, start: int, end: int) -> bytes:
        """One event for each of the tokens `start` to `end`."""
        token = self._words.token
        return b"".join(
            self._before + text.encode() + self._after
            for at in range(start, end)
            if (text := token(at))
        )

    def closing(self, cached_tokens: int) -> bytes:
        """Why it ended, the usage if requested, and the end mark."""
        finish = self._event(self._choice({}, "", self._answer.finish_reason))
        if not self._job.include_usage:
            return finish + DONE
        numbers = usage(self._job, self._answer.tokens, cached_tokens)
        last = orjson.dumps({**self._frame, "choices": [], "usage": numbers})
        return b"".join((finish, b"data: ", last, b"\n\n", DONE))

    def _choice(
        self, delta: dict[str, Any], text: str, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._job.chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._frame, "choices": [choice]}) + b"\n\n"


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
