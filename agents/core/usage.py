"""The token counts an engine put at the end of an answer.

One search serves JSON answers and event streams alike: inside a JSON string a quote is always
escaped, so the bytes `"usage"` can only be a key, never text that a model wrote. The last such
key that holds an object wins (streams carry `"usage": null` in earlier events).
"""

import json

from agents.core.reading import NO_USAGE, Usage

_KEY = b'"usage"'
_TRIES_MAX = 8
TOKENS_MAX = 1 << 31  # beyond any context; a larger number is nonsense and might not fit the wire
_DECODER = json.JSONDecoder()


def read_usage(tail: bytes) -> Usage:
    """The usage in the last bytes of an answer; -1 for every count that is not there."""
    end = len(tail)
    for _ in range(_TRIES_MAX):
        end = tail.rfind(_KEY, 0, end)
        if end < 0:
            break
        found = _object_after(tail[end + len(_KEY) :])
        if found is not None:
            return _usage(found)
    return NO_USAGE


def _object_after(text: bytes) -> dict[str, object] | None:
    value = text.lstrip().removeprefix(b":").lstrip()
    if not value.startswith(b"{"):
        return None
    try:
        found, _ = _DECODER.raw_decode(value.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _usage(found: dict[str, object]) -> Usage:
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=_count(found.get("prompt_tokens")),
        cached_tokens=_count(cached),
        completion_tokens=_count(found.get("completion_tokens")),
    )


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else -1
