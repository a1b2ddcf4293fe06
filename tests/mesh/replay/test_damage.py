"""A parser of any damaged file gives a sound trace or one error with its place."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.replay.trace import Trace, TraceError
from mesh.replay.trace_formats import FORMATS, parse_kv_cache_tester
from tests.mesh.replay.damage import damaged

DATA = Path("tests/data")
SLICES = {
    "mooncake": DATA / "mooncake" / "conversation_first60.jsonl",
    "azure": DATA / "azure" / "conv_first60.csv",
    "lmcache": DATA / "lmcache" / "taubench" / "4f619f153313f676f839cd4afd8228d5.jsonl",
}
LINES = {name: path.read_bytes().splitlines(keepends=True)[:6] for name, path in SLICES.items()}
SESSIONS = (DATA / "kv-cache-tester" / "four_sessions.jsonl").read_bytes().splitlines()[:3]


def sound(trace: Trace) -> bool:
    times = [request.at_s for request in trace.requests]
    return (
        len(times) > 0
        and times == sorted(times)
        and all(request.input_tokens >= 1 <= trace.block_tokens for request in trace.requests)
        and all(
            (len(request.blocks) - 1) * trace.block_tokens < request.input_tokens
            for request in trace.requests
        )
    )


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_trace_is_sound_or_refused_by_line(name: str, data: st.DataObject) -> None:
    parse: Callable[[Iterable[bytes]], Trace] = FORMATS[name]
    lines = data.draw(damaged(LINES[name]))
    try:
        trace = parse(lines)
    except TraceError as error:
        assert "line " in str(error) or str(error) == "holds no request"
    else:
        assert sound(trace)


@settings(max_examples=150)
@given(lines=damaged(SESSIONS))
def test_damaged_sessions_are_sound_or_refused_by_line(lines: list[bytes]) -> None:
    try:
        sessions = parse_kv_cache_tester(lines)
    except TraceError as error:
        assert "line " in str(error) or str(error) == "holds no session"
        return
    for session in sessions:
        times = [turn.at_s for turn in session.turns]
        assert times == sorted(times)
        for turn in session.turns:
            blocks = sum(count for _, count in turn.ranges)
            assert blocks * session.block_tokens <= turn.input_tokens
            assert turn.think_s >= 0
