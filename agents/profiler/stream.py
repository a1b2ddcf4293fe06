"""One streamed request of a profiling run, and when each of its tokens came."""

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any

from agents.adapters.engine_kinds import read_object
from agents.adapters.http_client import HttpBroken
from agents.core.events import NO_USAGE
from agents.core.iteration_samples import StreamTimes
from agents.core.usage import read_usage

SILENCE_S = 60.0  # an engine that shows nothing for so long hangs
LINE_BYTES_MAX = 1024 * 1024
ERROR_CHARS_MAX = 300
_TEXTS = ("content", "reasoning_content", "reasoning")


class EngineUnusable(Exception):
    """The engine can't be profiled; the message says why, and what to do where that is known."""


class Stream:
    """Times are `time.monotonic` seconds. `problem`: why it failed, empty if it didn't."""

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        on_token: Callable[["Stream"], None] | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.sent_at = self.ended_at = inf
        self.token_at: list[float] = []
        self.usage = NO_USAGE
        self.problem = ""
        self.status = 0
        self.is_whole = False  # it was received to its end, and no error was in it
        self._on_token = on_token
        self._rest = b""
        self._wanted = inf
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self.ended_at < inf

    @property
    def times(self) -> StreamTimes:
        return StreamTimes(self.sent_at, self.prompt_tokens, tuple(self.token_at), self.ended_at)

    async def reached(self, tokens: float = inf) -> None:
        """Return when it has so many tokens, or has ended. One waiter at a time.

        Raises EngineUnusable if nothing comes.
        """
        while len(self.token_at) < tokens and not self.has_ended:
            before = len(self.token_at)
            self._wanted = tokens
            self._changed.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._changed.wait()
            except TimeoutError:
                if len(self.token_at) == before:
                    silence = f"the engine sent no token for {SILENCE_S:g} s"
                    raise EngineUnusable(silence) from None

    def end(self, at: float) -> None:
        """Nothing more comes."""
        self.ended_at = at
        self._changed.set()

    def feed(self, data: bytes) -> None:
        """Bytes of the answer came: lines of server-sent events. Raises HttpBroken."""
        now = time.monotonic()
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES_MAX:
            raise HttpBroken(f"a line of the stream has more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            return
        fields = read_object(payload)
        if isinstance(fields.get("usage"), dict):
            self.usage = read_usage(payload)
        if "error" in fields:
            self.problem = error_text(payload)
        choices = fields.get("choices")
        if not (isinstance(choices, list) and choices and _is_token(choices[0])):
            return
        self.token_at.append(now)
        if len(self.token_at) >= self._wanted:
            self._changed.set()
        if self._on_token is not None:
            self._on_token(self)


def error_text(body: bytes) -> str:
    """What an engine's error says, in one line."""
    fields = read_object(body)
    error = fields.get("error", fields)
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) and message else body.decode("utf-8", "replace")
    return " ".join(text.split())[:ERROR_CHARS_MAX] or "nothing"


def _is_token(choice: Any) -> bool:
    """Whether an event's choice is a token; one that has no text of its own counts."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text")) or ("text" in choice and not choice.get("finish_reason"))
    if any(delta.get(name) for name in _TEXTS):
        return True
    return "content" in delta and "role" not in delta and not choice.get("finish_reason")
