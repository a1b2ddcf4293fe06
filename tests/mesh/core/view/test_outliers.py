"""Which places are left out after failures, for how long, and how they come back."""

from random import Random

import pytest

from mesh.core.view.outliers import (
    IN_A_ROW,
    OUT_S,
    OUT_S_MAX,
    PLACES_MAX,
    STUCK_S,
    WIDTH_MAX,
    WINDOW,
    FailingPlaces,
)
from schemas.state import EngineResults

A = "us-0"


def fail(places: FailingPlaces, times: int = IN_A_ROW, now: float = 0.0) -> None:
    for _ in range(times):
        places.failed(A, "HTTP 500", now)


def test_a_place_is_left_out_after_failures_in_a_row() -> None:
    places = FailingPlaces()
    assert not places
    fail(places, IN_A_ROW - 1)
    assert places.bars(A, 0.0) is None
    fail(places, 1)
    assert places.bars(A, 0.0) == "failing: 3 of its last 3, HTTP 500"
    assert places.bars("us-1", 0.0) is None
    assert places.out(0.0) == [A]


def test_half_of_the_last_ones_are_enough() -> None:
    places = FailingPlaces()
    for number in range(WINDOW):
        if number % 2:
            places.answered(A)
        else:
            places.failed(A, "reset", 0.0)
    assert places.bars(A, 0.0) == "failing: 5 of its last 9, reset" or places.out(0.0) == [A]


def test_a_few_failures_are_forgotten() -> None:
    places = FailingPlaces()
    fail(places, IN_A_ROW - 1)
    for _ in range(WINDOW):
        assert places.bars(A, 0.0) is None
        places.answered(A)
    assert not places


def test_it_comes_back_one_request_at_a_time_then_twice_as_many() -> None:
    places = FailingPlaces()
    fail(places)
    now, key, width = OUT_S, 0, 1
    while width <= WIDTH_MAX:
        begun = []
        while places.bars(A, now) is None and len(begun) < 100:
            key += 1
            begun.append(key)
            places.tries(A, key, now)
        assert len(begun) == width
        assert "tried again" in str(places.bars(A, now))
        for one in begun:
            places.left(A, one)
        places.answered(A)
        width *= 2
    assert places.bars(A, now) is None
    assert not places.is_known(A)


def test_a_failure_while_it_comes_back_leaves_it_out_for_longer() -> None:
    places, now, out_s = FailingPlaces(), 0.0, OUT_S
    fail(places)
    for _ in range(8):
        assert places.bars(A, now + out_s - 0.1) is not None
        now += out_s
        assert places.bars(A, now) is None
        places.tries(A, 1, now)
        places.failed(A, "HTTP 500", now)
        places.left(A, 1)
        out_s = min(2 * out_s, OUT_S_MAX)


def test_an_attempt_whose_end_is_never_seen_bars_others_for_a_while_only() -> None:
    places = FailingPlaces()
    fail(places)
    places.tries(A, 1, OUT_S)
    assert places.bars(A, OUT_S + 1.0) is not None
    assert places.bars(A, OUT_S + STUCK_S + 1.0) is None


def test_what_its_agent_tells_counts_once() -> None:
    places = FailingPlaces()
    places.told(A, EngineResults(failed=2, of=2, in_a_row=IN_A_ROW - 1, what="HTTP 500"), 0.0)
    assert not places
    told = EngineResults(failed=9, of=10, in_a_row=9, what="HTTP 503")
    places.told(A, told, 0.0)
    assert "HTTP 503" in str(places.bars(A, 0.0))
    places.told(A, told, OUT_S)
    assert places.bars(A, OUT_S) is None, "nothing has failed since"
    places.told(A, EngineResults(failed=10, of=11, in_a_row=10, what="HTTP 503"), OUT_S + 1.0)
    assert places.bars(A, OUT_S + 1.0) is not None


def test_an_agent_that_tells_of_as_many_failures_as_the_last_time_is_believed_again() -> None:
    places, three = FailingPlaces(), EngineResults(failed=3, of=9, in_a_row=3, what="HTTP 500")
    places.told(A, three, 0.0)
    places.told(A, EngineResults(failed=3, of=10, in_a_row=0, what="HTTP 500"), OUT_S)
    assert places.bars(A, OUT_S) is None
    places.told(A, three, OUT_S)
    assert places.bars(A, OUT_S) is not None


def test_there_is_a_limit_of_places() -> None:
    places = FailingPlaces()
    for number in range(PLACES_MAX + 10):
        places.failed(f"us-{number}", "reset", 0.0)
    fail(places)
    assert places.bars(A, 0.0) is None or A == "us-0"
    places.forget(A)
    assert places.bars(A, 0.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_leaves_a_place_usable_in_the_end(seed: int) -> None:
    dice, places, now = Random(seed), FailingPlaces(), 0.0
    begun: set[int] = set()
    for key in range(2000):
        now += dice.expovariate(2.0)
        if places.bars(A, now) is None:
            places.tries(A, key, now)
            begun.add(key)
        if begun and dice.random() < 0.7:
            one = begun.pop()
            if dice.random() < 0.5:
                places.failed(A, "reset", now)
            elif dice.random() < 0.8:
                places.answered(A)
            places.left(A, one)
    for one in begun:
        places.left(A, one)
    now += OUT_S_MAX
    for _ in range(WIDTH_MAX + WINDOW):
        assert places.bars(A, now) is None
        places.answered(A)
    assert not places
