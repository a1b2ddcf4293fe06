"""What the agent reads out of a response's bytes: is it an event stream, is it whole, does it
report an error, how many tokens did it count? It looks at the first and last bytes only, and never
parses each token. And the response's flow control.

A Server-Sent-Events stream (WHATWG HTML, section 9.2) starts with a field name, a comment or a line
end, and ends after a blank line. That distinguishes an engine that streams from one that prints a
stack trace or dies in the middle of an event. `agents.core.stream_end` says whether an end on an
event boundary is one.

vLLM, SGLang and llama.cpp answer a streaming request with status 200 before they compute it. What
fails afterwards comes as an event, `data: {"error": {...}}` or, from others, one named `error`,
mostly before `[DONE]`. As the first event, comments and opening events aside, it replaces the whole
response and is turned into the HTTP error that it would have been; as the last one it means that
the response is incomplete. Only those two places are searched, for a name within the event's first
SEEN_BYTES, in JSON before any text that a model wrote; so only likely errors are parsed.
"""

import json
import re
from collections import deque
from dataclasses import dataclass

from agents.core.engine_statuses import INVALID, NOT_FOUND, SERVER_ERROR, TOO_MANY, UNAUTHORIZED
from agents.core.events import NO_USAGE, TokenUsage
from schemas.exchange import WINDOW_BYTES
from schemas.http import DONE_LINES

TAIL_BYTES = 16 * 1024  # the last events with usage are far below 1 KiB
BOM = b"\xef\xbb\xbf"
_FIELDS = (b"data", b"event", b"id", b"retry")
EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")
_GATE_BYTES_MAX = 64  # blank lines before the first field; more of them is no stream

SEEN_BYTES = 96
EVENT_BYTES_MAX = 16 * 1024  # a longer event is passed on as any other
MESSAGE_CHARS_MAX = 300
_STATUSES = range(400, 600)
_STATUS_FIELDS = ("code", "status", "status_code", "http_status_code")
# Of types of errors, in small letters: Anthropic's, OpenAI's and vLLM's.
_STATUS_OF_TYPE = {
    "invalid_request_error": INVALID,
    "badrequesterror": INVALID,
    "authentication_error": UNAUTHORIZED,
    "permission_error": 403,
    "not_found_error": NOT_FOUND,
    "notfounderror": NOT_FOUND,
    "request_too_large": 413,
    "rate_limit_error": TOO_MANY,
    "api_error": SERVER_ERROR,
    "timeout_error": 504,
    "overloaded_error": 529,
}

_USAGE_KEY = b'"usage"'
_TIMINGS_KEY = b'"timings"'  # llama.cpp's
_USAGE_TRIES_MAX = 8
TOKENS_MAX = 1 << 31  # beyond any context; a larger number might not fit the wire
_DECODER = json.JSONDecoder()
_COMMENT_END = re.compile(rb"[\r\n]+")


class FlowWindow:
    """How far the agent may run ahead of one client: a byte window as in HTTP/2 (RFC 9113, section
    5.2), with absolute positions, so that a credit that is lost or repeated does no harm."""

    __slots__ = ("_consumed", "_ends_at", "_size", "sent")

    def __init__(self, size: int = WINDOW_BYTES) -> None:
        self._size = self._ends_at = size
        self.sent = 0  # bytes
        self._consumed = 0

    @property
    def open(self) -> bool:
        """Whether the engine may be read further."""
        return self.sent < self._ends_at

    def send(self, size: int) -> bool:
        """Bytes were sent; whether the window is still open."""
        self.sent = sent = self.sent + size
        return sent < self._ends_at

    def credit(self, consumed: int) -> None:
        """The client has consumed so many bytes. Claims beyond what was sent change nothing."""
        if self._consumed < consumed <= self.sent:
            self._consumed, self._ends_at = consumed, consumed + self._size


class Tail:
    """The last bytes that passed, kept without copying: at least TAIL_BYTES; at most twice that, or
    that and the largest chunk."""

    __slots__ = ("_chunks", "_drop_at", "total")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self.total = 0  # bytes that passed
        self._drop_at = 2 * TAIL_BYTES  # of the total

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.total = total = self.total + len(chunk)
        if total >= self._drop_at:
            self._drop()

    def _drop(self) -> None:
        held = sum(map(len, self._chunks))
        while held - len(self._chunks[0]) >= TAIL_BYTES:
            held -= len(self._chunks.popleft())
        self._drop_at = self.total - held + 2 * TAIL_BYTES

    def read(self) -> bytes:
        """The tail, at most TAIL_BYTES of it."""
        return b"".join(self._chunks)[-TAIL_BYTES:]


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


def incomplete(tail: Tail, end: bytes) -> str | None:
    """Why a stream with these last bytes did not end whole, for people; None if it did."""
    if tail.total <= len(end) and b"data:" not in end:
        return "the stream ended without one event"
    if end.endswith(EVENT_ENDS) or has_done_event(end):
        return None
    return "the stream ended in the middle of an event"


