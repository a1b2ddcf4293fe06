"""Whom a frame about an answer's place may name, and whose digest a refusal brings."""

import pytest

from mesh.core.model import events as ev
from mesh.session.answer import AnswerReceiver
from schemas import exchange, wire
from schemas.exchange import Frame, FrameView
from schemas.state import encode_state
from tests.mesh.core.build import digest


def refused(region="eu", replica="", digest=""):
    return wire.encode(exchange.Refused("full", region, replica, -1, -1, digest))


@pytest.mark.parametrize(
    "names", [("Eu", ""), ("eu.x", ""), ("eu", "G 1"), ("", ""), ("x" * 40, "")]
)
def test_a_refusal_by_nobody_that_can_be_is_no_frame(names):
    with pytest.raises(wire.WireError):
        AnswerReceiver(7, 2, "_INBOX.us.r1.7-2-x").feed(
            FrameView(Frame.REFUSED, 0, refused(*names)), 0.0
        )


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_refusal_s_digest_is_the_asked_router_s_until_an_agent_has_the_request(is_placed):
    state = encode_state(digest("eu")).decode()
    answer = AnswerReceiver(7, 2, "_INBOX.us.r1.7-2-x")
    answer.asked = "eu"
    if is_placed:
        answer.feed(FrameView(Frame.PLACED, 0, wire.encode(exchange.Placed("eu", "g1"))), 0.0)
    assert isinstance(
        answer.feed(FrameView(Frame.REFUSED, 0, refused(digest=state)), 0.0), ev.AttemptRefused
    )
    assert (answer.fresh is None) is is_placed
