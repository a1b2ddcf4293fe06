"""Counts under the names of Messages, Responses and rerank."""

import json

import pytest

from agents.core.events import NO_USAGE, TokenUsage
from agents.core.usage import read_early_usage, read_usage

START = (
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":3,"output_tokens":1}}}\n\n'
)
DELTA = b'event: content_block_delta\ndata: {"delta":{"text":"event: ping"}}\n\n'
END = b'event: message_delta\ndata: {"usage":{"output_tokens":9}}\n\n'


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (b'{"input_tokens":3,"output_tokens":4}', TokenUsage(3, -1, 4)),
        (b'{"input_tokens":3,"cache_read_input_tokens":5}', TokenUsage(8, 5, -1)),
        (
            b'{"input_tokens":3,"cache_read_input_tokens":5,"cache_creation_input_tokens":2}',
            TokenUsage(10, 5, -1),
        ),
        (
            b'{"input_tokens":9,"input_tokens_details":{"cached_tokens":5},"output_tokens":4}',
            TokenUsage(9, 5, 4),
        ),
        (b'{"total_tokens":7}', TokenUsage(7, -1, -1)),
        (b'{"total_tokens":7,"completion_tokens":3}', TokenUsage(-1, -1, 3)),
        (b'{"input_tokens":-1,"output_tokens":"4"}', NO_USAGE),
    ],
)
def test_counts_by_their_names(usage, counts):
    assert read_usage(b'{"usage":' + usage + b"}") == counts


def test_counts_at_both_ends_are_put_together():
    whole = START + DELTA + END
    early = read_early_usage(whole, streamed=True)
    assert early == TokenUsage(3, -1, 1)
    assert read_usage(whole, streamed=True).or_else(early) == TokenUsage(3, -1, 9)


REAL = {"input_tokens": 30, "output_tokens": 7}
MADE_UP = {"input_tokens": 0, "cache_read_input_tokens": 9, "output_tokens": 0}
# SGLang repeats a request's tools and metadata behind its counts, and a model writes tools' input.
REPEATED = {
    "tools": [{"type": "function", "name": "f", "parameters": {"usage": MADE_UP}}],
    "metadata": {"usage": MADE_UP, "n": [{"usage": MADE_UP}] * 9, "text": 'a "quoted\\" {['},
}
TOOL_USE = {"content": [{"type": "tool_use", "name": "f", "input": {"usage": MADE_UP}}]}


def event(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


@pytest.mark.parametrize(("usage", "counts"), [(REAL, TokenUsage(30, -1, 7)), (None, NO_USAGE)])
def test_what_an_answer_repeats_of_its_request_is_no_count(usage, counts):
    response = {"usage": usage, **REPEATED}
    opening = event("response.created", response={"usage": None, **REPEATED})
    assert read_usage(json.dumps(response).encode()) == counts
    stream = opening + event("response.completed", response=response)
    assert read_usage(stream, streamed=True) == counts
    assert read_usage(stream[-300:], streamed=True) == NO_USAGE  # of the metadata's end alone
    cut = stream + opening[:-10]
    assert read_usage(cut[: cut.rindex(b"}") + 1], streamed=True) == counts


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_a_line_whatever_ends_it(end):
    opening = event("response.created", response={"usage": None, **REPEATED})
    last = event("response.completed", response={"usage": REAL, **REPEATED})
    stream = (opening + last).replace(b"\n", end)
    for whole in (stream, stream.rstrip(), stream + b"data: [DONE]" + 2 * end):
        assert read_usage(whole, streamed=True) == TokenUsage(30, -1, 7)
    early = event("ping", n=[]) + event("message_start", message={**TOOL_USE, "usage": REAL})
    assert read_early_usage(early.replace(b"\n", end), streamed=True) == TokenUsage(30, -1, 7)
    assert read_usage(stream.rstrip()[:-1], streamed=True) == NO_USAGE  # it may be anybody's


def test_what_a_model_writes_for_a_tool_is_no_count():
    message = json.dumps({**TOOL_USE, "usage": {"input_tokens": 30, "output_tokens": 7}}).encode()
    assert read_early_usage(message) == TokenUsage(30, -1, 7)
    assert read_usage(message).or_else(read_early_usage(message)) == TokenUsage(30, -1, 7)
    start = event("message_start", message={**TOOL_USE, "usage": REAL})
    assert read_early_usage(start, streamed=True) == TokenUsage(30, -1, 7)
    assert read_early_usage(json.dumps(TOOL_USE).encode()) == NO_USAGE
