"""What all line formats check alike: numbers in range, objects, and how many lines there are.

Every error names its line and the value, because a trace of a million lines is not searched by
eye. Limits are far beyond any published trace: past them a line is damaged, not long.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import orjson

from mesh.replay.trace import TraceError

Row = TypeVar("Row")

REQUESTS_MAX = 1_000_000
TOKENS_MAX = 10_000_000  # of one prompt or answer
BLOCK_ID_MAX = 2**63 - 1


def numbered(lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, with their numbers. Raises TraceError beyond the limit."""
    for number, line in enumerate(lines, first):
        if number > REQUESTS_MAX:
            raise TraceError(f"more than {REQUESTS_MAX} lines: split the file")
        if line.strip():
            yield number, line


def json_object(line: bytes, number: int) -> dict[str, Any]:
    """The line's object. Raises TraceError."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"line {number}: not a JSON object")
    return record


def whole(
    record: dict[str, Any], key: str, where: str, *, least: int, most: int = TOKENS_MAX
) -> int:
    """A whole number from `least` to `most`. Raises TraceError that begins with `where`."""
    value = record.get(key)
    if type(value) is not int or not least <= value <= most:
        raise TraceError(
            f"{where}: {key} must be a whole number from {least} to {most}, got {value!r}"
        )
    return int(value)


def number_from_0(record: dict[str, Any], key: str, where: str, *, most: float, unit: str) -> float:
    """A number from 0 to `most`. Raises TraceError that begins with `where`."""
    value: Any = record.get(key)
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise TraceError(f"{where}: {key} must be {unit} from 0, got {value!r}")
    return float(value)


def text(record: dict[str, Any], key: str, where: str) -> str:
    """A string, which may be empty. Raises TraceError that begins with `where`."""
    value = record.get(key)
    if not isinstance(value, str):
        raise TraceError(f"{where}: {key} must be text, got {type(value).__name__}")
    return value


def at_least_one(rows: list[Row]) -> list[Row]:
    """The rows. Raises TraceError where there are none."""
    if not rows:
        raise TraceError("holds no request")
    return rows
