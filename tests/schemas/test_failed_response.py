"""The ending of a Responses stream goes on where the stream broke, whatever its engine sent."""

import json
import random

import pytest
from openai.types.responses import ResponseFailedEvent

from schemas.failed_response import FIRST_BYTES, Sent
from schemas.http import ErrorForm, Fault, error_event

BEGUN = {"id": "resp_1", "object": "response", "created_at": 7, "model": "m", "status": "x"}


def event(name: str, line_end: str = "\n", **fields: object) -> bytes:
    text = f"event: {name}{line_end}data: {json.dumps({'type': name, **fields})}{line_end * 2}"
    return text.encode()


def ending(first: bytes, last: bytes, message: str = "the engine died", number: int = -1) -> dict:
    known = Sent(first, last, number)
    sent = error_event(Fault.ENGINE_FAILED, message, ErrorForm.RESPONSES, known)
    name, _, data = sent.partition(b"\n")
    assert name == b"event: response.failed" and sent.endswith(b"}\n\n")
    assert data.startswith(b"data: ") and data.count(b"\n") == 2, "one event"
    found = json.loads(data.removeprefix(b"data: "))
    ResponseFailedEvent.model_validate(found)
    return found


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "begun",
    [
        {"response": BEGUN, "sequence_number": 0},
        {"sequence_number": 0, "response": BEGUN},
        {"response": {"conversation": {"id": "conv_1"}, **BEGUN}},
        {"response": {**BEGUN, "tools": [{"id": "tool_1"}] * FIRST_BYTES}},
    ],
    ids=["as vLLM", "as OpenAI", "by the alphabet", "long"],
)
def test_it_names_the_streams_own_response(begun, line_end):
    first = event("response.created", line_end, **begun)[:FIRST_BYTES]
    found = ending(first, event("x", delta='"id": "resp_2"', sequence_number=41))
    response = found["response"]
    assert (response["id"], response["created_at"], response["model"]) == ("resp_1", 7, "m")
    assert (found["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "the engine died"}
    assert found["error"]["message"] == "the engine died"
    assert found["sequence_number"] == 42


def test_its_number_follows_the_last_that_was_sent():
    created = event("response.created", sequence_number=0, response=BEGUN)
    quoting = json.dumps({"sequence_number": 99})
    last = event("a", sequence_number=5) + event("b", sequence_number=6, delta=quoting)
    assert ending(created, last)["sequence_number"] == 7
    assert ending(created, event("b", delta=quoting))["sequence_number"] == 1
    assert ending(b"", b"")["sequence_number"] == 0
    assert ending(created, b"tail of a long text", number=8)["sequence_number"] == 9
    assert ending(created, last, number=5)["sequence_number"] == 7


@pytest.mark.parametrize("seed", range(50))
def test_whatever_an_engine_sent_it_is_one_event(seed):
    rng = random.Random(seed)
    whole = event("response.created", sequence_number=3, response=BEGUN) + event("x", a="é\n")
    bits = bytearray(whole[: rng.randrange(len(whole))])
    for _ in range(rng.randrange(20)):
        bits[rng.randrange(len(bits)) if bits else 0 :] += rng.randbytes(rng.randrange(4))
    ending(bytes(bits), rng.randbytes(50), "line one\nline two")


@pytest.mark.parametrize(
    "first",
    [
        b'data: {"response": {"id": 5}}\n\n',
        b'data: {"response": 5}\n\n',
        b"data: {}\n\n",
        b'data: {"response": {"id": "resp_1", "created_at": {"a": 1}, "model": [1]}}\n\n',
        b'data: {"response": {"id": "' + b"x" * 300,
    ],
)
def test_odd_beginnings(first):
    ending(first, b"")
