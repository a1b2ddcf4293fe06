"""Prompts of Messages and Responses: the chat of the same words, parts that are no text, limits."""

from itertools import combinations, takewhile
from operator import eq

import pytest

from mesh.core.model.prompt import (
    HASH_BYTES,
    PIECES_MAX,
    SYSTEM_TURN,
    PromptInvalid,
    PromptReader,
    PromptText,
    StateUnknown,
    as_written,
)
from mesh.core.model.prompt_parts import STAND_IN_BYTES, PartKind
from mesh.core.model.prompt_shapes import text_at
from mesh.core.model.served_names import served_name, work_name
from schemas.http import CHAT, EMBEDDINGS, MESSAGES, RESPONSES
from schemas.ids import ModelId
from schemas.prompt_writing import Billing, PromptWriting, common_writing

WORDS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOLS = [{"name": "look"}]
BASE64 = "A" * 500_000
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}


def test_equal_words_are_equal_bytes_in_every_api():
    system = [{"role": "system", "content": "be brief"}]
    chat = text_at(CHAT, {"messages": system + WORDS, "tools": TOOLS})
    messages = {"messages": WORDS, "system": "be brief", "tools": TOOLS}
    responses = {"input": WORDS, "instructions": "be brief", "tools": TOOLS}
    assert text_at(MESSAGES, messages) == text_at(RESPONSES, responses) == chat
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    assert text_at(MESSAGES, messages | {"system": parts}) == chat


def bill(suffix: str, request: str) -> dict[str, str]:
    version = f"x-anthropic-billing-header: cc_version=2.1.332.{suffix}; cc_entrypoint=cli;"
    return {"type": "text", "text": f"{version} cch={request};"}


def test_a_block_of_billing_is_no_part_of_the_system_prompt():
    text = {"type": "text", "text": "be brief"}
    first, second, none = (
        text_at(MESSAGES, {"messages": WORDS, "system": [*bills, text]})
        for bills in ([bill("a", "1")], [bill("b", "2")], [])
    )
    assert first.data == second.data == none.data
    assert none.asides is None


LATER = {"role": "system", "content": "it is Monday"}
IN_PLACE, MOVED = PromptWriting(), PromptWriting(system_first=True)
MASKED, KEPT = PromptWriting(Billing.MASKED), PromptWriting(Billing.KEPT)


def written(writing: PromptWriting, messages: list, system: object = "be brief") -> PromptText:
    return as_written(text_at(MESSAGES, {"messages": messages, "system": system}), writing)


def test_billing_is_written_as_engines_do():
    brief = {"type": "text", "text": "be brief"}
    one, two, other = (
        [bill(*which), brief] for which in (("abc", "1f2"), ("abc", "9"), ("xyz", "1f2"))
    )
    for writing in IN_PLACE, MOVED:
        assert written(writing, WORDS, one).data == written(writing, WORDS, other).data
    assert written(MASKED, WORDS, one) == written(MASKED, WORDS, two)
    assert written(MASKED, WORDS, one) != written(MASKED, WORDS, other)
    assert written(KEPT, WORDS, one) != written(KEPT, WORDS, two)
    plain = written(KEPT, WORDS, bill("abc", "1f2")["text"] + "be brief")
    assert written(KEPT, WORDS, one).data == plain.data
    assert written(KEPT, WORDS, [one[0]]).data == written(KEPT, WORDS, one[0]["text"]).data


def test_system_turns_are_moved_as_engines_do():
    turns = [LATER, WORDS[0], LATER, WORDS[1]]
    assert (
        written(MOVED, turns).data == written(IN_PLACE, WORDS, "be brief" + 2 * "it is Monday").data
    )
    assert written(IN_PLACE, turns) == text_at(MESSAGES, {"messages": turns, "system": "be brief"})
    without = text_at(MESSAGES, {"messages": [WORDS[0], LATER], "tools": TOOLS})
    first = text_at(MESSAGES, {"messages": WORDS[:1], "system": "it is Monday", "tools": TOOLS})
    assert as_written(without, MOVED).data == first.data


def test_parts_stay_where_their_bytes_are():
    image = {"role": "user", "content": [IMAGE]}
    turns = [image, LATER, *WORDS, LATER, image, WORDS[1]]
    left = [turn for turn in turns if turn is not LATER]
    moved = written(MOVED, turns)
    assert moved == written(MOVED, left, "be brief" + 2 * "it is Monday")
    assert len(moved.parts) == 2
    brief = {"type": "text", "text": "be brief"}
    kept = written(KEPT, turns, [bill("a", "b"), brief])
    plain = written(KEPT, turns, bill("a", "b")["text"] + "be brief")
    assert (kept.data, kept.parts) == (plain.data, plain.parts)


