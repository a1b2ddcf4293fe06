"""Frames that did not come: asked for once, passed over until they do, and taken up from there."""

import pytest

from mesh.session.answer import FramesMissing
from schemas.exchange import Frame
from tests.mesh.session.test_answer import EVENTS, Sender, failure


@pytest.mark.parametrize("number", [4, 0xFFFFFFFF], ids=["hole", "far ahead"])
def test_a_hole_is_told_once(number) -> None:
    sender = Sender(EVENTS)
    sender.data(b"data: 1\n\n")
    sender.data(b"data: 2\n\n")
    assert sender.send(Frame.DATA, b"4\n\n", number) == FramesMissing(3)
    assert sender.send(Frame.DATA, b"5\n\n", number) is None
    assert sender.answer.next_number == 3
    assert sender.answer.lost(3) == failure("frame 3 of the answer was lost", blameless=True)
    assert sender.answer.take() == b"data: 1\n\ndata: 2\n\n"


def test_an_answer_goes_on_where_it_broke_off() -> None:
    sender = Sender(EVENTS)
    sender.data(b"1\n\n")
    assert sender.send(Frame.DATA, b"3\n\n", 3) == FramesMissing(2)
    for number, text in ((1, b"1\n\n"), (2, b"2\n\n"), (3, b"3\n\n"), (3, b"3\n\n"), (4, b"4\n\n")):
        assert not isinstance(sender.send(Frame.DATA, text, number), FramesMissing)
    assert sender.answer.next_number != 2
    assert sender.answer.take() == b"1\n\n2\n\n3\n\n4\n\n"
    assert sender.send(Frame.DATA, b"6\n\n", 6) == FramesMissing(5), "another one"


def test_a_lost_frame_is_noticed_at_the_end() -> None:
    sender = Sender(EVENTS)
    sender.number += 1
    assert sender.end() == FramesMissing(1)
    assert sender.answer.end is None


def test_a_hole_before_anybody_has_a_name_is_a_failure_at_once() -> None:
    sender = Sender()
    lost = failure("frame 0 of the answer was lost", blameless=True)
    assert sender.send(Frame.DATA, b"2\n\n", 1) == lost
