"""One streamed chat answer, read as its bytes arrive: sans I/O, the clock is an argument.

Only what a load generator needs is kept: when content came, how it ended, what it cost. Each
`data:` line is taken as one event: the SSE standard allows an event of several, no OpenAI server
sends one. Lines are parsed as JSON (about a microsecond each) rather than searched for byte
patterns, which differ between engines in spaces and key order.

Times are per chunk with content: a chunk may carry several tokens, and chunks that arrive in one
read are 0 apart, as they are for any client.

A complete answer has a finish reason and ends with `[DONE]`. Anything less was cut.
"""

from array import array
from enum import StrEnum
from typing import Any

import orjson

from mesh.replay.tally import Usage

LINE_BYTES_MAX = 1024 * 1024
_CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Fault(StrEnum):
    """What is wrong with an answer's stream."""

    ERROR_EVENT = "error_event"
    BAD_STREAM = "bad_stream"
    TRUNCATED = "truncated"


class ChatStream:
    """Feed it the body; then ask `fault`, and if there is none the times and the usage."""

    def __init__(self) -> None:
        self.first_content_s: float | None = None
        self.gaps_s = array("d")  # between one chunk with content and the next
        self.usage: Usage | None = None
        self._last_content_s = 0.0
        self._rest = b""
        self._wrong: Fault | None = None
        self._finished = False
        self._done = False

    @property
    def fault(self) -> Fault | None:
        """What is wrong if the stream ends here; None for a complete answer."""
        if self._wrong:
            return self._wrong
        return None if self._finished and self._done else Fault.TRUNCATED

    @property
    def broken(self) -> bool:
        """Whether no further byte can mend it, so that reading on is of no use."""
        return self._wrong is not None

    def feed(self, data: bytes, now: float) -> None:
        """Take the bytes that arrived at `now` (seconds)."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._wrong:
                self._line(line.rstrip(b"\r"), now)
        if len(self._rest) > LINE_BYTES_MAX:
            self._wrong, self._rest = Fault.BAD_STREAM, b""

    def _line(self, line: bytes, now: float) -> None:
        field, _, value = line.partition(b":")
        value = value.strip()
        if field == b"event" and value == b"error":
            self._wrong = Fault.ERROR_EVENT
        elif field == b"data" and value == b"[DONE]":
            self._done = True
        elif field == b"data":
            self._data(value, now)

    def _data(self, value: bytes, now: float) -> None:
        try:
            event = orjson.loads(value)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self._wrong = Fault.BAD_STREAM
        elif event.get("error"):
            self._wrong = Fault.ERROR_EVENT
        else:
            self._chunk(event, now)

    def _chunk(self, event: dict[str, Any], now: float) -> None:
        try:
            for choice in event.get("choices") or ():
                self._choice(choice.get("delta") or {}, choice.get("finish_reason"), now)
            if event.get("usage"):
                self.usage = read_usage(event["usage"])
        except (AttributeError, TypeError, ValueError, KeyError):
            self._wrong = Fault.BAD_STREAM

    def _choice(self, delta: dict[str, Any], finish_reason: object, now: float) -> None:
        if finish_reason is not None:
            self._finished = True
        if not any(delta.get(key) for key in _CONTENT_KEYS):
            return
        if self.first_content_s is None:
            self.first_content_s = now
        else:
            self.gaps_s.append(now - self._last_content_s)
        self._last_content_s = now


def read_usage(usage: dict[str, Any]) -> Usage:
    """OpenAI's usage object. Raises KeyError, TypeError or ValueError if it is none."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(
        prompt_tokens=int(usage["prompt_tokens"]),
        output_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
    )
