"""A streamed answer's bytes, however they are cut, end in the right verdict."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.client import LINE_BYTES_MAX, ChatStream, StreamFault
from mesh.replay.tally import RecordedUsage

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"word "},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":64}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
WHOLE = ROLE + WORD * 3 + STOP + USAGE + DONE


def read(*parts: bytes) -> ChatStream:
    stream = ChatStream()
    for now, part in enumerate(parts):
        stream.feed(part, float(now))
    return stream


def test_times_are_those_of_content_only() -> None:
    stream = read(b": hello\n\n", ROLE, WORD, b"", WORD, WORD, STOP, USAGE, DONE)
    assert stream.fault is None
    assert stream.first_content_s == 2.0
    assert list(stream.gaps_s) == [2.0, 1.0]
    assert stream.usage == RecordedUsage(prompt_tokens=90, output_tokens=3, cached_tokens=64)


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=8).map(sorted), crlf=st.booleans())
def test_where_the_network_cuts_does_not_matter(cuts: list[int], crlf: bool) -> None:
    data = WHOLE.replace(b"\n", b"\r\n") if crlf else WHOLE
    edges = [0, *cuts, len(data)]
    stream = read(*(data[a:b] for a, b in pairwise(edges)))
    assert stream.fault is None
    assert stream.usage == RecordedUsage(90, 3, 64)
    assert len(stream.gaps_s) == 2


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (WHOLE, None),
        (WHOLE.replace(b"data: ", b"data:"), None),
        (WORD + STOP + DONE, None),
        (b"", StreamFault.TRUNCATED),
        (ROLE + WORD, StreamFault.TRUNCATED),
        (ROLE + WORD + STOP, StreamFault.TRUNCATED),
        (ROLE + WORD + DONE, StreamFault.TRUNCATED),
        (WHOLE.removesuffix(b"]\n\n"), StreamFault.TRUNCATED),
        (WORD + b'data: {"error":{"message":"engine lost"}}\n\n' + DONE, StreamFault.ERROR_EVENT),
        (WORD + b"event: error\ndata: {}\n\n", StreamFault.ERROR_EVENT),
        (WORD + b'data: {"choices": [\n\n' + DONE, StreamFault.BAD_STREAM),
        (WORD + b"data: 7\n\n" + DONE, StreamFault.BAD_STREAM),
        (b'data: {"choices":[3]}\n\n', StreamFault.BAD_STREAM),
        (b'data: {"choices":[],"usage":{"prompt_tokens":"many"}}\n\n', StreamFault.BAD_STREAM),
        (b"x" * (LINE_BYTES_MAX + 1), StreamFault.BAD_STREAM),
    ],
)
def test_the_verdict(body: bytes, fault: StreamFault | None) -> None:
    assert read(body).fault == fault


def test_an_engine_that_names_no_cached_tokens_is_not_one_that_cached_none() -> None:
    stream = read(b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n')
    assert stream.usage == RecordedUsage(9, 1, None)


def test_thinking_and_tool_calls_are_content() -> None:
    stream = read(
        b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
    )
    assert stream.first_content_s == 0.0
    assert list(stream.gaps_s) == [1.0]
