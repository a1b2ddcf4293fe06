"""An answer whose last event is here, and what may become of it before its end is."""

import pytest

from mesh.core.model import events as ev
from mesh.session.answer import LAST_BYTES
from schemas import exchange, wire
from schemas.exchange import Frame, Outcome, pack_frame
from tests.mesh.session.test_answer import ATTEMPT, EVENTS, JSON, KEY, Sender, failure


@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n"])
@pytest.mark.parametrize("torn_at", [0, 3, 12])
@pytest.mark.parametrize("taken", [True, False])
def test_an_answer_that_has_said_all_can_only_end_well(done, torn_at, taken):
    """Nothing is learned from it: what it cost was lost with its end."""
    sender = Sender(EVENTS)
    sender.data(b"data: 1\n\n" + done[:torn_at])
    if taken:
        sender.answer.take()
    assert not sender.answer.is_whole
    sender.data(done[torn_at:])
    assert sender.answer.is_whole and sender.answer.end is None
    if taken:
        sender.answer.take()
    assert sender.end(Outcome.CANCELLED, "nobody was heard") == ev.AnswerEnded(KEY, ATTEMPT, None)
    assert sender.answer.end is not None and sender.answer.engine_failure is None


@pytest.mark.parametrize("how", ["lost frame", "lost replica"])
def test_so_does_one_whose_end_never_comes(how):
    sender = Sender(EVENTS)
    sender.data(b"data: 1\n\ndata: [DONE]\n\n")
    ended = ev.AnswerEnded(KEY, ATTEMPT, None)
    if how == "lost frame":
        assert sender.answer.lost(sender.number) == ended
    else:
        assert sender.send(Frame.LOST, wire.encode(exchange.Lost("eu", "g1")), 0) == ended


def test_plain_answers_are_whole_at_their_end_only():
    sender = Sender(JSON)
    sender.data(b"data: [DONE]\n\n")
    assert not sender.answer.is_whole
    assert sender.end(Outcome.ENGINE_FAILED, "died") == failure("died")


def test_an_engines_own_error_ends_its_stream():
    """It has passed as it came, so nothing is added to it; and nothing is learned."""
    sender = Sender(EVENTS)
    sender.data(b'data: {"error": {"message": "died"}}\n\n')
    sender.answer.take()
    assert sender.end(Outcome.ENGINE_FAILED, "died") == ev.AnswerEnded(KEY, ATTEMPT, None)
    assert (sender.answer.end is not None, sender.answer.engine_failure) == (True, "died")


def test_an_engines_own_error_is_a_failure_before_the_clients_first_byte():
    sender = Sender(EVENTS)
    sender.data(b'data: 1\n\ndata: {"error": {"message": "died"}}\n\ndata: [DONE]\n\n')
    ended = sender.end(Outcome.ENGINE_FAILED, "died")
    assert ended == ev.AttemptFailed(KEY, ATTEMPT, "died", 500)
    assert sender.answer.engine_error.body == b'{"error": {"message": "died"}}'


def test_what_was_given_out_last_is_kept_whichever_way_it_went():
    """An error event of Responses is numbered after it."""
    sender = Sender(EVENTS)
    sender.data(b"data: 1\n\n")
    assert sender.answer.given_out_last == b""
    sender.answer.take()
    assert sender.answer.given_out_last == b"data: 1\n\n"
    frame = pack_frame(Frame.DATA, sender.number, b"data: {2}\n\n")
    assert sender.answer.passing(frame) == b"data: {2}\n\n"
    assert sender.answer.given_out_last == b"data: {2}\n\n"
    sender.number += 1
    sender.data(b"data: " + b"x" * 2 * LAST_BYTES + b"\n\n")
    sender.answer.take()
    assert sender.answer.given_out_last == b"x" * (LAST_BYTES - 2) + b"\n\n"
