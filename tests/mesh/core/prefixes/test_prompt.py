"""Prompts: equal beginnings have equal hashes, and any JSON is a prompt or a clear error."""

import hashlib
import os
import subprocess
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.prefixes.prompt import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    PromptInvalid,
    TokenRatio,
    block_hashes,
    prompt_text,
)
from schemas.ids import ModelId

MODEL = ModelId("org/model")


def hashes(text, key="k", model=MODEL):
    return block_hashes(text, key=key, model=model)


def common(left, right):
    """How many leading items are equal."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


BLOCKS = st.lists(st.sampled_from([b"a", b"b"]), max_size=6).map(
    lambda letters: b"".join(letter * BLOCK_BYTES for letter in letters)
)


@given(BLOCKS, BLOCKS, st.binary(max_size=BLOCK_BYTES - 1))
def test_leading_hashes_are_equal_exactly_as_far_as_the_texts_are(left, right, tail):
    ours, theirs = hashes(left + tail), hashes(right)
    assert (len(ours), len(theirs)) == (len(left) // BLOCK_BYTES, len(right) // BLOCK_BYTES)
    for end, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (left[: end * BLOCK_BYTES] == right[: end * BLOCK_BYTES])


def test_one_block_later_every_hash_is_another():
    text = bytes(range(256)) * 4
    assert not set(hashes(text)) & set(hashes(b"x" * BLOCK_BYTES + text))


def test_without_the_key_or_the_model_nothing_matches():
    text = b"x" * BLOCK_BYTES * 3
    mine = hashes(text)
    assert common(mine, hashes(text, key="other")) == 0
    assert common(mine, hashes(text, model=ModelId("other"))) == 0
    assert common(mine, hashes(text)) is None


def test_tenants_of_different_salts_share_nothing():
    text = b"x" * BLOCK_BYTES * 3
    salted = block_hashes(text, key="k", model=MODEL, salt="a")
    assert common(hashes(text), salted) == 0
    assert common(block_hashes(text, key="k", model=MODEL, salt="b"), salted) == 0
    assert common(block_hashes(text, key="k", model=MODEL, salt="a"), salted) is None


def test_what_lies_beyond_the_limit_is_left_out():
    text = b"x" * BLOCK_BYTES * (BLOCKS_MAX + 2)
    assert len(hashes(text)) == BLOCKS_MAX
    assert len(set(hashes(text))) == BLOCKS_MAX


def test_hashes_are_the_same_in_every_process():
    code = (
        "from mesh.core.prefixes.prompt import block_hashes\n"
        f"print(*block_hashes(b'x' * {3 * BLOCK_BYTES}, key='k', model='org/model'))"
    )
    seen = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        seen.add(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))
    assert seen == {" ".join(map(str, hashes(b"x" * 3 * BLOCK_BYTES))) + "\n"}


def turn(role, content):
    return {"role": role, "content": content}


def test_a_chat_that_goes_on_keeps_its_beginning():
    first = [turn("system", "be kind"), turn("user", "hello")]
    later = [*first, turn("assistant", "hi"), turn("user", "and now?")]
    before = prompt_text({"messages": first}, chat=True)
    assert prompt_text({"messages": later}, chat=True).startswith(before)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (turn("user", "a"), turn("system", "a")),
        (turn("user", "a"), turn("user", "b")),
        (turn("user", [{"type": "text", "text": "a"}]), turn("user", [{"image_url": "a"}])),
        (turn("user", [{"image_url": "a"}]), turn("user", [{"image_url": "b"}])),
    ],
)
def test_different_messages_are_different_texts(left, right):
    texts = {prompt_text({"messages": [message]}, chat=True) for message in (left, right)}
    assert len(texts) == 2


def test_parts_of_text_count_as_their_text():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = prompt_text({"messages": [turn("user", "hello")]}, chat=True)
    assert prompt_text({"messages": [turn("user", parts)]}, chat=True) == whole


def test_completions_take_text_texts_and_token_ids():
    texts = [prompt_text({"prompt": p}, chat=False) for p in ("ab", ["a", "b"], ["ab"], [1, 2])]
    assert texts[0] == b"ab"
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("body", "chat", "param", "says"),
    [
        ({}, True, "messages", "non-empty array"),
        ({"messages": []}, True, "messages", "non-empty array"),
        ({"messages": "hi"}, True, "messages", "non-empty array"),
        (
            {"messages": [turn("user", "a"), 7]},
            True,
            "messages",
            r"messages\[1\] must be an object",
        ),
        ({"messages": [turn("user", 7)]}, True, "messages", r"messages\[0\]\.content must be"),
        ({}, False, "prompt", "string or a non-empty array"),
        ({"prompt": []}, False, "prompt", "string or a non-empty array"),
        ({"prompt": {"a": 1}}, False, "prompt", "string or a non-empty array"),
    ],
)
def test_a_prompt_that_is_none_is_named(body, chat, param, says):
    with pytest.raises(PromptInvalid, match=says) as caught:
        prompt_text(body, chat=chat)
    assert caught.value.param == param


def nested(depth):
    return orjson.loads(b"[" * depth + b"]" * depth)


@pytest.mark.parametrize(
    ("make", "chat"),
    [
        (lambda deep: {"messages": [turn("user", [deep])]}, True),
        (lambda deep: {"messages": [turn(deep, "hello")]}, True),
        (lambda deep: {"prompt": [deep]}, False),
    ],
)
def test_any_depth_that_json_allows_is_read_or_refused(make, chat):
    deepest = 1000  # near what the JSON parser takes, and beyond what Python prints
    with pytest.raises(PromptInvalid, match="nested too deeply"):
        prompt_text(make(nested(deepest)), chat=chat)
    assert prompt_text(make(nested(20)), chat=chat)


WORDS = st.text(alphabet="ab\x00é中", max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1.0, 1.0) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON}) | JSON
BODY = st.fixed_dictionaries(
    {}, optional={"messages": st.lists(MESSAGE, max_size=3) | JSON, "prompt": JSON}
)


@given(BODY, st.booleans())
def test_any_json_is_a_prompt_or_a_clear_error(body, chat):
    try:
        text = prompt_text(body, chat=chat)
    except PromptInvalid as error:
        assert error.param in ("messages", "prompt")
        return
    assert isinstance(text, bytes)
    assert prompt_text(orjson.loads(orjson.dumps(body)), chat=chat) == text


def test_the_token_ratio_learns():
    ratio = TokenRatio()
    assert ratio.tokens(400) == 100
    for _ in range(200):
        ratio.observe(200, 100)
    assert ratio.tokens(400) == pytest.approx(200, rel=0.01)


@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))))
def test_the_token_ratio_stays_in_bounds_whatever_it_is_told(observations):
    ratio = TokenRatio()
    for text_bytes, prompt_tokens in observations:
        ratio.observe(text_bytes, prompt_tokens)
    assert 6400 / 64 <= ratio.tokens(6400) <= 6400 / 0.25
    assert ratio.tokens(0) == 1


def test_a_hash_is_keyed_blake2b_of_the_model_and_all_text_so_far():
    """As anyone may compute who has the secret, and nobody else."""
    text = b"a" * BLOCK_BYTES + b"b" * BLOCK_BYTES
    secret = hashlib.sha256(b"k").digest()
    whole = hashlib.blake2b(b"org/model\x00\x00" + text, key=secret, digest_size=8).digest()
    assert hashes(text)[1] == int.from_bytes(whole)
    assert not set(hashes(text)) & set(hashes(text, key="other"))


def test_prompts_of_different_tenants_share_nothing_and_no_salt_is_taken_for_a_tenant():
    text = b"a" * 4 * BLOCK_BYTES

    def of(tenant, salt=""):
        return block_hashes(text, key="k", model=MODEL, salt=salt, tenant=tenant)

    assert of("acme") == of("acme")
    others = [of(""), of("acme"), of("beta"), of("acme", "s"), of("", "s"), of("", "acme")]
    others += [of("", "\x00acme"), of("", "acme\x00"), of("", "s\x00acme")]
    firsts = {hashes[0] for hashes in others}
    assert len(firsts) == len(others)
    assert of("") == block_hashes(text, key="k", model=MODEL), "as before there were tenants"
