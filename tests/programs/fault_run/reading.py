"""What a client sees of one stamped answer, and what is wrong with it: pure, fed with bytes.

A stamp (`agents.simserver.responses.stamp`) names the prompt, the engine's attempt and the token's
index, so an answer that mixes two requests or two attempts, or lacks or repeats a token, shows.
"""

import re
from enum import StrEnum
from typing import Any

import orjson

STAMP = re.compile(r"(?P<mark>[0-9a-f]{16})/(?P<attempt>[0-9a-f]+-[0-9a-f]+)/(?P<index>\d+) ")


class End(StrEnum):
    """How a request ended for its client. Every one ends in exactly one of these ways."""

    WHOLE = "whole"  # every token of it, and the last event
    REFUSED = "HTTP error"  # a status with an error that has the reason
    ERROR_EVENT = "error event"  # the stream began, and its last event has the reason
    ROUTER_LOST = "its router killed"  # the connection broke, and its router had been killed
    WRONG = "wrong"  # none of these: the violations have the reason


class Stamps:
    """The tokens of one answer, in the order in which they come."""

    def __init__(self, mark: str, tokens: int) -> None:
        """`mark`: of the prompt that was asked; `tokens`: how many were."""
        self._mark = mark
        self._tokens = tokens
        self._attempt: str | None = None
        self.count = 0
        self.violations: list[str] = []

    def take(self, text: str) -> None:
        """The next piece of the answer's text, of whole tokens."""
        at = 0
        while at < len(text):
            found = STAMP.match(text, at)
            if found is None:
                self.violations.append(f"no stamp: {text[at : at + 60]!r}")
                return
            self._token(found["mark"], found["attempt"], int(found["index"]))
            at = found.end()

    def complete(self) -> None:
        """The answer claims to be whole."""
        if self.count != self._tokens:
            self.violations.append(f"whole with {self.count} of {self._tokens} tokens")

    def _token(self, mark: str, attempt: str, index: int) -> None:
        if mark != self._mark:
            self.violations.append("a token of another prompt")
        if self._attempt is None:
            self._attempt = attempt
        elif attempt != self._attempt:
            self.violations.append("tokens of two attempts")
        if index > self.count:
            self.violations.append(f"tokens missing: {self.count} to {index - 1}")
        elif index < self.count:
            self.violations.append(f"a token again or late: {index} after {self.count - 1}")
        self.count = max(self.count, index + 1)


class Stream:
    """A streamed answer. Feed it the body, then ask `end`."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._rest = b""
        self._finished = False
        self._last: End | None = None  # what the last event made of it

    @property
    def violations(self) -> list[str]:
        """What was wrong so far."""
        return self._stamps.violations

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event.strip() and not event.startswith(b":"):  # a comment
                self._event(event)

    def end(self) -> End:
        """The body has ended as HTTP requires."""
        if self._rest.strip():
            self.violations.append(f"half an event at the end: {self._rest[:60]!r}")
        if self._last is None:
            self.violations.append("ended without a last event")
            return End.WRONG
        return self._last

    @property
    def has_ended(self) -> bool:
        """Whether its last event has come; what the connection does then is of no matter."""
        return self._last is not None

    @property
    def last(self) -> End:
        """What the last event made of it."""
        assert self._last is not None
        return self._last

    def _event(self, event: bytes) -> None:
        field, _, value = event.partition(b":")
        value = value.strip()
        if self._last is not None:
            after = "[DONE]" if self._last is End.WHOLE else "the error event"
            self.violations.append(f"after {after}: {event[:120]!r}")
        elif field != b"data":
            self.violations.append(f"no data event: {event[:60]!r}")
        elif value == b"[DONE]":
            self._last = End.WHOLE
            self._stamps.complete()
            if not self._finished:
                self.violations.append("[DONE] without a finish reason")
        else:
            self._data(value)

    def _data(self, value: bytes) -> None:
        try:
            chunk: Any = orjson.loads(value)
        except orjson.JSONDecodeError:
            self.violations.append(f"an event that is no JSON: {value[:60]!r}")
            return
        if "error" in chunk:
            self._last = End.ERROR_EVENT
            return
        for choice in chunk.get("choices", ()):
            if self._finished:
                self.violations.append("a choice after the finish reason")
            self._stamps.take(choice["delta"].get("content") or "")
            self._finished |= choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            reported = usage["completion_tokens"]
            if reported != self._stamps.count:
                self.violations.append(f"usage reports {reported} tokens of {self._stamps.count}")


def read_plain(stamps: Stamps, body: bytes) -> End:
    """A plain answer with status 200 whose body came whole, by HTTP's framing."""
    try:
        answer: Any = orjson.loads(body)
        text = answer["choices"][0]["message"]["content"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        stamps.violations.append(f"a 200 that is no answer: {body[:120]!r}")
        return End.WRONG
    stamps.take(text)
    stamps.complete()
    return End.WHOLE


def read_refusal(status: int, body: bytes) -> tuple[str, str | None]:
    """The reason in an error's answer, and what is wrong with it, if it has no clear one."""
    try:
        error: Any = orjson.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code") or error["type"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return str(status), f"an HTTP {status} without a reason: {body[:120]!r}"
    if not message:
        return str(status), f"an HTTP {status} with an empty message"
    return f"{status} {code}", None
