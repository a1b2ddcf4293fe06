"""What a client's request says of itself while an attempt answers it."""

from dataclasses import replace

from mesh.core.model import effects as fx
from schemas.decision import Decision, Placement
from tests.mesh.adapters.build import Feeder, client_request


def decision(placement: Placement, **fields: str) -> Decision:
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


def test_the_receipt_of_a_local_placement_is_the_decision():
    held = client_request()
    held.decided = fx.Decided(1, decision(Placement.LOCAL, replica="us-0"))
    Feeder(held)
    assert held.receipt is held.decision
