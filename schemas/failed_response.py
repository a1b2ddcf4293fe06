"""The event `response.failed`, which ends a stream of OpenAI's Responses that broke.

It names the response that the stream began with: clients refuse another id. Its place in the
stream is the number after the last one that the client was sent. Both are read from the stream's
own bytes, once it has broken. What clients make of it: docs/decisions/one-ending-for-responses.md.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import orjson

FIRST_BYTES = 16 * 1024  # of a stream: its id is in the first event, before a request's tools
NAME = b"response.failed"
CODE = "server_error"  # of those that the API lists
# A quote inside a JSON string is escaped: these match keys, never text that a model wrote.
_DATA = re.compile(rb"^data: ?(\{.*\})\r?$", re.MULTILINE)
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_CREATED = re.compile(rb'"created_at"\s*:\s*(\d{1,15})')
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})')


class Sent(NamedTuple):
    """What a client was sent of a stream: its first bytes and its last.

    `number`: the highest `last_number` of pieces of which `last` would not show it, -1 if none.
    """

    first: bytes = b""
    last: bytes = b""
    number: int = -1


NOTHING_SENT = Sent()


def last_number(piece: bytes) -> int:
    """That of the last event in a piece of a stream which has one; -1 if none has."""
    numbers = _NUMBER.findall(piece)
    return int(numbers[-1]) if numbers else -1


def response_failed(sent: Sent, error: Mapping[str, object]) -> bytes:
    """The event for a stream of which that was sent. `error`: in the shape of OpenAI's
    errors; also a field of the event itself, on which OpenAI's clients raise an exception."""
    first = sent.first
    response = {
        "id": _response_id(first),
        "object": "response",
        "created_at": int(_text(_CREATED, first) or 0),
        "status": "failed",
        "error": {"code": CODE, "message": error["message"]},
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": _text(_MODEL, first),
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
    number = max(sent.number, last_number(sent.first), last_number(sent.last))
    event = {
        "type": NAME.decode(),
        "sequence_number": number + 1,
        "response": response,
        "error": error,
    }
    return b"event: %b\ndata: %b\n\n" % (NAME, orjson.dumps(event))


def _response_id(first: bytes) -> str:
    """That of the response in the first event; of one that is too long to be read, the first id."""
    found = _DATA.search(first)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if found is not None and isinstance(name := orjson.loads(found[1])["response"]["id"], str):
            return name
    return _text(_ID, first)


def _text(field: "re.Pattern[bytes]", first: bytes) -> str:
    """What a field holds, the first of that name; empty if it is not there."""
    found = field.search(first)
    return "" if found is None else found[1].decode("utf-8", "replace")
