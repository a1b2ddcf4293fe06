"""Whether a response is an event stream, which of its bytes are content, and which only keep its
connection open.

A Server-Sent-Events stream (WHATWG HTML, section 9.2) starts with a field name, a comment or a line
end. That distinguishes an engine that streams from one that prints a stack trace.

Engines, and HTTP servers in front of them, write before and while they compute: comments (vLLM's
`--sse-keep-alive-interval`, llama.cpp's and many proxies'), `ping` events of Anthropic's API, the
events that open a stream in Anthropic's API and OpenAI's Responses, and for chats a first chunk
that names the role alone (transformers serve sends it before the request is even begun). None of
these shows that the engine computes. They are no first token either: until content comes, a request
can be placed on another replica unseen.

An event is content once it is whole, unless it is one of those. A `delta` without a role counts,
even an empty one: an engine computed a token that gave no text yet. After the first content a chunk
costs two searches in its bytes; JSON is parsed only where a `delta` with a role has no text.
"""

import json
import re
from functools import lru_cache

from agents.core.stream_errors import BOM, EVENT_BYTES_MAX, StreamError, event_error
from schemas.engine_routes import OPENING_EVENTS

OPENING_BYTES_MAX = 256 * 1024  # before content: opening events may repeat a request's tools
KEEP_ALIVES = frozenset({b"ping", b"keepalive", b"keep-alive", b"heartbeat"})
_EVENT_END = re.compile(rb"\n\n|\n\r\n|\r\r")
_SEAM_BYTES = 2  # of an event's end that may lie in the chunk before: less than the longest end
_ROLE = b'"role"'
# A quote inside a JSON string is escaped: these match keys, never text that a model wrote.
_has_text = re.compile(rb'"(?:content|reasoning|reasoning_content)"\s*:\s*"[^"]').search
_type_of = re.compile(rb'\{\s*"type"\s*:\s*"([^"\\]+)"').match
_FIELDS = (b"data", b"event", b"id", b"retry")
_GATE_BYTES_MAX = 64  # blank lines before the first field; more of them is no stream


def starts_events(head: bytes) -> bool | None:
    """Whether a response that begins with `head` can be an event stream; None: too early to say."""
    if len(head) < len(BOM) and BOM.startswith(head):
        return None
    text = head.removeprefix(BOM).lstrip(b"\r\n")
    if not text:
        return None if len(head) < _GATE_BYTES_MAX else False
    if text[:1] == b":":
        return True
    for field in _FIELDS:
        if text.startswith(field):
            after = text[len(field) : len(field) + 1]
            return after in b":\r\n" if after else None
        if field.startswith(text):
            return None
    return False


@lru_cache
def _silent_names(path: str) -> frozenset[bytes]:
    return KEEP_ALIVES | OPENING_EVENTS.get(path, frozenset())


@lru_cache
def _content_begins(path: str) -> "re.Pattern[bytes]":
    """Matches the beginning of events that are content if no role is in them; not of all such."""
    names = b"|".join(map(re.escape, sorted(_silent_names(path))))
    named = rb"event: ?(?!(?:%b)\r?\n)[^\s]+\r?\ndata: ?[^\s]" % names
    return re.compile(named + rb'|data: ?(?!\{\s*"type")[^\s]')


class StreamContent:
    """Says of each chunk of one stream, in their order, whether it brought content."""

    __slots__ = ("_begins", "_flows", "_held", "_is_begun", "_is_long", "_silent", "error")

    def __init__(self, path: str) -> None:
        self._silent = _silent_names(path)
        self._begins = _content_begins(path).match
        self._held = b""  # the beginning of an event that is not whole
        self._is_long = False  # within one that counted before its end, as it is so long
        self._is_begun = False
        self._flows = False  # it has begun, and the last chunk ended with a whole event
        self.error: StreamError | None = None  # that the first event beside opening ones reports

    def came(self, chunk: bytes) -> bool:
        """Whether content came with this chunk: an event of it became whole."""
        flows = self._flows and self._begins(chunk) and chunk.endswith(b"\n\n")
        if flows and (_ROLE not in chunk or _has_text(chunk)):
            return True  # whole events, the first of them content
        return self._searched(chunk)

    def ended(self) -> None:
        """Nothing more comes: the last event counts without its end."""
        self._is_content(self._held)

    def _searched(self, chunk: bytes) -> bool:
        data, begin = self._held + chunk, 0
        seen = max(0, len(self._held) - _SEAM_BYTES)
        found = self._is_long
        while (end := _EVENT_END.search(data, seen)) is not None:
            if not self._is_long:
                found = self._is_content(data[begin : end.end()]) or found
            self._is_long = False
            begin = seen = end.end()
        self._held = held = data[begin:]
        if len(held) > EVENT_BYTES_MAX and not self._is_long:
            self._held = held = _without_comments(held)
            if len(held) > EVENT_BYTES_MAX:
                found = self._is_content(held) or found
                self._is_long = True
        if self._is_long:
            self._held = held[-_SEAM_BYTES:]
        self._flows = self._is_begun and not self._held
        return found

    def _is_content(self, event: bytes) -> bool:
        name, data = b"", list[bytes]()
        for line in event.removeprefix(BOM).splitlines():
            field, _, value = line.partition(b":")
            if field == b"event" and not data:
                name = value.strip()
            elif field == b"data":
                data.append(value)
        text = b"\n".join(data).strip()
        if not text and name != b"error":
            return False
        if not name and (named := _type_of(text)) is not None:
            name = named[1]
        if name in self._silent or (_ROLE in text and not _has_text(text) and _is_role_only(text)):
            return False
        if not self._is_begun:
            self._is_begun = True
            self.error = event_error(event)
        return True


def _without_comments(text: bytes) -> bytes:
    """The text from its first line on that is no comment; the last line may still grow."""
    while text[:1] == b":" and (end := re.search(rb"[\r\n]+", text)) is not None:
        text = text[end.end() :]
    return text[:1] if text[:1] == b":" else text


def _is_role_only(text: bytes) -> bool:
    """Whether each choice of a chat's chunk names its role, and nothing that was computed."""
    try:
        choices = json.loads(text)["choices"]
        return bool(choices) and all(map(_names_role_only, choices))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False


def _names_role_only(choice: dict[str, dict[str, object]]) -> bool:
    """Raises KeyError, TypeError and AttributeError for what is no choice with a delta."""
    delta: dict[str, object] = choice["delta"]
    logprobs: object = choice.get("logprobs")
    computed = [value for name, value in delta.items() if name != "role"]
    computed += [choice.get("finish_reason"), choice.get("token_ids")]
    computed += logprobs.values() if isinstance(logprobs, dict) else [logprobs]
    return "role" in delta and not any(computed)
