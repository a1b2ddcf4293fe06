"""Streams that break at any byte and go on from another engine read as if nothing had happened.

The engine of these tests has one answer to each prompt, as real ones under greedy decoding, and
goes on with its beginnings alone.
"""

from random import Random
from typing import Any

import orjson
import pytest

from mesh.session.answer import AnswerReceiver
from mesh.session.continuation import CantContinue, continuation
from mesh.session.said import Said
from schemas import exchange
from schemas.exchange import Frame, FrameView, Outcome
from schemas.wire import encode

TOKENS = ("a", " b", "ä", "\n", "\n\n", " 世界", '"q"', "c ", "data: ", "\\n", "😀", " d")
HEAD = encode(exchange.Head(200, "text/event-stream", "eu", "eu-0"))
END = encode(exchange.End(Outcome.DONE, "", 10, 0, 5, 0.1))


def read(body: dict[str, Any], *, chat: bool) -> tuple[str, str]:
    """The prompt, and what was said after it."""
    if not chat:
        prompt, _, said = body["prompt"].partition("?")
        return prompt, said
    messages, said = body["messages"], ""
    if body.get("continue_final_message"):
        assert body["add_generation_prompt"] is False, "vLLM refuses it"
        said = messages[-1]["content"]
        assert messages[-1]["role"] == "assistant"
        assert said == said.rstrip(), "templates would cut it"
        messages = messages[:-1]
    return str(messages), said


def answer_to(prompt: str) -> list[str]:
    dice = Random(prompt)
    return dice.choices(TOKENS, k=dice.randint(1, 45))


def events_of(body: dict[str, Any], name: str, *, chat: bool, dice: Random) -> list[bytes]:
    """The stream of one engine: `name` is in its ids."""
    prompt, said = read(body, chat=chat)
    frame = {"id": name, "created": len(name), "model": "m"}
    events: list[bytes] = []

    def event(choices: list[dict[str, Any]], **more: Any) -> None:
        end = dice.choice([b"\n\n", b"\r\n\r\n"])
        events.append(b"data: " + orjson.dumps({**frame, "choices": choices, **more}) + end)

    def choice(text: str | None, reason: str | None = None, **role: str) -> list[dict[str, Any]]:
        part = {"delta": {**role, "content": text}} if chat else {"text": text or ""}
        return [{"index": 0, **part, "logprobs": None, "finish_reason": reason}]

    if chat:
        event(choice("", role="assistant"))
    limit, told, count = body["max_tokens"], 0, 0
    for token in answer_to(prompt):
        assert token.startswith(said) if len(said) < len(token) else said.startswith(token)
        new, said = token[len(said) :], said[len(token) :]
        if not new:
            told += 1
            continue
        if count == limit:
            break
        told += len(new) < len(token)
        count += 1
        event(choice(new))
        if dice.random() < 0.1:
            events.append(b": keep-alive\n\n")
    assert not said
    event(choice(None, "length" if count == limit else "stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        asked = len(prompt) + told
        event([], usage={"prompt_tokens": asked, "completion_tokens": count,
                         "total_tokens": asked + count})  # fmt: skip
    return [*events, b"data: [DONE]\n\n"]


class Client:
    """What a client read: its text, and all else that it may look at."""

    def __init__(self, data: bytes, *, chat: bool) -> None:
        self.text, self.reason, self.usage, self.done = "", None, None, 0
        self.names: set[str] = set()
        self.roles = 0
        for event in data.replace(b"\r\n", b"\n").split(b"\n\n"):
            if event.startswith(b"data: [DONE]"):
                self.done += 1
            elif event.startswith(b"data: "):
                self._read(orjson.loads(event[6:]), chat=chat)

    def _read(self, found: dict[str, Any], *, chat: bool) -> None:
        assert not self.done
        self.names.add(f"{found['id']} {found['created']} {found['model']}")
        self.usage = found.get("usage") or self.usage
        for choice in found["choices"]:
            assert choice["index"] == 0
            assert self.reason is None, "nothing follows the reason to finish"
            part = choice["delta"] if chat else choice
            self.roles += "role" in part
            self.text += part.get("content" if chat else "text") or ""
            self.reason = choice["finish_reason"] or self.reason


def broken_at(receiver: AnswerReceiver, data: bytes, dice: Random) -> bytes:
    """What the client is given of an answer of which so many bytes came."""
    receiver.feed(FrameView(Frame.HEAD, 0, HEAD), 0.0)
    given, at, number = b"", 0, 1
    while at < len(data):
        size = dice.randint(1, 200)
        frame = exchange.pack_frame(Frame.DATA, number, data[at : at + size])
        passed = b"" if receiver.splice else receiver.passing(frame)
        if not passed:
            receiver.feed(exchange.unpack_frame(frame), 0.0)
        given += passed
        if dice.random() < 0.7:  # else its client is slow
            given += receiver.take()
        at, number = at + size, number + 1
    receiver.feed(FrameView(Frame.WORKING, number, b""), 0.0)
    return given


def streamed(body: dict[str, Any], dice: Random, *, chat: bool, breaks: int) -> bytes:
    """What a client reads of a stream that breaks so often at any byte."""
    said = Said(orjson.dumps(body), is_chat=chat)
    given, splice = b"", None
    asked = body
    for attempt in range(breaks + 1):
        data = b"".join(events_of(asked, f"answer-{'x' * attempt}", chat=chat, dice=dice))
        receiver = AnswerReceiver(1, attempt + 1, "inbox")
        receiver.splice, receiver.keep = splice, said.chunks.append
        if attempt == breaks:
            given += broken_at(receiver, data, dice)
            receiver.feed(FrameView(Frame.END, receiver.next_number, END), 0.0)
            return given + receiver.take()
        given += broken_at(receiver, data[: dice.randint(0, len(data) - 14)], dice)
        receiver.broke()
        given += receiver.take()
        asked, splice = continuation(said)
        if dice.random() < 0.5:
            said.read()
    raise AssertionError("never")


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_that_breaks_anywhere_reads_as_one_that_does_not(*, chat: bool) -> None:
    for seed in range(200):
        dice = Random(seed)
        body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": dice.randint(1, 40)}
        if dice.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        user = {"role": "user", "content": f"hello {seed}?"}
        body |= {"messages": [user]} if chat else {"prompt": f"hello {seed}?"}
        whole = Client(b"".join(events_of(body, "answer-", chat=chat, dice=dice)), chat=chat)
        got = Client(streamed(body, dice, chat=chat, breaks=dice.randint(1, 3)), chat=chat)
        assert (got.text, got.done, got.roles) == (whole.text, 1, int(chat)), f"seed {seed}"
        assert (got.reason, len(got.names)) == (whole.reason, 1), f"seed {seed}"
        assert got.usage == whole.usage, f"seed {seed}"


def said_of(*deltas: dict[str, Any], **body: Any) -> Said:
    """What was said by these deltas of a chat."""
    chat = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    said = Said(orjson.dumps(chat | body), is_chat=True)
    for delta in deltas or ({"role": "assistant", "content": "one two"},):
        event = {"id": "a", "choices": [{"index": 0, "delta": delta}]}
        said.chunks.append(b"data: " + orjson.dumps(event) + b"\n\n")
    return said


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"n": 2},
        {"logprobs": True},
        {"echo": True},
        {"store": True},
        {"seed": 7},
        {"structured_outputs": {"regex": "a+"}},
        {"grammar": "root ::= [a-z]+"},
        {"presence_penalty": 0.5},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"include_reasoning": False},
        {"separate_reasoning": False},
        {"stream_reasoning": False},
        {"max_tokens": 100.0},
        {"n_predict": 100},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "a turn that is over"}]},
    ],
)
def test_no_other_engine_goes_on_with_what_depends_on_more_than_the_text(field) -> None:
    with pytest.raises(CantContinue):
        continuation(said_of(**field))


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"content": "<think>hm"},
        {"content": "hm</think>so"},  # its template begins with thoughts
    ],
)
def test_nor_with_calls_of_tools_or_thoughts_under_way(delta) -> None:
    with pytest.raises(CantContinue):
        continuation(said_of({"role": "assistant", "content": "one"}, delta))


