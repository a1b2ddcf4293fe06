"""The retransmit buffer: for how long, how much of it, and which answers' frames."""

import pytest

from agents.adapters.outbox import KEPT_BYTES_MAX, KEPT_S, RetransmitBuffer
from agents.core.routers import SILENCE_ABROAD_S
from schemas.exchange import Frame, pack_frame, unpack_frame

US, EU = "_INBOX.us.r1", "_INBOX.eu.r1"


class Sent:
    """Keeps frames by a clock that is turned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.buffer = RetransmitBuffer()

    def frame(self, stream, number, kind=Frame.DATA, router=US) -> None:
        frame = pack_frame(kind, number, b"word")
        self.buffer.keep({router: [(stream, frame)]}, len(frame), self.now)

    def since(self, router=US, **streams) -> tuple[dict[str, list[int]], int]:
        posts, gone = self.buffer.since(router, streams, self.now)
        numbers: dict[str, list[int]] = {}
        for stream, frame in posts:
            numbers.setdefault(stream, []).append(unpack_frame(frame).number)
        return numbers, gone


@pytest.fixture
def sent():
    return Sent()


def test_each_answer_from_its_number_on(sent) -> None:
    for number in range(4):
        sent.frame("a", number)
        sent.frame("b", number)
        sent.frame("a", 10 + number, router=EU)
    assert sent.since(a=2, b=3) == ({"a": [2, 3], "b": [3]}, 0)
    assert sent.since(a=4, c=0) == ({}, 0), "nothing of it was sent yet"
    assert sent.since(EU, a=9) == ({}, 1), "what it wants is gone, and later ones are here"


def test_what_is_old_is_let_go(sent) -> None:
    sent.frame("a", 0)
    sent.now = KEPT_S
    sent.frame("a", 1)
    assert sent.since(a=0) == ({"a": [0, 1]}, 0)
    sent.now = KEPT_S + 0.1
    assert sent.since(a=0) == ({}, 1)
    sent.now = 3 * KEPT_S
    sent.buffer.forget(sent.now)
    assert sent.buffer.kept_bytes == 0


def test_of_too_much_the_oldest_goes(sent) -> None:
    for number in range(3):
        frame = pack_frame(Frame.DATA, number, b"")
        sent.buffer.keep({US: [("a", frame)]}, KEPT_BYTES_MAX // 2, 0.0)
    assert sent.since(a=1) == ({"a": [1, 2]}, 0)
    assert sent.buffer.kept_bytes <= KEPT_BYTES_MAX


def test_ends_of_one_routers_answers(sent) -> None:
    sent.frame("a", 0)
    sent.frame("a", 1, Frame.END)
    sent.frame("b", 0)
    sent.frame("c", 5, Frame.END, router=EU)
    assert [stream for stream, _ in sent.buffer.ends(US, sent.now)] == ["a"]


def test_it_is_kept_for_longer_than_any_router_may_be_silent():
    assert KEPT_S > SILENCE_ABROAD_S + 1.0
