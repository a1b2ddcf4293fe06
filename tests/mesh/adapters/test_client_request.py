"""What a client's request says of itself while an attempt answers it."""

from dataclasses import replace

import pytest

from mesh.core.model import effects as fx
from mesh.session.answer import EngineError
from schemas.decision import Decision, Placement
from tests.mesh.adapters.build import JSON, LOST, Feeder, ticket


def test_it_is_startable_when_its_answer_is():
    held = ticket()
    assert not held.is_startable
    feeder = Feeder(held)
    feeder.data(b"data: 1")
    assert not held.is_startable
    feeder.data(b"\n\n")
    assert held.is_startable


@pytest.mark.parametrize("settled", ["failure", "engine error"])
def test_it_is_startable_with_a_failure(settled):
    held = ticket()
    if settled == "failure":
        held.failure = LOST
    else:
        held.engine_error, held.pass_engine_error = EngineError(500, JSON, b"{}"), True
    assert held.is_startable


def test_an_attempt_that_began_well_and_was_replaced_starts_nothing():
    held = ticket()
    Feeder(held).data(b"data: 1\n\n")
    Feeder(held).data(b"data: ")  # the next attempt
    assert not held.is_startable


def decision(placement: Placement, **fields: str) -> Decision:
    return Decision(
        request="q-1", region="us", policy="least-load", placement=placement, reason="", **fields
    )


def test_the_receipt_names_the_replica_that_a_peer_chose():
    held = ticket()
    assert held.receipt is None
    held.decided = fx.Decided(1, decision(Placement.PEER, peer="eu"))
    assert held.receipt == held.decision
    Feeder(held)
    assert held.receipt == replace(held.decision, replica="g1")


def test_the_receipt_of_a_local_placement_is_the_decision():
    held = ticket()
    held.decided = fx.Decided(1, decision(Placement.LOCAL, replica="us-0"))
    Feeder(held)
    assert held.receipt is held.decision
