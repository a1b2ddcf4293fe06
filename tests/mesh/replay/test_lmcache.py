"""Full texts in, requests out whose ids show what the texts share."""

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.trace import TraceError
from mesh.replay.trace_formats import LMCACHE_BLOCK_BYTES, load_trace, parse_lmcache

GOOD = {"timestamp": 1_760_587_752_017_385, "input": "a" * 300, "output": "b", "session_id": "s"}


def line(**changes: object) -> bytes:
    return orjson.dumps(GOOD | changes)


def shared_blocks(one: str, other: str) -> int:
    first, second = parse_lmcache([line(input=one), line(input=other)]).requests
    pairs = zip(first.blocks, second.blocks, strict=False)
    return sum(1 for left, right in pairs if left == right)


def test_a_line_becomes_a_request() -> None:
    request = parse_lmcache([line()]).requests[0]
    assert request.at_s == pytest.approx(1_760_587_752.017385)
    assert (request.input_tokens, request.output_tokens) == (75, 1)
    assert (len(request.blocks), request.session) == (4, "s")


@given(
    common=st.text(max_size=900), one=st.text(max_size=300), other=st.text(min_size=1, max_size=300)
)
def test_texts_share_just_the_blocks_of_their_common_beginning(
    common: str, one: str, other: str
) -> None:
    left, right = (common + one).encode(), (common + other).encode()
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    assert shared_blocks(common + one, common + other) == same // LMCACHE_BLOCK_BYTES


def test_the_recorded_sessions_share_within_themselves() -> None:
    trace = load_trace(Path("tests/data/lmcache/taubench"), "lmcache")
    seen: set[tuple[str, int]] = set()
    hits = blocks = 0
    for request in trace.requests:
        keys = {(request.session, block) for block in request.blocks}
        hits += len(keys & seen)
        blocks += len(keys)
        seen |= keys
    assert hits / blocks > 0.5


def test_an_empty_prompt_is_one_token() -> None:
    request = parse_lmcache([line(input="", output="")]).requests[0]
    assert (request.input_tokens, request.output_tokens, request.blocks) == (1, 0, ())


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (line(timestamp=1.5), "timestamp must be a whole number"),
        (line(input=None), "input must be a text"),
        (line(output=3), "output must be a text"),
        (line(session_id=""), "session_id must have at least 1 character"),
        (b"[]", "not a JSON object"),
    ],
)
def test_a_damaged_line_is_named(bad: bytes, problem: str) -> None:
    with pytest.raises(TraceError, match=f"line 2: {problem}"):
        parse_lmcache([line(), bad])
