"""Errors that engines report inside a stream.

vLLM, SGLang and llama.cpp answer a streaming request with status 200 before they compute it. What
fails afterwards comes as an event, `data: {"error": {...}}` or, from others, one named `error`,
mostly before `[DONE]`. As the first event, comments and opening events aside, it replaces the whole
response and is turned into the HTTP error that it would have been; as the last one it means that
the response is incomplete. Only those two places are searched, for a name within the event's first
SEEN_BYTES, in JSON before any text that a model wrote; so only likely errors are parsed.
"""

import json
import re
from dataclasses import dataclass

from schemas.http import DONE_LINES
from schemas.http_statuses import INVALID, NOT_FOUND, SERVER_ERROR, TOO_MANY, UNAUTHORIZED

BOM = b"\xef\xbb\xbf"
EVENT_BYTES_MAX = 16 * 1024  # a longer event is passed on as any other
SEEN_BYTES = 96
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
_COMMENT_END = re.compile(rb"[\r\n]+")


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