def test_what_is_asked_next() -> None:
    body = {"seed": 7, "temperature": 0, "tools": [{}], "tool_choice": "auto", "max_tokens": 9}
    fields, splice = continuation(said_of({"content": "one"}, {"content": " two\n"}, **body))
    assert fields["messages"][-1] == {"role": "assistant", "content": "one two"}
    assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)
    assert fields["max_tokens"] == 8, "the line end is a token again"
    assert splice.is_turn
    assert continuation(said_of(seed=7), may_be_seeded=True)[0]["seed"] == 7
    own = {"role": "assistant", "content": "It is"}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    fields, _ = continuation(said_of({"content": " so"}, messages=[own], **going_on))
    assert fields["messages"] == [{"role": "assistant", "content": "It is so"}]


def test_a_limit_that_is_none_ends_nothing() -> None:
    fields, splice = continuation(said_of(max_tokens=-1, n_predict=-1))
    assert fields["max_tokens"] == -1
    last = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    assert b'"finish_reason":"stop"' in splice.joined(last)
    completion = {"prompt": "one", "max_tokens": -1}
    with pytest.raises(CantContinue, match="max_tokens"):  # engines have defaults of their own
        continuation(Said(orjson.dumps(completion), is_chat=False))


def test_no_field_of_an_event_is_repeated_that_is_no_name() -> None:
    said = said_of()
    event = {"id": "a", "model": "m" * 300, "created": 7, "system_fingerprint": ["deep"]}
    said.chunks.insert(0, b"data: " + orjson.dumps(event) + b"\n\n")
    said.read()
    assert said.head == {"id": "a", "created": 7}
