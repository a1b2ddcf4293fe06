"""Equal text makes equal tokens, in every turn of a chat."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.sim.kv_cache import block_keys
from agents.sim.text import (
    LengthOptions,
    Role,
    answer,
    chat_tokens,
    count,
    id_tokens,
    text_tokens,
)


@given(prefix=st.text(), one=st.text(), other=st.text())
def test_equal_prefixes_of_text_are_equal_prefixes_of_tokens(prefix, one, other):
    whole = len(prefix.encode("utf-8", "replace")) // 4 * 4
    assert text_tokens(prefix + one)[:whole] == text_tokens(prefix + other)[:whole]


@given(st.text())
def test_a_token_is_four_bytes(text):
    tokens = text_tokens(text)
    assert count(tokens) == -(-len(text.encode("utf-8", "replace")) // 4)
    assert tokens.rstrip(b"\0") == text.encode("utf-8", "replace").rstrip(b"\0")


@given(text=st.text(), seed=st.integers(0, 100))
def test_an_answer_sent_back_continues_the_sequence_it_ended(text, seed):
    history = [("system", "be brief"), ("user", text)]
    prompt = chat_tokens(history)
    said = answer(prompt, LengthOptions(room=500), seed).text
    following = chat_tokens([*history, ("assistant", said), ("user", "and then?")])
    assert following.startswith(prompt + said.encode())


@given(st.lists(st.tuples(st.sampled_from(get_args(Role)), st.text()), max_size=4))
def test_no_text_can_forge_a_marker(messages):
    markers = [token for token in chunks(chat_tokens(messages)) if token[0] == 0xFF]
    assert len(markers) == 2 * len(messages) + 1


def chunks(tokens: bytes) -> list[bytes]:
    return [tokens[at : at + 4] for at in range(0, len(tokens), 4)]


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_a_text_and_its_token_ids_are_the_same_prompt(text):
    tokens = text_tokens(text)
    ids = [int.from_bytes(token, "little") for token in chunks(tokens)]
    assert id_tokens(ids) == tokens


def test_a_token_id_out_of_range_is_an_error():
    with pytest.raises(OverflowError):
        id_tokens([2**32])
    with pytest.raises(OverflowError):
        id_tokens([-1])


def test_block_keys_chain():
    a, b = bytes(64), bytes(range(64))
    assert block_keys(a + b, 64)[0] == block_keys(a, 64)[0]
    assert block_keys(a + b, 64)[1] != block_keys(b + b, 64)[1], "same block, other past"
    assert len(block_keys(a + b + b"tail", 64)) == 2
    assert len(set(block_keys(a * 5, 64))) == 5


def test_block_keys_are_the_same_in_every_process():
    assert block_keys(b"abcd" * 16, 64) == [15465116795578995478]
