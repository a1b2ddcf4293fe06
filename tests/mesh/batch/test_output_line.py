"""Lines of output and error files."""

import orjson
import pytest

from mesh.batch import output_line
from schemas.ids import is_request_id


def test_an_answer() -> None:
    result = output_line.answered("batch_1", 7, "é\n", 200, "r-1", b'{\n "choices": []}')
    assert not result.is_error
    assert b"\n" not in result.line
    fields = orjson.loads(result.line)
    assert is_request_id(fields.pop("id"))
    assert fields == {
        "custom_id": "é\n",
        "response": {"status_code": 200, "request_id": "r-1", "body": {"choices": []}},
        "error": None,
    }


@pytest.mark.parametrize("body", [b'{"error": {"message": "no"}}', b"no such model", b"\xff"])
def test_an_engines_error_is_a_response_in_the_error_file(body) -> None:
    result = output_line.answered("batch_1", 7, "x", 404, "r-1", body)
    fields = orjson.loads(result.line)
    assert result.is_error
    assert fields["error"] is None
    assert fields["response"]["status_code"] == 404
    assert isinstance(fields["response"]["body"]["error"]["message"], str)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[" * 500 + b"]" * 500])
def test_an_answer_that_is_no_json_is_an_error(body) -> None:
    result = output_line.answered("batch_1", 7, "x", 200, "r-1", body)
    assert (result.status, result.is_error) == (0, True)
    assert orjson.loads(result.line)["error"]["code"] == output_line.BROKEN


def test_no_answer() -> None:
    result = output_line.unanswered("batch_1", 7, "x", output_line.EXPIRED, "It is over.")
    fields = orjson.loads(result.line)
    assert result.is_error
    assert fields["response"] is None
    assert fields["error"] == {"code": "batch_expired", "message": "It is over."}


def test_an_id_belongs_to_a_line() -> None:
    ids = {output_line.result_id(job, n) for job in ("a", "b") for n in range(50)}
    assert len(ids) == 100
    assert output_line.result_id("a", 1) == output_line.result_id("a", 1)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"usage": {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}}, (40, 2)),
        ({"usage": {"prompt_tokens": 40}}, (40, 0)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 2**40}}, (0, 0)),
        ({"usage": {"prompt_tokens": "42", "completion_tokens": None}}, (0, 0)),
        ({"usage": None}, (0, 0)),
        ({}, (0, 0)),
        ([], (0, 0)),
    ],
)
def test_tokens_are_those_that_the_engine_reported(body, tokens) -> None:
    result = output_line.answered("batch_1", 7, "x", 200, "r-1", orjson.dumps(body))
    assert output_line.tokens_of(*result) == tokens
