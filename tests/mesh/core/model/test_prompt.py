"""Prompts: equal beginnings have equal hashes, and any JSON is a prompt or a clear error."""

import hashlib
import os
import subprocess
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.prompt import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    PromptInvalid,
    PromptText,
    TextSize,
    TokenEstimate,
    TokenRatio,
    block_hashes,
    prompt_text,
)
from schemas.ids import ModelId

MODEL = ModelId("org/model")


def text_of(body, *, chat):
    """The bytes of a prompt."""
    return prompt_text(body, chat=chat).data


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
        "from mesh.core.model.prompt import block_hashes\n"
        f"print(*block_hashes(b'x' * {3 * BLOCK_BYTES}, key='k', model='org/model'))"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}  # this process has another one
    told = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    assert told.split() == [*map(str, hashes(b"x" * 3 * BLOCK_BYTES))]


def turn(role, content):
    return {"role": role, "content": content}


def test_a_chat_that_goes_on_keeps_its_beginning():
    first = [turn("system", "be kind"), turn("user", "hello")]
    later = [*first, turn("assistant", "hi"), turn("user", "and now?")]
    before = text_of({"messages": first}, chat=True)
    assert text_of({"messages": later}, chat=True).startswith(before)


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
    texts = {text_of({"messages": [message]}, chat=True) for message in (left, right)}
    assert len(texts) == 2


def test_parts_of_text_count_as_their_text():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = text_of({"messages": [turn("user", "hello")]}, chat=True)
    assert text_of({"messages": [turn("user", parts)]}, chat=True) == whole


def test_completions_take_text_texts_and_token_ids():
    texts = [text_of({"prompt": p}, chat=False) for p in ("ab", ["a", "b"], ["ab"], [1, 2])]
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
        text_of(body, chat=chat)
    assert caught.value.param == param


def nested(depth):
    return orjson.loads(b"[" * depth + b"]" * depth)


@pytest.mark.parametrize(
    ("make", "chat"),
    [
        (lambda deep: {"messages": [turn("user", [deep])]}, True),
        (lambda deep: {"messages": [turn("user", [{"image_url": deep}])]}, True),
        (lambda deep: {"messages": [turn("user", "a")], "tools": deep}, True),
        (lambda deep: {"messages": [turn("user", "a") | {"tool_calls": deep}]}, True),
        (lambda deep: {"prompt": "a", "response_format": deep}, False),
        (lambda deep: {"messages": [turn(deep, "hello")]}, True),
        (lambda deep: {"prompt": [deep]}, False),
    ],
)
def test_any_depth_that_json_allows_is_read_or_refused(make, chat):
    deepest = 1000  # near what the JSON parser takes, and beyond what Python prints
    with pytest.raises(PromptInvalid, match="nested too deeply"):
        text_of(make(nested(deepest)), chat=chat)
    assert text_of(make(nested(20)), chat=chat)


WORDS = st.text(alphabet="ab\x00é中", max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1.0, 1.0) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON}) | JSON
PART = st.dictionaries(
    st.sampled_from(("type", "text", "image_url", "input_audio", "file", "detail")),
    st.sampled_from(("image_url", "input_audio", "file", "text", "low")) | JSON,
    max_size=4,
)
PARTS = st.fixed_dictionaries({"content": st.lists(PART, max_size=3)})
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE | PARTS, max_size=3) | JSON,
        "prompt": JSON,
        "tools": JSON,
        "response_format": JSON,
    },
)


@given(BODY, st.booleans())
def test_any_json_is_a_prompt_or_a_clear_error(body, chat):
    try:
        text = text_of(body, chat=chat)
    except PromptInvalid as error:
        assert error.param in ("messages", "prompt", "tools", "response_format")
        return
    assert isinstance(text, bytes)
    assert text_of(orjson.loads(orjson.dumps(body)), chat=chat) == text


