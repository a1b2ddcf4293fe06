"""A credit that was lost with the bus is given again, before the answer waits for ever."""

from mesh.session.answer import CREDIT_BYTES, AnswerReceiver
from schemas.exchange import Credit, Frame, FrameView, Head
from schemas.wire import encode

INBOX = "_INBOX.us.r1.1"


def test_whoever_says_that_it_works_hears_where_its_client_is() -> None:
    answer = AnswerReceiver(1, 1, INBOX)
    head = encode(Head(200, "text/event-stream", "eu", "g1"))
    answer.feed(FrameView(Frame.HEAD, 0, head), 0.0)
    answer.feed(FrameView(Frame.DATA, 1, b":" * (CREDIT_BYTES - 2) + b"\n\n"), 0.0)
    taken = len(answer.take())
    assert answer.credit_due() == Credit(INBOX, taken)  # and is lost
    assert answer.credit_due() is None
    answer.feed(FrameView(Frame.WORKING, 2, b""), 5.0)
    assert answer.credit_due() == Credit(INBOX, taken)
    assert answer.credit_due() is None