def has_done_event(end: bytes) -> bool:
    """Whether the last event of an OpenAI stream has come: nothing that follows matters."""
    text = end.rstrip()
    if not text.endswith(DONE_LINES):
        return False
    begin = text.rfind(b"data:")  # a model may write the same, but no raw line end before it
    return begin == 0 or text[begin - 1] in b"\r\n"


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error inside a stream: the status of the HTTP error that it amounts to, and its JSON."""

    status: int
    message: str
    body: bytes


def event_error(event: bytes) -> StreamError | None:
    """The error that one event of a stream reports; None for any other event."""
    text = event.removeprefix(BOM).lstrip(b"\r\n")
    while text[:1] == b":" and (found := _COMMENT_END.search(text)) is not None:
        text = text[found.end() :]
    seen = text[:SEEN_BYTES]
    is_likely = b'"error"' in seen or seen.startswith(b"event")
    return _event_error(text) if is_likely else None


def last_error(tail: bytes) -> StreamError | None:
    """The error that a stream with these last bytes ended with, before a `[DONE]` or without."""
    text = tail.rstrip()
    for done in DONE_LINES:
        text = text.removesuffix(done)
    text = text.rstrip()
    begin = max(text.rfind(b"\n\n"), text.rfind(b"\r\r"), text.rfind(b"\n\r\n"))
    return event_error(text[begin + 1 :])


def _event_error(event: bytes) -> StreamError | None:
    """The error that this event reports, or None for any other event."""
    if len(event) > EVENT_BYTES_MAX:
        return None
    name, data, comments = b"", [], []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        value = value.strip()
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
        elif not field:
            comments.append(value)
    found = _json_object(b"\n".join(data))
    if name == b"error":
        return _stream_error(found, b"\n".join(data or comments).strip())
    is_error = found is not None and (found.get("error") or found.get("object") == "error")
    return _stream_error(found, b"") if is_error else None


def _json_object(data: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _stream_error(found: dict[str, object] | None, text: bytes) -> StreamError:
    """`text`: the message where there is no JSON."""
    inner = found.get("error") if found else None
    error: dict[str, object] = inner if isinstance(inner, dict) else found or {}
    reported = error.get("message") or (inner if isinstance(inner, str) else None)
    message = str(reported or text.decode("utf-8", "replace") or "the engine reported an error")
    body = found if isinstance(inner, dict | str) else {"error": found or {"message": message}}
    return StreamError(_status(error), message[:MESSAGE_CHARS_MAX], json.dumps(body).encode())


def _status(error: dict[str, object]) -> int:
    for field in _STATUS_FIELDS:
        value = error.get(field)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
            value = int(value)
        if type(value) is int and value in _STATUSES:
            return value
    return _STATUS_OF_TYPE.get(str(error.get("type")).lower(), SERVER_ERROR)  # where it names none


def read_usage(tail: bytes) -> TokenUsage:
    """The token counts in the last bytes of a response; -1 for every count that is not there.

    One search serves JSON and event streams alike: inside a JSON string a quote is always escaped,
    so the bytes `"usage"` can only be a key, never text that a model wrote. The last such key that
    holds an object counts (streams carry `"usage": null` in earlier events).
    llama.cpp streams its `timings` without being asked: the same counts under other names.
    """
    found = _last_object(tail, _USAGE_KEY)
    if found is None:
        timings = _last_object(tail, _TIMINGS_KEY)
        return NO_USAGE if timings is None else _timed_usage(timings)
    return _counted(found)


def read_early_usage(head: bytes) -> TokenUsage:
    """The same in the first bytes of a response: of the first key that holds an object."""
    at = head.find(_USAGE_KEY)
    found = None if at < 0 else _object_after(head[at + len(_USAGE_KEY) :])
    return NO_USAGE if found is None else _counted(found)


def _counted(found: dict[str, object]) -> TokenUsage:
    if "input_tokens" in found or "output_tokens" in found:
        return _other_usage(found)
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        # Answers to work on prompts alone may have a total and nothing else.
        prompt_tokens=_count(found.get("prompt_tokens", _total(found))),
        cached_tokens=_count(cached),
        completion_tokens=_count(found.get("completion_tokens")),
    )


def _total(found: dict[str, object]) -> object:
    return None if "completion_tokens" in found else found.get("total_tokens")


def _other_usage(found: dict[str, object]) -> TokenUsage:
    """As Anthropic's API and OpenAI's Responses name them. Anthropic's `input_tokens` leave out
    those that were read from the cache or written to it."""
    prompt = _count(found.get("input_tokens"))
    details = found.get("input_tokens_details")
    if isinstance(details, dict):
        cached = _count(details.get("cached_tokens"))
    else:
        cached = _count(found.get("cache_read_input_tokens"))
        if prompt >= 0:
            prompt += max(0, cached) + max(0, _count(found.get("cache_creation_input_tokens")))
    return TokenUsage(prompt, cached, _count(found.get("output_tokens")))


def _timed_usage(timings: dict[str, object]) -> TokenUsage:
    """By llama.cpp's `timings`: its `prompt_n` leaves out the tokens that were cached."""
    computed, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    return TokenUsage(
        prompt_tokens=computed + cached if computed >= 0 and cached >= 0 else -1,
        cached_tokens=cached,
        completion_tokens=_count(timings.get("predicted_n")),
    )


def _last_object(tail: bytes, key: bytes) -> dict[str, object] | None:
    """The object under the last such key that holds one."""
    end = len(tail)
    for _ in range(_USAGE_TRIES_MAX):
        end = tail.rfind(key, 0, end)
        if end < 0:
            break
        if (found := _object_after(tail[end + len(key) :])) is not None:
            return found
    return None


def _object_after(text: bytes) -> dict[str, object] | None:
    value = text.lstrip().removeprefix(b":").lstrip()
    if not value.startswith(b"{"):
        return None
    try:
        found, _ = _DECODER.raw_decode(value.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else -1
