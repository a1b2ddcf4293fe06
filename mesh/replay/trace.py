"""Recorded traces: when requests came, how long they were, what they shared.

A trace is reduced to what every published kind has: arrival time, prompt and answer length in
tokens, and the ids of the prompt's leading blocks, where two prompts that begin with the same
ids begin with the same tokens. Each format is one function in `FORMATS`. Times stay as they
were recorded; `schedule` makes departures of them, a simulator may do otherwise.

Not done: a general column mapping by configuration. Formats differ in meaning (block size,
clock, session-local ids), not in column names, so a function says it better.

Source of the Mooncake format: Qin et al., "Mooncake", FAST 2025, appendix, and its trace release.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

REQUESTS_MAX = 1_000_000
TOKENS_MAX = 10_000_000  # of one prompt or answer; longer is a damaged line
BLOCK_ID_MAX = 2**63 - 1
TIMESTAMP_MS_MAX = 10**15  # wall clocks since 1970 are 10**12
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """The trace can't be used; the message names the line and says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `blocks` may cover less than the prompt: the rest is its own."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests in order of arrival."""

    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def scaled(self, factor: float) -> "Trace":
        """The same trace with prompts and answers `factor` times as long, for small engines.

        Blocks shrink with the prompts, so who shares how many leading blocks with whom stays
        exactly as recorded.
        """
        if factor == 1:
            return self
        block_tokens = max(1, round(self.block_tokens * factor))
        shrink = _Scale(self.block_tokens, block_tokens, factor)
        return Trace(block_tokens, tuple(shrink(request) for request in self.requests))


@dataclass(frozen=True, slots=True)
class _Scale:
    block_from: int
    block_to: int
    factor: float

    def __call__(self, request: TraceRequest) -> TraceRequest:
        whole = min(len(request.blocks), request.input_tokens // self.block_from)
        tail = request.input_tokens - whole * self.block_from
        return replace(
            request,
            input_tokens=max(1, whole * self.block_to + round(tail * self.factor)),
            output_tokens=max(1, round(request.output_tokens * self.factor)),
        )


def load_trace(path: Path, format_name: str) -> Trace:
    """Read a trace file. Raises TraceError, whose message names the file."""
    if format_name not in FORMATS:
        raise TraceError(f"unknown trace format {format_name!r}: use one of {', '.join(FORMATS)}")
    try:
        with path.open("rb") as lines:
            return FORMATS[format_name](lines)
    except OSError as error:
        raise TraceError(f"can't read trace {path}: {error.strerror}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def parse_mooncake(lines: Iterable[bytes]) -> Trace:
    """Mooncake JSON lines: milliseconds, token counts, ids of 512-token blocks."""
    requests = [
        _mooncake_request(line, number)
        for number, line in enumerate(lines, start=1)
        if line.strip() and _within_limit(number)
    ]
    if not requests:
        raise TraceError("holds no request")
    requests.sort(key=lambda request: request.at_s)
    return Trace(MOONCAKE_BLOCK_TOKENS, tuple(requests))


FORMATS: Mapping[str, Callable[[Iterable[bytes]], Trace]] = {"mooncake": parse_mooncake}


def _within_limit(number: int) -> bool:
    if number > REQUESTS_MAX:
        raise TraceError(f"more than {REQUESTS_MAX} lines: split the file")
    return True


def _mooncake_request(line: bytes, number: int) -> TraceRequest:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"line {number}: not a JSON object")
    input_tokens = _count(record, "input_length", number, least=1)
    return TraceRequest(
        at_s=_timestamp_ms(record, number) / 1000,
        input_tokens=input_tokens,
        output_tokens=_count(record, "output_length", number, least=0),
        blocks=_blocks(record, input_tokens, number),
    )


def _timestamp_ms(record: dict[str, Any], number: int) -> float:
    value: Any = record.get("timestamp")
    if type(value) not in (int, float) or not 0 <= value <= TIMESTAMP_MS_MAX:
        raise TraceError(f"line {number}: timestamp must be milliseconds from 0, got {value!r}")
    return float(value)


def _count(record: dict[str, Any], key: str, number: int, *, least: int) -> int:
    value = record.get(key)
    if type(value) is not int or not least <= value <= TOKENS_MAX:
        raise TraceError(
            f"line {number}: {key} must be a whole number from {least} to {TOKENS_MAX}, "
            f"got {value!r}"
        )
    return int(value)


def _blocks(record: dict[str, Any], input_tokens: int, number: int) -> tuple[int, ...]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(
        type(block) is int and 0 <= block <= BLOCK_ID_MAX for block in ids
    ):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers from 0")
    if len(ids) > math.ceil(input_tokens / MOONCAKE_BLOCK_TOKENS):
        raise TraceError(
            f"line {number}: {len(ids)} hash_ids are more than {input_tokens} tokens hold; "
            f"a Mooncake block is {MOONCAKE_BLOCK_TOKENS} tokens"
        )
    return tuple(ids)
