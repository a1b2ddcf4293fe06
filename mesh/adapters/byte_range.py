"""The part of a file that a download asks for (RFC 9110, 14)."""

import re
from typing import NamedTuple

_ONE = re.compile(r"bytes=\s*(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))\s*", re.IGNORECASE)


class ByteRange(NamedTuple):
    """From `start` up to, not including, `end`."""

    start: int
    end: int


class RangeOutside(ValueError):
    """The file has none of the bytes."""


def byte_range(header: str | None, size: int) -> ByteRange | None:
    """The range of that header in a file of `size` bytes; None for the whole file.

    The whole is the answer to several ranges too, and to what can't be read: a server may ignore
    either. Raises RangeOutside.
    """
    found = _ONE.fullmatch(header or "")
    if found is None:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        start, end = max(0, size - int(suffix)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        raise RangeOutside(f"the file has {size} bytes")
    return ByteRange(start, end)
