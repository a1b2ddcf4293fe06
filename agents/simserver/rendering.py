"""Responses as bytes: everything but the words is rendered once per request.

A streamed token costs one join of three byte strings. That works because an answer is plain
ASCII letters and spaces, with stamps digits and slashes too, which JSON takes as they are.
"""

import hashlib
from typing import Any

import orjson

from agents.sim.answers import Answer
from agents.simserver.asks import Ask

DONE = b"data: [DONE]\n\n"
_SLOT = "\x00"  # JSON writes it as the six characters below; nothing after it holds them
_SLOT_JSON = rb"\u0000"


def prompt_mark(prompt: bytes) -> str:
    """Sixteen hexadecimal digits that name a prompt, given as `agents.sim.tokens` has it."""
    return hashlib.blake2b(prompt, digest_size=8).hexdigest()


def stamp(mark: str, attempt: str, index: int) -> str:
    """What stands for a token where stamps were asked for: whose it is, and its index from 0.

    `attempt` is another for every request that any engine process takes, so who reads an answer
    sees if it was made of two, or if a token is missing or there twice.
    """
    return f"{mark}/{attempt}/{index} "


class Words:
    """The text of one answer as its client sees it."""

    __slots__ = ("_ask", "_attempt", "_mark")

    def __init__(self, ask: Ask, attempt: str) -> None:
        self._ask = ask
        self._attempt = attempt
        self._mark = prompt_mark(ask.prompt) if ask.stamped else ""

    def token(self, at: int) -> str:
        """What is seen of one token; nothing of one behind a stop sequence."""
        if self._ask.stamped:
            return stamp(self._mark, self._attempt, at)
        return self._ask.answer.shown(at, at + 1)

    def whole(self) -> str:
        """What is seen of all."""
        if self._ask.stamped:
            return "".join(map(self.token, range(self._ask.answer.tokens)))
        return self._ask.answer.text[: self._ask.answer.visible]


def usage(ask: Ask, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": ask.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": ask.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def whole(ask: Ask, response_id: str, created: int, cached_tokens: int, attempt: str = "") -> bytes:
    """The body of an answer that is not streamed."""
    text = Words(ask, attempt).whole()
    content = {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    return orjson.dumps(
        {
            "id": response_id,
            "object": "chat.completion" if ask.chat else "text_completion",
            "created": created,
            "model": ask.model,
            "choices": [
                {
                    "index": 0,
                    **content,
                    "logprobs": None,
                    "finish_reason": ask.answer.finish_reason,
                }
            ],
            "usage": usage(ask, ask.answer.tokens, cached_tokens),
        }
    )


class SseRenderer:
    """The events of one streamed answer."""

    __slots__ = ("_after", "_answer", "_ask", "_before", "_frame", "_words")

    def __init__(self, ask: Ask, response_id: str, created: int, attempt: str = "") -> None:
        """`attempt`: what names this one in stamps."""
        self._ask = ask
        self._answer: Answer = ask.answer
        self._words = Words(ask, attempt)
        self._frame = {
            "id": response_id,
            "object": "chat.completion.chunk" if ask.chat else "text_completion",
            "created": created,
            "model": ask.model,
        }
        delta: dict[str, Any] = {"content": _SLOT}
        self._before, self._after = self._event(self._choice(delta, _SLOT)).rsplit(_SLOT_JSON, 1)

    def opening(self) -> bytes:
        """What precedes the first token: a chat's role."""
        return self._event(self._choice({"role": "assistant", "content": ""}, "")) * self._ask.chat

    def tokens(self, start: int, end: int) -> bytes:
        """One event for each of the tokens `start` to `end`."""
        token = self._words.token
        return b"".join(
            self._before + text.encode() + self._after
            for at in range(start, end)
            if (text := token(at))
        )

    def closing(self, cached_tokens: int) -> bytes:
        """Why it ended, the usage if asked for, and the end mark."""
        finish = self._event(self._choice({}, "", self._answer.finish_reason))
        if not self._ask.include_usage:
            return finish + DONE
        numbers = usage(self._ask, self._answer.tokens, cached_tokens)
        last = orjson.dumps({**self._frame, "choices": [], "usage": numbers})
        return b"".join((finish, b"data: ", last, b"\n\n", DONE))

    def _choice(
        self, delta: dict[str, Any], text: str, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._ask.chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._frame, "choices": [choice]}
        if self._ask.include_usage:
            chunk["usage"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"