def test_the_token_ratio_learns():
    ratio = TokenRatio()
    assert ratio.tokens(400) == 100
    for _ in range(200):
        ratio.observe(200, 100)
    assert ratio.tokens(400) == pytest.approx(200, rel=0.01)


@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))))
def test_the_token_ratio_stays_in_bounds_for_any_observation(observations):
    ratio = TokenRatio()
    for text_bytes, prompt_tokens in observations:
        ratio.observe(text_bytes, prompt_tokens)
    assert 6400 / 64 <= ratio.tokens(6400) <= 6400 / 0.25
    assert ratio.tokens(0) == 1


def test_a_hash_is_keyed_blake2b_of_the_model_and_all_text_so_far():
    """As the secret alone allows to compute them."""
    text = b"a" * BLOCK_BYTES + b"b" * BLOCK_BYTES
    secret = hashlib.sha256(b"k").digest()
    whole = hashlib.blake2b(b"org/model\x00\x00" + text, key=secret, digest_size=8).digest()
    assert hashes(text)[1] == int.from_bytes(whole)
    assert not set(hashes(text)) & set(hashes(text, key="other"))


def image(url, **fields):
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def said(text):
    return {"type": "text", "text": text}


def seen(*parts, estimate=None, **fields):
    """The prompt of a message with these parts."""
    text = prompt_text({"messages": [turn("user", list(parts))], **fields}, chat=True)
    return (estimate or TokenEstimate()).prompt(text, hashes(text.data))


DATA = "data:image/png;base64," + "iVBORw0KGgo" * 30_000  # 0.3 MB
OTHER = DATA[:-1] + "x"


def test_an_image_counts_as_an_image_and_not_by_its_length():
    assert 450 <= seen(said("what is this?"), image(DATA)).tokens <= 600
    assert seen(image(DATA)).tokens == seen(image("https://example.com/a.png")).tokens
    assert seen(image(DATA), image(DATA)).tokens == pytest.approx(1024, abs=10)
    assert seen(image(DATA, detail="low")).tokens == pytest.approx(85, abs=5)


def test_equal_images_are_equal_prefixes_and_others_are_not():
    intro, question = said("x" * 3 * BLOCK_BYTES), said("y" * 3 * BLOCK_BYTES)
    whole = seen(intro, image(DATA), question).hashes
    assert common(whole, seen(intro, image(DATA), said("z" * BLOCK_BYTES * 3)).hashes) == 11
    assert common(whole, seen(intro, image(OTHER), question).hashes) == 3
    assert common(whole, seen(intro, image("https://example.com/a.png"), question).hashes) == 3
    low = seen(intro, image(DATA, detail="low"), question).hashes
    assert common(whole, low) == 3


def test_an_image_alone_is_a_prefix_of_what_follows_it():
    first = [turn("user", [image(DATA), said("what is this?")])]
    later = [*first, turn("assistant", "a cat"), turn("user", [said("and "), image(DATA)])]
    before, after = (prompt_text({"messages": chat}, chat=True).data for chat in (first, later))
    assert after.startswith(before) and len(hashes(before)) >= 8


def test_blocks_of_a_prompt_with_images_stand_for_its_tokens():
    """Whatever an image weighs: what is held before it, with it and behind it adds up."""
    estimate = TokenEstimate()
    text = prompt_text({"messages": [turn("user", [image(DATA)])]}, chat=True)
    for _ in range(50):
        estimate.observe(text.size, 2004)
    prompt = seen(said("x" * 1100), image(DATA), said("y" * 1100), estimate=estimate)
    tokens = [prompt.held_tokens(blocks) for blocks in range(len(prompt.hashes) + 1)]
    assert tokens[:5] == [0, 64, 128, 192, 256]
    assert tokens == sorted(tokens)
    assert tokens[13] == pytest.approx(2000 + 13 * 64 - 512, abs=10)  # the image ends in block 13
    assert prompt.tokens == pytest.approx(2000 + 2 * 1100 / 4, abs=10)
    assert prompt.uncached_tokens(len(prompt.hashes)) <= 64


