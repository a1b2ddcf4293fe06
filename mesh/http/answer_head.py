"""The first bytes of an answer: its status line and headers."""

from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from time import time

SERVER = "mesh"
_LINE = "%s: %s\r\n".__mod__
_REASONS = {status.value: status.phrase for status in HTTPStatus}


def answer_head(status: int, headers: Mapping[str, str], minor: int, *, keep_alive: bool) -> bytes:
    """Up to the body. `minor`: of the client's HTTP version. Raises ValueError for a header that
    would become two lines."""
    lines = "".join(map(_LINE, headers.items()))
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise ValueError(f"a header of the answer has a line break: {lines[:300]!r}")
    about = _general_lines(int(time()), minor, keep_alive)
    return f"HTTP/1.{minor} {status} {_REASONS.get(status, '')}\r\n{lines}{about}".encode()


@lru_cache(maxsize=8)
def _general_lines(now: int, minor: int, keep_alive: bool) -> str:
    """The headers of every answer in this second of Unix time, and the head's end."""
    about = f"date: {formatdate(now, usegmt=True)}\r\nserver: {SERVER}\r\n"
    if keep_alive == (minor == 1):  # what that version means anyway
        return about + "\r\n"
    return f"{about}connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
