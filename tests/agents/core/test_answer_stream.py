"""Is it an event stream, and did it end whole?"""

import pytest

from agents.core.answer_stream import TAIL_BYTES, Tail
from agents.core.stream_content import starts_events
from agents.core.stream_end import incomplete


@pytest.mark.parametrize(
    ("head", "verdict"),
    [
        (b"data: {}\n\n", True),
        (b"data\n", True),
        (b"event: x\n", True),
        (b"id:1\n", True),
        (b"retry: 3\n", True),
        (b": ping\n\n", True),
        (b"\xef\xbb\xbfdata: x\n\n", True),
        (b"\r\n\r\ndata: x\n\n", True),
        (b"", None),
        (b"\xef", None),
        (b"\n", None),
        (b"dat", None),
        (b"data", None),
        (b"i", None),
        (b"\n" * 64, False),
        (b"datum: x", False),
        (b"{", False),
        (b"<html>", False),
        (b"Traceback (most recent call last)", False),
        (b"\xff\xfe", False),
    ],
)
def test_starts(head, verdict) -> None:
    assert starts_events(head) is verdict


def test_no_prefix_of_a_good_start_is_called_bad() -> None:
    for text in (b"data: {}\n\n", b"event: x\n", b"\xef\xbb\xbf\r\nretry: 1\n", b":\n\n"):
        assert [n for n in range(len(text) + 1) if starts_events(text[:n]) is False] == []


def tail_of(*chunks: bytes) -> Tail:
    tail = Tail()
    for chunk in chunks:
        tail.add(chunk)
    return tail


@pytest.mark.parametrize(
    ("chunks", "complaint"),
    [
        ((b"data: 1\n\n", b"data: [DONE]\n\n"), None),
        ((b"data: 1\n\n",), None),
        ((b"data: 1\r\n\r", b"\n"), None),
        ((b"data: 1\r\r",), None),
        ((b"data: [DONE]",), None),
        ((b"data: [DONE]\n",), None),
        ((b"data: 1\n\n", b"data: 2"), "middle"),
        ((b"data: 1\n",), "middle"),
        ((b'data: {"text":"say [DONE]',), "middle"),
        ((b'data: {"text":"say data: [DONE]\n',), "middle"),
        ((b"data: 1\n\ndata:[DONE]\r\n",), None),
        ((b": ping\n\n",), "without one event"),
        ((b"data: " + b"x" * (2 * TAIL_BYTES) + b"\n\n",), None),
        ((b"data: " + b"x" * (2 * TAIL_BYTES),), "middle"),
    ],
)
def test_ends(chunks, complaint) -> None:
    tail = tail_of(*chunks)
    problem = incomplete(tail, tail.read())
    assert problem is None if complaint is None else complaint in problem


def test_the_tail_is_bounded_and_exact() -> None:
    chunks = [bytes([n % 251]) * (n % 97 + 1) for n in range(3000)]
    tail = tail_of(*chunks)
    whole = b"".join(chunks)
    assert tail.total == len(whole)
    assert tail.read() == whole[-TAIL_BYTES:]
    assert sum(map(len, tail._chunks)) < 2 * TAIL_BYTES
