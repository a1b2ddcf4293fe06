"""Same ids, same bytes; different ids, different bytes; the requested length."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.prompt_text import Prompts
from mesh.replay.trace import TraceRequest

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 4
ids = st.lists(st.integers(0, 5), max_size=6)


def request(blocks: list[int], tokens: int | None = None) -> TraceRequest:
    whole = max(1, len(blocks) * BLOCK_TOKENS)
    return TraceRequest(0.0, whole if tokens is None else tokens, 1, tuple(blocks))


def common(first: list[int] | str, second: list[int] | str) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(first=ids, second=ids)
def test_two_prompts_share_as_many_leading_blocks_as_in_the_trace(
    first: list[int], second: list[int]
) -> None:
    one, other = Prompts(BLOCK_TOKENS), Prompts(BLOCK_TOKENS)
    texts = one.text(request(first), 0), other.text(request(second), 1)
    if first and second:
        assert common(*texts) // BLOCK_BYTES == common(first, second)


@given(blocks=ids, tokens=st.integers(1, 200), ratio=st.floats(2, 8))
def test_a_prompt_has_the_requested_length(blocks: list[int], tokens: int, ratio: float) -> None:
    text = Prompts(BLOCK_TOKENS, ratio).text(request(blocks, tokens), 0)
    assert len(text) == max(1, round(tokens * ratio))
    assert text.isascii()


def test_the_last_block_is_cut_and_an_uncovered_rest_is_the_requests_own() -> None:
    prompts = Prompts(BLOCK_TOKENS)
    whole = prompts.text(request([1, 2]), 0)
    assert prompts.text(request([1, 2], 20), 0) == whole[: 20 * 4]
    mine = prompts.text(request([1, 2], 40), 0)
    yours = prompts.text(request([1, 2], 40), 1)
    assert mine[: len(whole)] == yours[: len(whole)] == whole
    assert mine != yours


def test_a_salt_makes_all_texts_new() -> None:
    plain, salted = Prompts(BLOCK_TOKENS), Prompts(BLOCK_TOKENS, salt="monday")
    assert common(plain.text(request([7]), 0), salted.text(request([7]), 0)) < BLOCK_BYTES


def test_a_text_is_the_same_in_every_version() -> None:
    assert Prompts(BLOCK_TOKENS).text(request([0], 5), 0) == "one let him was lot "


def test_blocks_too_short_to_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="scale lengths down less"):
        Prompts(4)
