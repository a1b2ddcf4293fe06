"""The figures of work that an agent shows as a service."""

import pytest

from agents.core import events
from schemas.exchange import Outcome
from tests.agents.core.bench import Bench, inbox

FAILURES = [
    outcome
    for outcome in Outcome
    if outcome not in (Outcome.DONE, Outcome.CANCELLED, Outcome.PREEMPTED)
]


def test_the_time_of_requests_is_the_engines() -> None:
    bench = Bench()
    bench.read()
    for number, took_s in ((1, 2.0), (2, 0.5)):
        bench.work(number)
        bench.feed(events.RelayBegan(inbox(number)))
        bench.now += took_s
        bench.end(number)
        bench.now += 60.0
    totals = bench.core.totals
    assert (totals.ended, totals.failed, totals.cancelled) == (2, 0, 0)
    assert totals.engine_s == pytest.approx(2.5)
    assert totals.last_failure is None


@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failure_is_counted_with_its_kind(outcome) -> None:
    bench = Bench()
    bench.read()
    bench.work(1)
    bench.end(1, outcome)
    assert (bench.core.totals.failed, bench.core.totals.last_failure) == (1, outcome)


def test_a_cancel_is_no_failure_and_a_refusal_no_request() -> None:
    bench = Bench()
    bench.work(9)  # refused: its engine has not answered yet
    bench.read()
    bench.work(1)
    bench.feed(events.CancelArrived(inbox(1)))
    bench.end(1, Outcome.CANCELLED)
    totals = bench.core.totals
    assert (totals.ended, totals.failed, totals.cancelled) == (1, 0, 1)


def test_what_never_reached_the_engine_took_none_of_its_time() -> None:
    bench = Bench()
    bench.read()
    bench.work(1, **{"Mesh-Deadline-Ms": "0"})
    totals = bench.core.totals
    assert (totals.ended, totals.failed, totals.engine_s) == (1, 1, 0.0)
    assert totals.last_failure is Outcome.DEADLINE
