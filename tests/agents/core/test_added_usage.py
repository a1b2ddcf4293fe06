"""The event that no client asked for is taken out of any stream, however it is cut into chunks,
and every other byte goes on in its order."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.stream_errors import EVENT_BYTES_MAX
from agents.core.usage import UsageEventRemoval, with_usage_requested

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
EVENT = b"data: %s" % json.dumps({"id": "1", "choices": [], "usage": USAGE}).encode()
DENSE = b'data: {"choices":[],"usage":{"prompt_tokens":7}}'
DONE = b"data: [DONE]"
OTHERS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}',
    b'data: {"choices":[{"delta":{"content":"b"}}],"usage":null}',
    b'data: {"choices":[{"delta":{"content":"\\"choices\\":[],\\"usage\\":{}"}}]}',
    b'data: {"choices":[],"prompt_filter_results":[]}',
    b'data: {"choices":[],"usage":null}',
    b'data: {"choices":[],"usage":{},"error":{"message":"out of memory"}}',
    b'data: {"choices": [',
    b'data: {"usage":{"prompt_tokens":1},"choices":[{"index":0}],"more":{"choices":[]}}',
    b": ping",
    b"event: error\ndata: {}",
    b"id: 3",
    b"d",
]
ENDS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])


def passed(stream: bytes, cuts: list[int]) -> bytes:
    removal = UsageEventRemoval()
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[begin:end] for begin, end in pairwise(ends)]
    return b"".join([*map(removal.without_event, chunks), removal.rest()])


@given(
    st.lists(st.sampled_from(OTHERS), max_size=4),
    st.sampled_from([EVENT, DENSE, b""]),
    st.lists(st.sampled_from([*OTHERS, DONE]), max_size=2),
    ENDS,
    st.lists(st.integers(0, 600), max_size=12),
)
def test_the_stream_is_what_it_would_have_been(before, event, after, end, cuts) -> None:
    parts = [part + end for part in before], [part + end for part in after]
    stream = b"".join([*parts[0], event and event + end, *parts[1]])
    assert passed(stream, cuts) == b"".join(parts[0] + parts[1])


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_other_bytes_pass(stream, cuts) -> None:
    assert passed(stream, cuts) == stream


@given(st.sampled_from([EVENT, DENSE, DONE]), st.integers(0, 80))
def test_what_is_left_of_a_stream_that_breaks_is_passed(event, size) -> None:
    stream = OTHERS[0] + b"\n\n" + event[:size]
    assert passed(stream, [5, len(stream) - 1]) == stream


def test_one_event_is_taken_out() -> None:
    assert passed((DENSE + b"\n\n") * 3, []) == (DENSE + b"\n\n") * 2


@pytest.mark.parametrize(
    ("begin", "held"),
    [
        (b'data: {"choices":[{"delta"', False),
        (b'data: {"id":"1","model":"m","choi', True),
        (b'data: {"choices":[', True),
        (b"da", True),
        (b": pi", False),
        (b"data: " + b"x" * EVENT_BYTES_MAX, False),
    ],
)
def test_only_the_beginning_of_a_likely_event_is_held_back(begin, held) -> None:
    removal = UsageEventRemoval()
    whole = OTHERS[0] + b"\n\n"
    assert removal.without_event(whole + begin) == (whole if held else whole + begin)
    assert removal.without_event(b'"}\n\n') == (begin * held) + b'"}\n\n'


@pytest.mark.parametrize("options", [b"", b'"stream_options":null,', b'"stream_options":{"a":{}},'])
@pytest.mark.parametrize("body", [b'{%b"model":"m"}', b' \n{ %b"stream":true, "prompt":"}" }\n'])
def test_the_rest_of_a_body_stays_as_it_is(body, options) -> None:
    asked = with_usage_requested(body % options)
    assert json.loads(asked) == {
        **json.loads(body % options),
        "stream_options": {"include_usage": True},
    }
    kept = asked.removesuffix(b',"stream_options":{"include_usage":true}}')
    assert kept + b"}" == (body % options).strip()


@pytest.mark.parametrize("body", [b"", b"[1]", b'"a"'])
def test_a_body_that_is_no_object_is_the_engines_to_refuse(body) -> None:
    assert with_usage_requested(body) == body