def test_engines_that_differ_are_never_taken_to_hold_what_one_of_them_does_not():
    assert common_writing([]) == common_writing([("vllm", False)] * 2) == IN_PLACE
    assert common_writing([("llamacpp", True), ("vllm", True)]) == (Billing.MASKED, True)
    assert common_writing([("sglang", False)]) == common_writing([("of later", False)]) == KEPT

    user, long = {"role": "user", "content": "a" * 500}, LATER | {"content": "b" * 700}
    prompts = [user, long, user], [long, user, user], [user, user], [user, user, long], [long]

    def alike(one: PromptWriting, a: list, b: list) -> int:
        """Bytes that both prompts begin with."""
        return sum(takewhile(bool, map(eq, written(one, a).data, written(one, b).data)))

    both = common_writing([("vllm", True), ("vllm", False)])
    slack = HASH_BYTES + len(SYSTEM_TURN)  # the digest of the turns, and what marks one
    for a, b in combinations(prompts, 2):
        assert alike(both, a, b) <= min(alike(IN_PLACE, a, b), alike(MOVED, a, b)) + slack
    same = [LATER, *WORDS]
    assert alike(both, same, [*same, WORDS[0]]) == len(written(both, same).data)


def test_only_prompts_that_engines_write_differently_are_asked_about():
    asked = []

    def writing_of(model: ModelId) -> PromptWriting:
        asked.append(model)
        return KEPT

    reader, brief = PromptReader("k", writing_of), [{"type": "text", "text": "be brief " * 99}]
    name = served_name(ModelId("m"), MESSAGES)
    plain = reader.read(name, text_at(MESSAGES, {"messages": WORDS, "system": brief}))
    assert asked == []
    one, two = (
        reader.read(name, text_at(MESSAGES, {"messages": WORDS, "system": [bill(n, n), *brief]}))
        for n in "ab"
    )
    assert asked == [name, name]
    assert len({plain.hashes, one.hashes, two.hashes}) == 3


def test_a_reference_to_a_kept_item_is_state():
    items = [{"type": "item_reference", "id": "msg_1"}, *WORDS]
    with pytest.raises(StateUnknown):
        text_at(RESPONSES, {"input": items})


def test_prompts_of_generating_routes_are_known_by_the_model_alone():
    model = ModelId("org/llama")
    assert work_name(model) == work_name(served_name(model, MESSAGES)) == model
    assert work_name(served_name(model, RESPONSES)) == model
    assert work_name(served_name(model, EMBEDDINGS)) == served_name(model, EMBEDDINGS)


@pytest.mark.parametrize(
    "part",
    [IMAGE, {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}],
    ids=["image", "inside a tool's result"],
)
def test_an_image_counts_as_one_and_not_by_its_bytes(part):
    def read(part):
        return text_at(MESSAGES, {"messages": [{"role": "user", "content": [part]}]})

    text = read(part)
    assert text.size.parts == (PartKind.IMAGE,)
    assert len(text.data) < STAND_IN_BYTES + 200
    other = {**IMAGE, "source": {**IMAGE["source"], "data": "B" + BASE64[1:]}}
    changed = other if part is IMAGE else {**part, "content": [other]}
    assert read(changed) != text


def test_an_image_in_a_tools_output_counts_as_one():
    image = {"type": "input_image", "image_url": "data:image/png;base64," + BASE64}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    text = text_at(RESPONSES, {"input": [{"role": "user", "content": "look"}, output]})
    assert text.size.parts == (PartKind.IMAGE,)
    assert len(text.data) < STAND_IN_BYTES + 300


def test_calls_and_their_outputs_count_by_their_text():
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c"}
    one = text_at(RESPONSES, {"input": [call]})
    assert b"look" in one.data
    assert text_at(RESPONSES, {"input": [call | {"name": "find"}]}) != one


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_more_pieces_than_may_be_are_refused(path):
    content = [{"type": "text", "text": "a"}] * PIECES_MAX
    turns = [{"role": "user", "content": content}]
    with pytest.raises(PromptInvalid, match="more than"):
        text_at(path, {"messages": turns, "input": turns})
    nested = [{"type": "tool_result", "content": content}]
    turns = [{"role": "user", "content": nested}]
    with pytest.raises(PromptInvalid, match="more than"):
        text_at(path, {"messages": turns, "input": turns})


def test_an_empty_state_is_none():
    body = {"input": "a", "previous_response_id": None, "conversation": None, "background": False}
    assert text_at(RESPONSES, body) == text_at(RESPONSES, {"input": "a"})
    with pytest.raises(StateUnknown):
        text_at(RESPONSES, body | {"previous_response_id": "resp_1"})


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_deep_nesting_is_read_or_refused(path, depth):
    deep: list = []
    for _ in range(depth):
        deep = [deep]
    turns = [{"role": "user", "content": [deep]}]
    try:
        text_at(path, {"messages": turns, "input": turns})
    except PromptInvalid as error:
        assert "nested" in str(error)
