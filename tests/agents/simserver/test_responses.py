"""Streamed bytes: one event for each token, and together the whole answer."""

import json

import pytest

from agents.sim import text as tokens
from agents.simserver.requests import GenerationRequest, RequestParser
from agents.simserver.responses import DONE, SseRenderer, prompt_mark, usage

ASKER = RequestParser(models=('odd "name" \\u0000', "m"), max_model_len=1000, seed=0)


def ask(**more: object) -> GenerationRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    return ASKER.chat(json.dumps(body).encode())


def events(payload: bytes) -> list[dict]:
    parts = payload.removesuffix(DONE).split(b"\n\n")
    assert parts.pop() == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_events_of_a_stream_are_the_whole_answer(include_usage):
    asked = ask(stream_options={"include_usage": include_usage}, max_tokens=30, ignore_eos=True)
    renderer = SseRenderer(asked, "chatcmpl-1", 5)
    payload = renderer.opening() + renderer.tokens(0, 7) + renderer.tokens(7, 30)
    payload += renderer.closing(16)
    assert payload.endswith(DONE)
    seen = events(payload)
    assert all(event["model"] == ASKER.models[0] for event in seen)
    assert all(event["id"] == "chatcmpl-1" for event in seen)
    texts = [event["choices"][0]["delta"].get("content") for event in seen if event["choices"]]
    assert texts[0] == ""
    assert len(texts) == 1 + 30 + 1
    assert "".join(filter(None, texts)) == asked.answer.text
    finish = [event["choices"][0]["finish_reason"] for event in seen if event["choices"]]
    assert finish == [None] * 31 + ["length"]
    assert [event.get("usage") for event in seen if event.get("usage")] == (
        [usage(asked, 30, 16)] if include_usage else []
    )


def test_the_words_need_no_escaping():
    everything = "".join(ask(max_tokens=900, ignore_eos=True).answer.text)
    assert json.dumps(everything) == f'"{everything}"'


def test_a_whole_answer_has_its_usage():
    asked = ask(max_tokens=3, ignore_eos=True)
    body = json.loads(SseRenderer(asked, "chatcmpl-1", 5).whole(0))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": asked.answer.text}
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stamps_name_prompt_attempt_and_index_of_each_token():
    asked = ask(max_tokens=12, ignore_eos=True, stamp=True)
    mark = prompt_mark(tokens.chat_tokens([("user", "hi")]))
    expected = [f"{mark}/e1-a/{index} " for index in range(12)]
    seen = events(SseRenderer(asked, "chatcmpl-1", 5, "e1-a").tokens(0, 12))
    assert [event["choices"][0]["delta"]["content"] for event in seen] == expected
    body = json.loads(SseRenderer(asked, "chatcmpl-1", 5, "e1-a").whole(0))
    assert body["choices"][0]["message"]["content"] == "".join(expected)
    assert body["usage"]["completion_tokens"] == 12
    other = ask(messages=[{"role": "user", "content": "ho"}], stamp=True)
    assert prompt_mark(other.prompt) != mark
