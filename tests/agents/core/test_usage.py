"""Usage is found at the end of any answer, and never inside what a model wrote."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.events import NO_USAGE, TokenUsage
from agents.core.usage import read_usage

FULL = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 8},
}


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (json.dumps({"usage": FULL}).encode(), TokenUsage(10, 8, 3)),
        (
            b'data: {"usage":null}\n\ndata: {"usage" : {"prompt_tokens":5}}\n\ndata: [DONE]\n\n',
            TokenUsage(5, -1, -1),
        ),
        (
            b'data: {"usage": {"prompt_tokens": 4}}\n\ndata: {"usage":null}\n\n',
            TokenUsage(4, -1, -1),
        ),
        (b'{"usage": {"prompt_tokens": 4, "prompt_tokens_details": null}}', TokenUsage(4, -1, -1)),
        (b'{"usage": {"prompt_tokens": "4", "completion_tokens": -2}}', NO_USAGE),
        (b'{"usage": {"prompt_tokens": true}}', NO_USAGE),
        (b'{"usage": {"prompt_tokens": 0, "completion_tokens": 0}}', NO_USAGE),  # not counted
        (b'{"usage": {"prompt_tokens": 4, "completion_tokens": 0}}', TokenUsage(4, -1, 0)),
        (b'{"usage": {"output_tokens": 0}}', TokenUsage(-1, -1, 0)),  # the prompt's came before
        (b'{"usage": {"prompt_tokens": 1%s}}' % (b"0" * 40), NO_USAGE),
        (b'{"usage": {"prompt_tokens": 1%s}}' % (b"0" * 9000), NO_USAGE),
        (b'ted": 1}, "usage": {"prompt_tok', NO_USAGE),
        (b'{"usage": "none"}', NO_USAGE),
        (b'{"content": "usage"}', NO_USAGE),
        (b'{"timings":{"cache_n":24,"prompt_n":1,"predicted_n":3}}\n\n', TokenUsage(25, 24, 3)),
        (b'{"timings":{"prompt_n":1,"predicted_n":3}}', TokenUsage(-1, -1, 3)),  # an older one
        (b'{"usage":{"prompt_tokens":9},"timings":{"prompt_n":1}}', TokenUsage(9, -1, -1)),
        (b"", NO_USAGE),
        (b"\xff\xfe" * 100, NO_USAGE),
        (b'"usage":' + b"[" * 100_000, NO_USAGE),
        (b'"usage":' + b'{"a":' * 100_000, NO_USAGE),
    ],
)
def test_tails(tail, usage) -> None:
    assert read_usage(tail) == usage


@given(st.text(), st.sampled_from([json.dumps, lambda v: json.dumps(v, ensure_ascii=False)]))
def test_a_text_that_looks_like_usage_is_not_read(text, dump) -> None:
    spoof = text + '"usage": {"prompt_tokens": 999}'
    assert read_usage(dump({"choices": [{"text": spoof}]}).encode()) == NO_USAGE


@given(st.binary(max_size=400))
def test_any_bytes_are_survived(data) -> None:
    read_usage(b'"usage"' + data)
