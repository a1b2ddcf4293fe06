"""The keys of two prompts show exactly how far they agree."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from agents.sim.kv_cache import BLOCK_TOKENS
from mesh.sim.workload import HASH_TOKENS, RequestNode, Segment, block_keys, estimate, keys_of

segments = st.lists(
    st.builds(Segment, st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=6
)


def tokens(prompt):
    """The prompt written out: what a token is, is its content and everything before it."""
    return [(name, offset) for name, count in prompt for offset in range(count)]


def agreement(one, other):
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))


@given(segments, segments)
def test_blocks_agree_where_the_segments_written_out_do(one, other):
    # The same tokens in other segments count as other content, so segments must agree, too.
    same = agreement(one, other)
    shared = sum(count for _, count in one[:same])
    if same < min(len(one), len(other)) and one[same].id == other[same].id:
        shared += min(one[same].tokens, other[same].tokens)
    keys, other_keys = block_keys(one), block_keys(other)
    assert agreement(keys, other_keys) == shared // BLOCK_TOKENS


@given(segments)
def test_every_full_block_has_a_key_of_its_own(prompt):
    keys = block_keys(prompt)
    assert len(keys) == len(tokens(prompt)) // BLOCK_TOKENS
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_a_router_sees_every_fourth_key_of_the_prompt_alone():
    asked = RequestNode(prompt=(Segment(1, 100), Segment(2, 100)), answer=Segment(3, 200))
    keys = keys_of(asked)
    assert len(keys.blocks) == 400 // BLOCK_TOKENS
    assert keys.hashes == tuple(keys.blocks[3:12:4])
    assert len(keys.hashes) == 200 // HASH_TOKENS


def test_the_next_turn_begins_with_prompt_and_answer_of_the_last():
    first = RequestNode(prompt=(Segment(1, 64),), answer=Segment(2, 64))
    second = RequestNode(
        prompt=(*first.prompt, first.answer, Segment(3, 64)), answer=Segment(4, 16)
    )
    assert list(keys_of(second).blocks[:8]) == list(keys_of(first).blocks)


def test_an_estimate_is_exact_unless_an_error_is_given():
    assert estimate((1, 2), 150, 0.0, Random(1)).tokens == 150
    guesses = [estimate((1, 2), 1000, 0.2, Random(seed)) for seed in range(200)]
    assert len({guess.tokens for guess in guesses}) > 100
    assert 950 < sorted(guess.tokens for guess in guesses)[100] < 1050
    assert all(abs(guess.uncached_tokens(2) - guess.tokens * 0.872) < 2 for guess in guesses)
