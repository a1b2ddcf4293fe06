"""What a job's input file may hold, how its lines are ordered, and what is wrong with others."""

import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Iterator

import orjson
import pytest

from mesh.batch.job_file import (
    EMPTY_LINES_MAX,
    FileCheck,
    JobIndex,
    LineInvalid,
    LineSplitter,
    read_line,
)
from schemas.batch import CUSTOM_ID_CHARS_MAX, ERRORS_MAX
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS


def line(custom_id: object = "a", **changes: object) -> dict:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def body(**changes: object) -> dict:
    fields = line()["body"] | changes
    return {name: value for name, value in fields.items() if value is not ...}


def jsonl(*lines: dict) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def check(
    data: bytes, chunk_bytes: int = 1 << 16, **limits: int
) -> tuple[FileCheck, JobIndex | None]:
    checked = FileCheck(CHAT, **{"lines_max": 1000} | limits)
    for start in range(0, len(data), chunk_bytes):
        checked.feed(data[start : start + chunk_bytes])
    return checked, checked.end()


def test_lines_are_the_same_however_the_file_is_cut() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(200):
        texts = [b"x" * dice.randrange(1, 9) for _ in range(dice.randrange(1, 6))]
        ends = [dice.choice((b"\n", b"\r\n")) for _ in texts]
        mark = dice.choice((b"", b"\xef\xbb\xbf"))
        data = mark + b"".join(map(b"".join, zip(texts, ends, strict=True)))
        if dice.random() < 0.3:
            data = data.rstrip()
        data += b"\n" * dice.randrange(3)
        splitter, found, at = LineSplitter(8), [], 0
        while at < len(data):
            step = dice.randrange(1, 7)
            found += splitter.feed(data[at : at + step])
            at += step
        found += splitter.end()
        assert [each.data for each in found] == texts
        assert [each.number for each in found] == list(range(1, len(texts) + 1))
        for each in found:
            assert data[each.offset :].startswith(each.data or b"?")


def test_a_line_that_is_too_long_is_not_kept() -> None:
    splitter = LineSplitter(10)
    tracemalloc.start()
    found = [each for _ in range(1000) for each in splitter.feed(b"x" * 10_000)]
    assert tracemalloc.get_traced_memory()[0] < 100_000
    tracemalloc.stop()
    found += splitter.feed(b"\nshort\n0123456789\r\n01234567890\n")
    assert [each.data for each in found] == [None, b"short", b"0123456789", None]


def test_an_empty_line_between_others_is_a_line() -> None:
    splitter = LineSplitter()
    found = [*splitter.feed(b"a\n\n\nb\n\n\n"), *splitter.end()]
    assert [(each.number, each.data) for each in found] == [(1, b"a"), (2, b""), (4, b"b")]


DEEP = json.loads("[" * 300 + "]" * 300)
LINE_ERRORS = [
    (line(method=...), "missing_required_parameter", "method"),
    (line(method="GET"), "invalid_method", "method"),
    (line(url=...), "missing_required_parameter", "url"),
    (line(url=COMPLETIONS), "invalid_url", "url"),
    (line(url=3), "invalid_url", "url"),
    (line(body=...), "missing_required_parameter", "body"),
    (line(body=[]), "invalid_type", "body"),
    (line(body=body(stream=True)), "unsupported_parameter", "body.stream"),
    (line(body=body(model=...)), "missing_required_parameter", "body.model"),
    (line(body=body(model="")), "invalid_value", "body.model"),
    (line(body=body(model="m" * 257)), "invalid_value", "body.model"),
    (line(body=body(messages=...)), "missing_required_parameter", "body.messages"),
    (line(body=body(messages=[])), "invalid_value", "body.messages"),
    (line(body=body(logit_bias=DEEP)), "invalid_value", "body"),
    (line(body=body(user="u" * 5000)), "line_too_large", "body"),
]


@pytest.mark.parametrize(("fields", "code", "param"), LINE_ERRORS)
def test_a_line_with_a_mistake_has_an_error_of_its_own(fields, code, param) -> None:
    data = jsonl(line("first"), fields, line("last"))
    checked, index = check(data, body_bytes_max=4096)
    assert index is not None
    assert not checked.errors
    assert [place.number for place in index.good] == [1, 3]
    (place,) = index.wrong
    raw = data[place.offset : place.offset + place.length]
    with pytest.raises(LineInvalid) as caught:
        read_line(raw, place.number, CHAT, 4096)
    assert (caught.value.error.code, caught.value.error.param) == (code, param)
    assert (caught.value.error.line, caught.value.custom_id) == (2, "a")


FILE_ERRORS = [
    (b"", "empty_file", None),
    (b"\n\r\n", "empty_file", None),
    (jsonl(line("x")) + b'{"custom_id": \n', "invalid_json_line", 2),
    (jsonl(line("x")) + b"\n" + jsonl(line("y")), "invalid_json_line", 2),
    (b"[1]\n", "invalid_json_line", 1),
    (b'{"custom_id": NaN}\n', "invalid_json_line", 1),
    (b'{"custom_id": "\\ud800"}\n', "invalid_json_line", 1),
    (b'{"custom_id": "\xe9"}\n', "invalid_encoding", 1),
    ('{"custom_id": "x"}\n'.encode("utf-16"), "invalid_encoding", 1),
    (jsonl(line(...)), "missing_required_parameter", 1),
    (jsonl(line("")), "invalid_value", 1),
    (jsonl(line(7)), "invalid_value", 1),
    (jsonl(line("x" * (CUSTOM_ID_CHARS_MAX + 1))), "invalid_value", 1),
    (jsonl(line("x"), line("y"), line("x")), "duplicate_custom_id", 3),
    (jsonl(line("x", method="GET"), line("x")), "duplicate_custom_id", 2),
    (jsonl(line("x"), line("y" * 600)), "line_too_large", 2),
    (jsonl(*(line(f"{n}") for n in range(6))), "too_many_lines", None),
    (jsonl(line("x")) + b"\n" * (EMPTY_LINES_MAX + 5), "too_many_lines", None),
]


