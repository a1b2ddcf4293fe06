"""Errors inside event streams: those that engines send, and what only resembles one."""

import json

import pytest

from agents.core.stream_errors import EVENT_BYTES_MAX, StreamError, event_error, last_error

VLLM = (
    b'data: {"error": {"message": "EngineCore encountered an issue", '
    b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
)
SGLANG = (
    b'data: {"error": {"object": "error", "message": "the prompt is too long", '
    b'"type": "BadRequestError", "param": null, "code": 400}}\n\n'
)
OLD_VLLM = b'data: {"object": "error", "message": "no", "type": "BadRequestError", "code": 400}\n\n'
DONE = b"data: [DONE]\n\n"
TOKEN = (
    b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"delta":{"content":"a"}}]}\n\n'
)
# A model that writes such an event writes it inside a string, where its quotes are escaped.
QUOTING = b'data: {"choices":[{"text":"' + b'data: {\\"error\\": 1}' + b'"}]}\n\n'


@pytest.mark.parametrize("comment", [b": ping\n\n", b": 1\r\n\r\n: 2\r\n\r\n", b": one\n"])
def test_comments_before_an_error_are_passed_over(comment) -> None:
    error = event_error(comment + VLLM)
    assert error is not None and error.status == 500
    assert event_error(comment) is event_error(comment + TOKEN) is None


@pytest.mark.parametrize(
    ("head", "status", "message"),
    [
        (VLLM, 500, "EngineCore encountered an issue"),
        (SGLANG, 400, "the prompt is too long"),
        (OLD_VLLM, 400, "no"),
        (b'\xef\xbb\xbf\r\ndata:{"error":{"message":"m","code":"429"}}\r\n\r\n', 429, "m"),
        (b'data: {"error": "out of memory", "error_type": "generation"}\n\n', 500, "out of memory"),
        (b'data: {"error": {"type": "invalid_request_error"}}\n\n', 400, None),
        *(
            (b'data: {"type":"error","error":{"type":"%s","message":"m"}}\n\n' % name, status, "m")
            for name, status in (
                (b"authentication_error", 401),
                (b"permission_error", 403),
                (b"not_found_error", 404),
                (b"request_too_large", 413),
                (b"rate_limit_error", 429),
                (b"api_error", 500),
                (b"timeout_error", 504),
                (b"overloaded_error", 529),
                (b"Overloaded_Error", 529),
                (b"some_other_error", 500),
            )
        ),
        (b'data: {"error": {"message": "m", "code": 200}}\n\n', 500, "m"),
        (b'data: {"error": {"message": "m", "code": true}}\n\n', 500, "m"),
        (b'event: error\ndata: {"message": "m", "code": 503}\n\n', 503, "m"),
        (b"event: error\ndata: no GPU\n\n", 500, "no GPU"),
        (b"event: error\n: no worker\n\n", 500, "no worker"),
        (b"event: error\r\r", 500, None),
        (VLLM.rstrip(), 500, "EngineCore encountered an issue"),
    ],
)
def test_a_stream_that_begins_with_an_error(head, status, message) -> None:
    error = event_error(head)
    assert isinstance(error, StreamError)
    assert error.status == status
    assert error.message == (message or "the engine reported an error")
    assert json.loads(error.body)["error"]
    assert last_error(head) == last_error(TOKEN + head + DONE) == error


@pytest.mark.parametrize(
    "head",
    [
        TOKEN,
        QUOTING,
        DONE,
        b'data: {"error": null, "choices": []}\n\n',
        b"event: message\ndata: 1\n\n",
        b"event: error_rate\ndata: 1\n\n",
        b'data: ["error"]\n\n',
        b'data: {"error": {\n\n',
        b"data: " + b"[" * 5000 + b'"error"\n\n',
        b": ping\n\n",
        b'data: {"error": "' + b"x" * EVENT_BYTES_MAX + b'"}\n\n',
        b"",
    ],
)
def test_other_events(head) -> None:
    assert event_error(head) is None
    assert last_error(head) is last_error(head + DONE) is None


def test_only_the_last_event_counts() -> None:
    assert last_error(VLLM + TOKEN + DONE) is None
