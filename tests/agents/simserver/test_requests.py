"""Bodies: what is read, and the error of each bad one."""

import json
import re

import pytest

from agents.simserver.requests import ApiError, RequestParser

ASKER = RequestParser(models=("m", "alias"), max_model_len=1000, seed=0)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**body: object):
    return ASKER.chat(json.dumps({"messages": HELLO, **body}).encode())


def completion(**body: object):
    return ASKER.completion(json.dumps(body).encode())


BAD_CHATS = [
    ({"messages": None}, 400, "at least one message"),
    ({"messages": []}, 400, "at least one message"),
    ({"messages": "hi"}, 400, "at least one message"),
    ({"messages": ["hi"]}, 400, r"messages\.0: must be a valid dictionary"),
    ({"messages": [{"role": "king", "content": ""}]}, 400, "'system', 'developer', 'user'"),
    ({"messages": [{"role": ["user"], "content": ""}]}, 400, "'system', 'developer', 'user'"),
    ({"messages": [{"role": "user", "content": 7}]}, 400, "a string or a list of parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be text"),
    ({"model": "gpt-9"}, 404, "this engine serves: m, alias"),
    ({"model": 3}, 404, "does not exist"),
    ({"model": ["m"]}, 404, "does not exist"),
    ({"n": 2}, 400, "only n = 1"),
    ({"n": 0}, 400, "only n = 1"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"max_tokens": 0}, 400, "more than 0"),
    ({"max_tokens": 2.5}, 400, "whole number"),
    ({"max_tokens": True}, 400, "whole number"),
    ({"max_completion_tokens": "9"}, 400, "whole number"),
    ({"max_tokens": 5, "min_tokens": 6}, 400, "must not exceed the 5"),
    ({"max_tokens": 996}, 400, "context is 1000 tokens"),
    ({"messages": [{"role": "user", "content": "x" * 4000}]}, 400, "shorten the prompt"),
    ({"stream": "yes"}, 400, "true or false"),
    ({"stream": True, "stream_options": 1}, 400, "stream_options: must be"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "true or false"),
    ({"stop": 5}, 400, "string or a list"),
    ({"stop": ["a", 5]}, 400, r"stop\.1: must be a text"),
    ({"stop": ""}, 400, "at least 1 character"),
    ({"stamp": 1}, 400, "true or false"),
    ({"stamp": True, "stop": "a"}, 400, "leave out stop or stamp"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD_CHATS)
def test_the_error_of_a_bad_chat_names_the_correction(body, status, message):
    with pytest.raises(ApiError) as caught:
        chat(**body)
    assert caught.value.status == status
    assert re.search(message, caught.value.message)
    error = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}


BAD_PROMPTS = [None, "", [], ["a", "b"], [1, "a"], [1.5], [True], [2**32], [-1], {"a": 1}, [[]]]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_the_error_of_a_bad_prompt_names_the_field(prompt):
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert caught.value.status == 400
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"1"])
def test_a_body_that_is_no_object(raw):
    with pytest.raises(ApiError, match="JSON") as caught:
        ASKER.chat(raw)
    assert caught.value.status == 400


def test_content_as_parts_is_the_text_of_its_parts():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompt == chat().prompt


def test_tool_calls_and_tools_are_part_of_the_prompt():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert chat(messages=[*HELLO, call]).prompt_tokens > chat().prompt_tokens + 2
    assert chat(tools=[{"type": "function"}]).prompt_tokens > chat().prompt_tokens


def test_a_text_prompt_and_its_token_ids_are_the_same_prompt():
    text = completion(prompt="abcdefgh")
    ids = [int.from_bytes(b"abcd", "little"), int.from_bytes(b"efgh", "little")]
    assert completion(prompt=ids).prompt == text.prompt == completion(prompt=["abcdefgh"]).prompt
    assert text.prompt_tokens == 2


def test_lengths():
    assert completion(prompt="x").answer.tokens <= 16
    assert chat(max_tokens=7, ignore_eos=True).answer.tokens == 7
    assert chat(max_completion_tokens=9, max_tokens=7, ignore_eos=True).answer.tokens == 9
    everything = chat(ignore_eos=True)
    assert everything.answer.tokens + everything.prompt_tokens == 1000
    assert completion(prompt="x", ignore_eos=True).answer.tokens == 999
    assert chat(min_tokens=900).answer.tokens == 900


def test_usage_is_included_only_in_streams_that_request_it():
    options = {"include_usage": True}
    assert chat(stream=True, stream_options=options).include_usage
    assert not chat(stream_options=options).include_usage
    assert not chat(stream=True).include_usage


def test_the_model_may_be_left_out_or_named_by_any_of_its_names():
    assert chat().model == "m"
    assert chat(model="alias").model == "alias"


@pytest.mark.parametrize("limit", [20, None])
def test_a_beginning_of_its_answer_is_gone_on_with(limit):
    whole = chat(max_tokens=limit)
    for said in range(1, whole.answer.tokens):
        text = whole.answer.text[: 4 * said].rstrip()
        rest = chat(
            messages=[*HELLO, {"role": "assistant", "content": text}],
            continue_final_message=True,
            add_generation_prompt=False,
            max_tokens=None if limit is None else limit - said + 1,  # the space is said again
        )
        shown = [rest.answer.shown(at, at + 1) for at in range(rest.answer.tokens)]
        assert text + "".join(shown) == whole.answer.text
        assert rest.answer.finish_reason == whole.answer.finish_reason
        assert rest.prompt_tokens == whole.prompt_tokens + said


def test_gone_on_with_is_only_an_assistants_message_without_a_generation_prompt():
    said = [*HELLO, {"role": "assistant", "content": "x"}]
    for messages, more in (
        (said, {}),
        (HELLO, {"add_generation_prompt": False}),
        (said, {"add_generation_prompt": False, "stamp": True}),
    ):
        with pytest.raises(ApiError) as caught:
            chat(messages=messages, continue_final_message=True, **more)
        assert caught.value.status == 400
    nothing = chat(messages=said, continue_final_message=True, add_generation_prompt=False)
    assert nothing.answer.visible == 0, "it is no beginning of the answer to that prompt"
