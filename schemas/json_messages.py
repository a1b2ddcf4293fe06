"""How messages that people read too come from JSON: decoders of their dataclasses."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from schemas.wire import WireError

STATE_BYTES_MAX = 256 * 1024

T = TypeVar("T")


def decoder(kind: type[T], bytes_max: int = STATE_BYTES_MAX) -> Callable[[bytes], T]:
    """What reads such a message from JSON, and ignores fields that this version does not know. It
    raises WireError that names the first wrong field."""
    adapter = TypeAdapter(kind)

    def decode(data: bytes) -> T:
        if len(data) > bytes_max:
            raise WireError(f"state of {len(data)} bytes, at most {bytes_max} are read")
        try:
            return adapter.validate_json(data)
        except ValidationError as error:
            first: Any = error.errors(include_url=False)[0]
            raise WireError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    return decode
