"""Scaling keeps who shares what with whom."""

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.trace import Trace, TraceRequest
from mesh.replay.trace_formats import MOONCAKE_BLOCK_TOKENS, load_trace

RECORDED = Path("tests/data/mooncake/conversation_first60.jsonl")


@given(
    blocks=st.lists(st.integers(0, 1000), max_size=40),
    tail=st.integers(1, MOONCAKE_BLOCK_TOKENS),
    factor=st.floats(1 / 64, 1),
)
def test_scaling_keeps_which_blocks_are_whole(blocks: list[int], tail: int, factor: float) -> None:
    tokens = max(0, len(blocks) - 1) * MOONCAKE_BLOCK_TOKENS + tail
    trace = Trace(512, (TraceRequest(0.0, tokens, 100, tuple(blocks)),))
    scaled = trace.scaled(factor)
    request = scaled.requests[0]
    assert request.blocks == tuple(blocks)
    if blocks:
        assert math.ceil(request.input_tokens / scaled.block_tokens) in (
            len(blocks),
            len(blocks) - 1,  # a tail of a few tokens may round to none
        )
    assert abs(request.input_tokens - tokens * factor) <= 1 + 0.5 * (len(blocks) + 1)
    assert request.output_tokens == max(1, round(100 * factor))


def test_a_factor_of_one_changes_nothing() -> None:
    trace = load_trace(RECORDED, "mooncake")
    assert trace.scaled(1.0) == trace
