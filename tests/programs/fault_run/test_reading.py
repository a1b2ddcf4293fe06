"""A whole answer passes; each way to spoil it is seen and named."""

import json

import pytest

from agents.simserver.requests import RequestParser
from agents.simserver.responses import DONE, SseRenderer, prompt_mark
from schemas.http import Fault, error_body, error_event
from tests.programs.fault_run.reading import End, Stamps, Stream, read_plain, read_refusal

TOKENS = 5
MESSAGES = [{"role": "user", "content": "hi"}]


def ask(*, stream: bool = True, content: str = "hi"):
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stamp": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return RequestParser(models=("m",), max_model_len=1000, seed=0).chat(json.dumps(body).encode())


EVENTS = SseRenderer(ask(), "chatcmpl-1", 5, "e1-1")
AGAIN = SseRenderer(ask(), "chatcmpl-1", 5, "e1-2")
ANOTHER = SseRenderer(ask(content="ho"), "chatcmpl-2", 5, "e1-3")
BEGIN, CLOSING = EVENTS.opening(), EVENTS.closing(0)
ERROR = error_event(Fault.INTERNAL, "broke")
MARK = prompt_mark(ask().prompt)


def stamps() -> Stamps:
    return Stamps(MARK, TOKENS)


def read(body: bytes, size: int = 7) -> tuple[End, list[str]]:
    stream = Stream(stamps())
    for at in range(0, len(body), size):
        stream.feed(body[at : at + size])
    return stream.end(), stream.violations


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_whole_answer_is_one(size):
    assert read(BEGIN + EVENTS.tokens(0, 5) + CLOSING, size) == (End.WHOLE, [])
    assert read(BEGIN + b": comment\n\n" + EVENTS.tokens(0, 5) + CLOSING, size)[1] == []


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_error_event_ends_an_answer_that_began(tokens):
    assert read(BEGIN + EVENTS.tokens(0, tokens) + ERROR) == (End.ERROR_EVENT, [])


SPOILT = {
    "after [DONE]": BEGIN + EVENTS.tokens(0, 5) + CLOSING + ERROR,
    "after the error event": BEGIN + ERROR + DONE,
    "without a last event": BEGIN + EVENTS.tokens(0, 5),
    "half an event": BEGIN + EVENTS.tokens(0, 5) + CLOSING + b"data: {",
    "tokens missing: 2 to 2": BEGIN + EVENTS.tokens(0, 2) + EVENTS.tokens(3, 5) + CLOSING,
    "a token again or late: 1": BEGIN + EVENTS.tokens(0, 2) + EVENTS.tokens(1, 5) + CLOSING,
    "a token again or late: 2": BEGIN
    + EVENTS.tokens(0, 2) + EVENTS.tokens(3, 4) + EVENTS.tokens(2, 3) + CLOSING,
    "two attempts": BEGIN + EVENTS.tokens(0, 2) + AGAIN.tokens(2, 5) + CLOSING,
    "another prompt": BEGIN + EVENTS.tokens(0, 2) + ANOTHER.tokens(2, 5) + CLOSING,
    "whole with 4 of 5": BEGIN + EVENTS.tokens(0, 4) + CLOSING,
    "usage reports 5 tokens of 4": BEGIN + EVENTS.tokens(0, 4) + CLOSING,
    "without a finish reason": BEGIN + EVENTS.tokens(0, 5) + DONE,
    "after the finish reason": BEGIN + CLOSING.removesuffix(DONE) + EVENTS.tokens(0, 5) + DONE,
    "no stamp": BEGIN + EVENTS.tokens(0, 5).replace(b"/0 ", b" bart ") + CLOSING,
    "no JSON": BEGIN + b"data: {]\n\n" + EVENTS.tokens(0, 5) + CLOSING,
    "no data event": BEGIN + b"event: surprise\n\n" + EVENTS.tokens(0, 5) + CLOSING,
}  # fmt: skip


@pytest.mark.parametrize("wrong", SPOILT)
def test_what_is_wrong_with_a_stream_is_seen(wrong):
    assert any(wrong in violation for violation in read(SPOILT[wrong])[1])


def test_a_plain_answer_is_whole_or_not():
    asked = ask(stream=False)
    body = SseRenderer(asked, "chatcmpl-1", 5, "e1-1").whole(0)
    good = stamps()
    assert (read_plain(good, body), good.violations) == (End.WHOLE, [])
    for spoilt in (
        body.replace(b"/3 ", b"/4 "),
        SseRenderer(ask(stream=False, content="ho"), "chatcmpl-1", 5, "e1-1").whole(0),
        body[:-1],
        b"{}",
    ):
        bad = stamps()
        read_plain(bad, spoilt)
        assert bad.violations


def test_an_error_has_its_reason():
    body = error_body(Fault.SATURATED, "too many")
    assert read_refusal(429, body) == (f"429 {Fault.SATURATED.value.code}", None)
    for unclear in (b"", b"<html>", b'{"error": 1}', error_body(Fault.SATURATED, "")):
        assert read_refusal(503, unclear)[1]
