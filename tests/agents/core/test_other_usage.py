"""Counts under the names of Messages, Responses and rerank."""

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
    assert read_early_usage(whole) == TokenUsage(3, -1, 1)
    assert read_usage(whole).or_else(read_early_usage(whole)) == TokenUsage(3, -1, 9)
