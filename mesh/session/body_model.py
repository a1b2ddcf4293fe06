"""Where a request's body names its model, so that another name can be put there.

Only these bytes are replaced: the engine gets everything else as the client wrote it. A key is
found by its text, however it is escaped, and counts where it is the body's own: neither inside a
text (quotes are escaped there, and a key's are not) nor in an object within. JSON that names its
model twice is not rewritten, as engines differ in which of them they take.
"""

import re
from typing import NamedTuple

import orjson

from schemas.ids import ModelId

# In valid JSON a quote that follows no backslash begins or ends a text, and none ends before `m`.
_KEY = re.compile(
    rb'"(?<!\\")(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"'
    rb"[ \t\n\r]*:[ \t\n\r]*"
)
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_NEITHER = bytes(set(range(256)) - set(b'"{}[]'))  # quotes nor brackets
KEYS_MAX = 1000  # of that name, in objects within: some milliseconds


class ModelPlace(NamedTuple):
    """Bytes of a body, from `start` to `end`. `is_json`: written with quotes and escapes."""

    start: int
    end: int
    is_json: bool = True


def model_in_json(body: bytes) -> ModelPlace | None:
    """The value of `model` in a JSON object that has one and is valid; None if it is there twice,
    or is no text."""
    keys: list[re.Match[bytes]] = []
    for key in _KEY.finditer(body):
        if len(keys) >= KEYS_MAX:
            return None
        keys.append(key)
    if len(keys) > 1:
        keys = [key for key, depth in zip(keys, _depths(body, keys), strict=True) if depth == 1]
    if len(keys) != 1:
        return None
    value = _TEXT.match(body, keys[0].end())
    return None if value is None else ModelPlace(value.start(), value.end())


def _depths(body: bytes, keys: list[re.Match[bytes]]) -> list[int]:
    """In how many brackets each of these keys is."""
    found, depth, start = [], 0, 0
    for key in keys:
        depth += _deeper(body[start : key.start()])
        found.append(depth)
        start = key.start()
    return found


def _deeper(part: bytes) -> int:
    """How many more brackets are opened than closed in whole texts and what is between them."""
    quotes_only = part.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NEITHER)
    between = b"".join(quotes_only.split(b'"')[::2])
    opened, closed = between.count(b"{") + between.count(b"["), between.count(b"}")
    return opened - closed - between.count(b"]")


def with_model(body: bytes, place: ModelPlace, model: ModelId) -> tuple[bytes, ModelPlace]:
    """The body with that model there, and where it is now."""
    name = orjson.dumps(model) if place.is_json else model.encode()
    with memoryview(body) as view:
        changed = b"".join((view[: place.start], name, view[place.end :]))
    return changed, place._replace(end=place.start + len(name))
