"""What a client's request says of itself while an attempt answers it."""

from dataclasses import replace

from mesh.core.model import effects as fx
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
