"""Prompts of Messages and Responses: the chat of the same words, parts that are no text, limits."""

import pytest

from mesh.core.model.prompt import PIECES_MAX, PromptInvalid, StateUnknown
from mesh.core.model.prompt_parts import STAND_IN_BYTES, PartKind
from mesh.core.model.prompt_shapes import text_at
from mesh.core.model.served_names import served_name, work_name
from schemas.http import CHAT, EMBEDDINGS, MESSAGES, RESPONSES
from schemas.ids import ModelId

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


def test_a_block_of_billing_is_no_part_of_the_system_prompt():
    text = {"type": "text", "text": "be brief"}
    bills = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={n};"}
        for n in "ab"
    ]
    first, second, none = (
        text_at(MESSAGES, {"messages": WORDS, "system": [*bill, text]})
        for bill in ([bills[0]], [bills[1]], [])
    )
    assert first == second == none


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
