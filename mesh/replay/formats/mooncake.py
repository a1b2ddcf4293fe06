"""Mooncake JSON lines: milliseconds, token counts, ids of 512-token blocks.

Source: Qin et al., "Mooncake", FAST 2025, appendix, and its trace release.
"""

import math
from collections.abc import Iterable
from typing import Any

from mesh.replay.formats.lines import (
    BLOCK_ID_MAX,
    at_least_one,
    json_object,
    number_from_0,
    numbered,
    whole,
)
from mesh.replay.trace import Trace, TraceError, TraceRequest

BLOCK_TOKENS = 512
TIMESTAMP_MS_MAX = 10**15  # wall clocks since 1970 are 10**12


def parse_mooncake(lines: Iterable[bytes]) -> Trace:
    """The trace of these lines, in order of time. Raises TraceError that names a line."""
    requests = at_least_one([_request(line, number) for number, line in numbered(lines)])
    requests.sort(key=lambda request: request.at_s)
    return Trace(BLOCK_TOKENS, tuple(requests))


def _request(line: bytes, number: int) -> TraceRequest:
    record, where = json_object(line, number), f"line {number}"
    input_tokens = whole(record, "input_length", where, least=1)
    at_ms = number_from_0(record, "timestamp", where, most=TIMESTAMP_MS_MAX, unit="milliseconds")
    return TraceRequest(
        at_s=at_ms / 1000,
        input_tokens=input_tokens,
        output_tokens=whole(record, "output_length", where, least=0),
        blocks=_blocks(record, input_tokens, number),
    )


def _blocks(record: dict[str, Any], input_tokens: int, number: int) -> tuple[int, ...]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(
        type(block) is int and 0 <= block <= BLOCK_ID_MAX for block in ids
    ):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers from 0")
    if len(ids) > math.ceil(input_tokens / BLOCK_TOKENS):
        raise TraceError(
            f"line {number}: {len(ids)} hash_ids are more than {input_tokens} tokens hold; "
            f"a Mooncake block is {BLOCK_TOKENS} tokens"
        )
    return tuple(ids)
