"""A ticket wakes its handler for what the handler can use, and for nothing else."""

import asyncio
from dataclasses import replace

import pytest

from mesh.adapters.answer import EngineError
from schemas.decision import Decision, Placement
from tests.mesh.adapters.build import JSON, LOST, Feeder, ticket


async def turns() -> None:
    """Let everything that can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_handler_waits_until_the_answer_can_start():
    held = ticket()
    waiting = asyncio.create_task(held.until_startable())
    held.wake()  # a placement, say
    feeder = Feeder(held)
    feeder.data(b"data: 1")
    await turns()
    assert not waiting.done()
    feeder.data(b"\n\n")
    async with asyncio.timeout(20):
        await waiting


@pytest.mark.parametrize("settled", ["failure", "engine error"])
async def test_the_handler_is_woken_by_a_failure(settled):
    held = ticket()
    waiting = asyncio.create_task(held.until_startable())
    await turns()
    if settled == "failure":
        held.failure = LOST
    else:
        held.engine_error, held.pass_engine_error = EngineError(500, JSON, b"{}"), True
    held.wake()
    async with asyncio.timeout(20):
        await waiting


async def test_an_attempt_that_began_well_and_was_replaced_starts_nothing():
    held = ticket()
    Feeder(held).data(b"data: 1\n\n")
    Feeder(held).data(b"data: ")  # the next attempt
    waiting = asyncio.create_task(held.until_startable())
    await turns()
    assert not waiting.done()
    waiting.cancel()


async def test_bytes_come_as_they_are_there_and_end_with_the_answer():
    held = ticket()
    feeder = Feeder(held)
    feeder.data(b"data: 1\n\n")
    feeder.data(b"data: 2\n\n")
    assert await held.next_bytes() == b"data: 1\n\ndata: 2\n\n"
    waiting = asyncio.create_task(held.next_bytes())
    feeder.data(b"data: half")
    await turns()
    assert not waiting.done()
    feeder.data(b"\n\n")
    assert await waiting == b"data: half\n\n"
    feeder.data(b"data: [DONE]\n\n")
    feeder.end()
    assert [await held.next_bytes(), await held.next_bytes()] == [b"data: [DONE]\n\n", b""]


async def test_a_failure_ends_the_bytes_after_the_last_whole_event():
    held = ticket()
    feeder = Feeder(held)
    feeder.data(b"data: 1\n\ndata: half")
    feeder.fail()
    assert [await held.next_bytes(), await held.next_bytes()] == [b"data: 1\n\n", b""]


def decision(placement: Placement, **fields: str) -> Decision:
    return Decision(
        request="q-1", region="us", policy="least-load", placement=placement, reason="", **fields
    )


async def test_the_receipt_names_the_replica_that_a_peer_chose():
    held = ticket()
    assert held.receipt is None
    held.decision = decision(Placement.PEER, peer="eu")
    assert held.receipt == held.decision
    Feeder(held)
    assert held.receipt == replace(held.decision, replica="g1")


async def test_the_receipt_of_a_local_placement_is_the_decision():
    held = ticket()
    held.decision = decision(Placement.LOCAL, replica="us-0")
    Feeder(held)
    assert held.receipt is held.decision
