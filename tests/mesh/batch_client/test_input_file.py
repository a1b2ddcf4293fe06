"""What is wrong with an input file is found before it is sent, each with its line."""

import json

import pytest

from mesh.batch_client.input_file import check
from schemas.batch import ERRORS_MAX
from schemas.http import CHAT

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def line(custom_id: object = "a", **changed: object) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY, **changed}
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("content", "where", "said"),
    [
        ("", None, "empty"),
        ("\n\n", None, "no lines"),
        (line("a") + "\n{broken\n", 2, "expected a string key at column 2."),
        (line("a") + "\n\n" + line("b"), 2, "The line is empty."),
        (line("a") + "\n \t\r\n" + line("b"), 2, "The line is empty."),
        (line("a") + "\n" + line("a"), 2, "line 1"),
        (line("a", method="GET"), 1, "POST"),
        (line("a", url="/v1/embeddings"), 1, "/v1/chat/completions"),
        (line("a", body={"messages": []}), 1, "model"),
        (line("a", body={**BODY, "stream": True}), 1, "stream"),
        (line(7), 1, "custom_id"),
        (line("a") + "\n" + line("b", body=3), 2, "object"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, content, where, said):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    [error] = check(path, CHAT).errors
    assert error.line == where
    assert said in error.message


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("a").encode().replace(b"Hello", b"\xff\xfe"))
    [error] = check(path, CHAT).errors
    assert "UTF-8" in error.message


def test_all_wrong_lines_are_named_up_to_a_limit(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(f"{n}", method="PUT") for n in range(ERRORS_MAX + 5)))
    findings = check(path, CHAT)
    assert [error.line for error in findings.errors] == list(range(1, ERRORS_MAX + 1))


def test_a_good_file_has_its_lines_counted(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line(f"{n}") + "\r\n" for n in range(50)))
    findings = check(path, CHAT)
    assert (findings.lines, findings.errors) == (50, ())


def test_a_file_with_too_many_lines_is_refused(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(f"{n}") for n in range(11)))
    assert check(path, CHAT, lines_max=11).errors == ()
    [error] = check(path, CHAT, lines_max=10).errors
    assert "more than 10 lines" in error.message
