"""Errors that an engine reports inside an event stream which began with status 200.

vLLM, SGLang and llama.cpp answer a streaming request with 200 before they compute it. What fails
afterwards comes as an event, `data: {"error": {...}}` or, from others, one named `error`, mostly
before `[DONE]`. As the first event, comments aside, it stands for the whole answer, and is turned
into the HTTP error that it would have been; as the last one it says that the answer is incomplete.

Only those two places are looked at. An error has its name within the event's first SEEN_BYTES, in
JSON before any text that a model wrote; so nearly all events are dismissed by one search, and none
but a likely error is parsed.
"""

import json
from dataclasses import dataclass

from agents.core.stream import BOM
from schemas.http import DONE_LINES

SEEN_BYTES = 96
EVENT_BYTES_MAX = 16 * 1024  # a longer event is passed on as any other
MESSAGE_CHARS_MAX = 300
STATUS_UNKNOWN = 500  # of an error that names none
STATUS_INVALID = 400
_STATUSES = range(400, 600)
_STATUS_FIELDS = ("code", "status", "status_code", "http_status_code")
_INVALID = ("invalid_request_error", "badrequesterror")  # types of errors, in small letters


@dataclass(frozen=True, slots=True)
class EngineError:
    """`status`: of the HTTP error that it amounts to; `body`: that error's, in JSON."""

    status: int
    message: str
    body: bytes


def first_error(head: bytes, *, more: bool) -> EngineError | bool:
    """The error that a stream with these first bytes begins with; False if it is another event.

    `more`: whether more may come. True if it has to be waited for.
    """
    text = head.removeprefix(BOM).lstrip(b"\r\n") if head[:1] in b"\xef\r\n" else head
    if not text or text[:1] == b":":
        text = _without_comments(text)
        if not text:
            return more and len(head) < EVENT_BYTES_MAX
    seen = text[:SEEN_BYTES]
    if b'"error"' not in seen and not seen.startswith(b"event"):
        return more and len(seen) < SEEN_BYTES and _event_bytes(text) < 0
    size = _event_bytes(text)
    if size < 0 and more and len(text) < EVENT_BYTES_MAX:
        return True
    return _read(text if size < 0 else text[:size]) or False


def last_error(tail: bytes) -> EngineError | None:
    """The error that a stream with these last bytes ended with, before a `[DONE]` or without."""
    text = tail.rstrip()
    for done in DONE_LINES:
        text = text.removesuffix(done)
    text = text.rstrip()
    begin = max(text.rfind(b"\n\n"), text.rfind(b"\r\r"), text.rfind(b"\n\r\n"))
    event = text[begin + 1 :].lstrip(b"\r\n")
    seen = event[:SEEN_BYTES]
    return _read(event) if b'"error"' in seen or seen.startswith(b"event") else None


def _without_comments(text: bytes) -> bytes:
    """The text from its first line on that is no comment; empty while that has not begun."""
    while text[:1] == b":":
        ends = [at for end in (b"\n", b"\r") if (at := text.find(end)) >= 0]
        text = text[min(ends, default=len(text)) :].lstrip(b"\r\n")
    return text


def _event_bytes(text: bytes) -> int:
    """How long the first event is; -1 while its end is not there."""
    ends = [at for end in (b"\n\n", b"\r\r", b"\n\r\n") if (at := text.find(end)) >= 0]
    return min(ends, default=-1)


def _read(event: bytes) -> EngineError | None:
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
    found = _parsed(b"\n".join(data))
    if name == b"error":
        return _described(found, b"\n".join(data or comments))
    is_error = found is not None and (found.get("error") or found.get("object") == "error")
    return _described(found, b"") if is_error else None


def _parsed(data: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _described(found: dict[str, object] | None, text: bytes) -> EngineError:
    """`text`: what stands for the message where there is no JSON."""
    inner = found.get("error") if found else None
    error: dict[str, object] = inner if isinstance(inner, dict) else found or {}
    said = error.get("message") or (inner if isinstance(inner, str) else None)
    message = str(said or text.decode("utf-8", "replace") or "the engine reported an error")
    status = _status(error)
    body = found if isinstance(inner, dict | str) else {"error": found or {"message": message}}
    return EngineError(status, message[:MESSAGE_CHARS_MAX], json.dumps(body).encode())


def _status(error: dict[str, object]) -> int:
    for field in _STATUS_FIELDS:
        value = error.get(field)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
            value = int(value)
        if type(value) is int and value in _STATUSES:
            return value
    return STATUS_INVALID if str(error.get("type")).lower() in _INVALID else STATUS_UNKNOWN