@pytest.mark.parametrize(("data", "code", "number"), FILE_ERRORS)
@pytest.mark.parametrize("chunk_bytes", [1, 1000])
def test_a_file_that_fails_its_job(data, code, number, chunk_bytes) -> None:
    checked, index = check(data, chunk_bytes, lines_max=5, line_bytes_max=700)
    assert index is None
    assert (checked.errors[0].code, checked.errors[0].line) == (code, number)


def test_errors_that_are_listed_have_a_limit() -> None:
    checked, index = check(b"{\n" * 5000, lines_max=10_000)
    assert index is None
    assert [error.line for error in checked.errors] == list(range(1, ERRORS_MAX + 1))
    assert checked.is_over


def test_the_limit_of_lines_is_allowed() -> None:
    _, index = check(jsonl(*(line(f"{n}") for n in range(5))), lines_max=5)
    assert index is not None
    assert index.total == 5


@pytest.mark.parametrize("chunk_bytes", [1, 10_000])
def test_empty_lines_at_the_end_are_not_counted(chunk_bytes) -> None:
    data = jsonl(*(line(f"{n}") for n in range(5)))
    checked, index = check(data + b"\n\r\n\n", chunk_bytes, lines_max=5)
    assert not checked.errors
    assert index is not None
    assert index.total == 5


def test_the_body_is_the_clients_json() -> None:
    fields = body(temperature=0.1, seed=2**63, extra={"é": [None, 1e300]}, stream=False)
    read = read_line(orjson.dumps(line(body=fields)), 1, CHAT)
    assert orjson.loads(read.body) == fields
    assert (read.custom_id, read.model, read.url) == ("a", "tiny", CHAT)


def test_lines_that_share_a_prefix_are_neighbours() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    books = ["".join(dice.choices("abcdefgh ", k=3000)) for _ in range(8)]
    chapters = [book + "".join(dice.choices("ij", k=2000)) for book in books for _ in range(3)]
    texts = [f"{chapter} {n}" for n, chapter in enumerate(chapters * 4)]
    dice.shuffle(texts)
    messages = [[{"role": "user", "content": text}] for text in texts]
    data = jsonl(*(line(f"{n}", body=body(messages=m)) for n, m in enumerate(messages)))
    _, index = check(data)
    assert index is not None
    assert sorted(place.number for place in index.good) == list(range(1, len(texts) + 1))
    for length, kinds in ((3000, 8), (4800, 24)):
        starts = [texts[place.number - 1][:length] for place in index.good]
        runs = sum(a != b for a, b in itertools.pairwise(starts)) + 1
        assert runs == kinds, f"{runs} runs of {kinds} beginnings of {length} characters"


def big_file(lines: int) -> Iterator[bytes]:
    """A file of so many lines of 1 kB, in pieces of 1,000 lines."""
    messages = [{"role": "user", "content": "y" * 900}]
    piece = jsonl(*(line(f"id-{n}", body=body(messages=messages)) for n in range(1000)))
    for number in range(lines // 1000):
        yield piece.replace(b"id-", b"id-%d-" % number)


def test_a_line_takes_little_memory() -> None:
    lines = 10_000
    checked = FileCheck(CHAT, lines_max=lines)
    tracemalloc.start()
    for piece in big_file(lines):
        checked.feed(piece)
    index = checked.end()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index is not None
    assert peak / lines < 800  # the piece of 1 MB that is fed included


def test_many_lines() -> None:
    checked = FileCheck(CHAT, lines_max=20_000)
    began = time.process_time()
    for piece in big_file(20_000):
        checked.feed(piece)
    index = checked.end()
    took_s = time.process_time() - began
    assert index is not None
    assert index.total == 20_000
    print(f"{took_s:.1f} s")
    assert took_s < 6


def test_lines_of_embeddings_are_read_and_keep_their_order() -> None:
    def embedding(custom_id: str, **fields: object) -> dict:
        given = {"model": "tiny", "input": "z" * 5000, **fields}
        return line(custom_id, url=EMBEDDINGS, body=given)

    read = read_line(orjson.dumps(embedding("a", input=["x", "y"])), 1, EMBEDDINGS)
    assert (read.url, read.model, read.prompt.data) == (EMBEDDINGS, "tiny", b"xy")
    for wrong, param in (
        (embedding("b", input=[]), "body.input"),
        (embedding("b", input=["x", 1]), "body.input"),
        (line("b"), "url"),
    ):
        with pytest.raises(LineInvalid) as refused:
            read_line(orjson.dumps(wrong), 1, EMBEDDINGS)
        assert refused.value.error.param == param
    checked = FileCheck(EMBEDDINGS, lines_max=10)
    checked.feed(jsonl(embedding("b"), embedding("a", input="a" * 5000), embedding("c")))
    index = checked.end()
    assert index is not None
    assert [place.number for place in index.good] == [1, 2, 3]
