"""What a client's request says of itself while an attempt answers it."""

from dataclasses import replace

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.record import Step
from schemas.decision import Decision, Placement
from tests.mesh.adapters.build import Feeder, client_request


def decision(placement: Placement, **fields: object) -> Decision:
    return Decision(
        request="q-1", region="us", policy="least-load", placement=placement, reason="", **fields
    )


def test_the_receipt_names_the_replica_that_a_peer_chose():
    held = client_request()
    assert held.receipt is None
    held.decided = fx.Decided(1, decision(Placement.PEER, peer="eu"))
    assert held.receipt == held.decision
    Feeder(held)
    assert held.receipt == replace(held.decision, replica="g1")


def test_once_the_answer_has_begun_the_receipt_says_what_the_wait_for_it_consists_of():
    held = client_request()
    held.decided = fx.Decided(1, decision(Placement.PEER, peer="eu", held_s=0.5))
    Feeder(held)
    held.answer.peer_held_s = 1.0
    held.first_byte_at = held.request.arrived_at + 2.0
    receipt = held.receipt
    parts_s = (receipt.held_s, receipt.peer_held_s, receipt.attempts_s)
    assert (parts_s, receipt.ttft_s) == ((0.5, 1.0, 0.5), 2.0)


def test_an_answer_that_is_not_streamed_has_no_time_to_first_token():
    held = client_request()
    held.decided = fx.Decided(1, decision(Placement.LOCAL, replica="us-0", held_s=0.5))
    Feeder(held, "application/json")
    held.first_byte_at = held.request.arrived_at + 2.0
    assert (held.receipt.attempts_s, held.receipt.ttft_s) == (1.5, None)


def test_the_receipt_of_a_local_placement_is_the_decision():
    held = client_request()
    held.decided = fx.Decided(1, decision(Placement.LOCAL, replica="us-0"))
    Feeder(held)
    assert held.receipt == held.decision


HELD = fx.Decided(1, decision(Placement.HOLD, held_s=0.5))
SENT = fx.Decided(1, decision(Placement.LOCAL, replica="us-0", held_s=0.5))
FAILED = ev.AttemptFailed(1, 1, "gone")


@pytest.mark.parametrize(
    ("steps", "held_s"),
    [((HELD,), 4.5), ((SENT, FAILED), 4.5), ((SENT,), 0.5), ((FAILED, SENT), 0.5), ((), 0.5)],
)
def test_one_that_ends_in_the_hold_queue_was_held_until_then(steps, held_s):
    """Also after an attempt that failed, which the core returns to the queue without a word."""
    record = client_request()
    record.steps = tuple(Step(6.0, what) for what in steps)
    record.decided = next((what for what in reversed(steps) if what is not FAILED), SENT)
    record.count_last_hold(10.0)
    assert record.decision.held_s == held_s


@pytest.mark.parametrize(("steps", "is_noted"), [((SENT,), True), ((HELD,), False),
                                                 ((SENT, FAILED), False), ((), False)])  # fmt: skip
def test_an_attempt_was_lost_if_its_request_is_held_and_nothing_says_why(steps, is_noted):
    record = client_request()
    record.steps = tuple(Step(6.0, what) for what in steps)
    record.decided = next((what for what in steps if what is not FAILED), None)
    record.note_return(8.0)
    added = record.steps[len(steps) :]
    assert [step.at for step in added] == ([8.0] if is_noted else [])
    assert not is_noted or "us-0 was lost" in added[0].what.detail
