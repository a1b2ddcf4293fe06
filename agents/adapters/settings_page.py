"""Numbers in the JSON by which an engine shows its settings."""

from typing import Any

import orjson

from agents.config import BATCH_MAX_MOST


def read_object(data: bytes) -> dict[str, Any]:
    """The page's fields; none if it is no JSON object."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def batch_size(value: object) -> int | None:
    """A number of requests that may run at once, or None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= BATCH_MAX_MOST else None
