"""AgentCore and those who asked: silent, restarted, or behind a bus that is away."""

import pytest

from agents.core import effects, events
from agents.core.agent import SILENT_ROUTER
from agents.core.requests import PART_TIMEOUT_S
from agents.core.routers import MISSED_S, RouterKey
from schemas.exchange import Outcome
from tests.agents.core.bench import HEADERS, Bench, inbox

R1 = RouterKey("us", "r1")
SILENT = SILENT_ROUTER


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.read()
    return bench


def test_a_silent_router_is_given_up(bench) -> None:
    bench.work(1)
    bench.tick(2.9)
    [abort] = bench.tick(0.1)
    assert (abort.outcome, abort.detail) == (Outcome.CANCELLED, SILENT)


def test_after_a_stop_of_the_agent_no_router_counts_as_silent(bench) -> None:
    """What routers said meanwhile is still to be read; and what was sent to them may be lost."""
    bench.work(1, **{"Mesh-Deadline-Ms": "60000"})
    assert bench.stand_still(10.0) == []
    assert bench.tick(2.9) == []
    assert bench.feed(events.AliveArrived("us", "r1", 1)) == [effects.ResyncRouter(R1)]
    assert bench.tick(2.9) == []
    [abort] = bench.tick(0.1)
    assert abort.detail == SILENT


def test_after_a_stop_the_agent_waits_for_the_next_part_of_a_body(bench) -> None:
    bench.work(1, **{"Mesh-Deadline-Ms": "60000", "Mesh-Body-Bytes": "4"})
    assert bench.stand_still(PART_TIMEOUT_S + 1.0) == []
    bench.feed(events.AliveArrived("us", "r1", 1))
    [handed] = bench.feed(events.BodyPartArrived(inbox(1), 0, b"abcd"))
    assert handed.body == b"abcd"


def test_a_router_that_missed_something_is_spoken_up_to(bench) -> None:
    bench.work(1)
    assert bench.tick(MISSED_S) == []
    assert bench.feed(events.AliveArrived("us", "r1", 1)) == [effects.ResyncRouter(R1)]
    assert bench.feed(events.AliveArrived("us", "r1", 1)) == []


def test_an_answer_outlives_its_bus(bench) -> None:
    bench.work(1, **{"Mesh-Deadline-Ms": "60000"})
    assert bench.feed(events.BusDisconnected()) == []
    bench.read()
    assert bench.tick(20.0) == []
    assert bench.feed(events.BusReconnected()) == []
    assert bench.tick(2.9) == []
    assert bench.feed(events.AliveArrived("us", "r1", 1)) == [effects.ResyncRouter(R1)]


def test_a_router_that_does_not_come_back_with_the_bus_is_given_up(bench) -> None:
    bench.work(1)
    bench.feed(events.BusDisconnected())
    bench.feed(events.BusReconnected())
    [abort] = bench.tick(3.0)
    assert abort.detail == SILENT


def test_a_restarted_router_orphans_only_its_own_answers(bench) -> None:
    bench.feed(events.AliveArrived("us", "r1", 1))
    bench.work(1)
    bench.feed(events.WorkArrived(inbox(2, "r1", "eu"), HEADERS, b"{}"))
    [abort] = bench.feed(events.AliveArrived("us", "r1", 2))
    assert abort.inbox == inbox(1)