def test_images_teach_their_own_tokens_and_never_the_ratio_of_texts():
    estimate = TokenEstimate()
    size = prompt_text({"messages": [turn("user", [image(DATA), said("hi")])]}, chat=True).size
    for _ in range(20):
        estimate.observe(size, 1502)
    assert seen(image(DATA), estimate=estimate).tokens == pytest.approx(1500, abs=20)
    assert seen(image(DATA, detail="low"), estimate=estimate).tokens == pytest.approx(85, abs=5)
    plain = PromptText(b"x" * 4000)
    assert estimate.prompt(plain, ()).tokens == 1000


@given(st.lists(st.integers(-(2**70), 2**70)), st.integers(1, 4))
def test_what_an_image_weighs_stays_in_bounds_whatever_is_reported(reported, count):
    estimate = TokenEstimate()
    text = prompt_text({"messages": [turn("user", [image("a")] * count)]}, chat=True)
    for prompt_tokens in reported:
        estimate.observe(text.size, prompt_tokens)
    assert 1 <= estimate.prompt(text, ()).tokens <= 65_536 * count + 10


def test_more_parts_than_blocks_are_refused():
    parts = [image("a")] * 1024
    assert prompt_text({"messages": [turn("user", parts)]}, chat=True).size.text_bytes == 6
    with pytest.raises(PromptInvalid, match="more than 1024 images") as caught:
        prompt_text({"messages": [turn("user", [*parts, image("a")])]}, chat=True)
    assert caught.value.param == "messages"


def test_tools_count_and_come_first():
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 2000}}]
    hello, other = ([turn("user", word * 300)] for word in ("a", "b"))
    bare = text_of({"messages": hello}, chat=True)
    ours = text_of({"messages": hello, "tools": tools}, chat=True)
    theirs = text_of({"messages": other, "tools": tools}, chat=True)
    assert ours.endswith(bare) and len(ours) - len(bare) > 2000
    assert common(hashes(ours), hashes(theirs)) == len(ours) // BLOCK_BYTES - 1
    renamed = [{"type": "function", "function": {"name": "g", "description": "d" * 2000}}]
    assert (
        common(hashes(ours), hashes(text_of({"messages": hello, "tools": renamed}, chat=True))) == 0
    )
    assert text_of({"messages": hello, "tools": None}, chat=True) == bare


def test_calls_of_tools_are_part_of_the_conversation():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bare = text_of({"messages": [turn("assistant", None)]}, chat=True)
    calling = text_of({"messages": [turn("assistant", None) | {"tool_calls": [call]}]}, chat=True)
    assert len(calling) > len(bare) + 50


@pytest.mark.parametrize("chat", [True, False])
def test_a_response_format_counts_at_the_end_and_teaches_nothing(chat):
    """Few engines put it into the prompt, so equal messages still match."""
    body = {"messages": [turn("user", "a" * 600)], "prompt": "a" * 600}
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    bare, asked = (
        text_of(body, chat=chat),
        prompt_text(body | {"response_format": schema}, chat=chat),
    )
    assert asked.data.startswith(bare) and len(asked.data) > len(bare) + 50
    estimate = TokenEstimate()
    estimate.observe(asked.size, 10)
    assert estimate.prompt(PromptText(b"x" * 400), ()).tokens == 100
    estimate.observe(TextSize(400), 10)
    assert estimate.prompt(PromptText(b"x" * 400), ()).tokens < 100


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


def test_a_prompt_as_embeddings_alone_is_the_engine_s_to_judge() -> None:
    one, other = (
        prompt_text({"prompt_embeds": embeds}, chat=False).data for embeds in ("QUJD", ["QUJE"])
    )
    assert one and other and one != other
    with pytest.raises(PromptInvalid):
        prompt_text({"prompt_embeds": None}, chat=False)
