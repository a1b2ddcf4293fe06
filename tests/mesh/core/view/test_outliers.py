"""Which places are left out after failures, for how long, and how they come back."""

from random import Random

import pytest

from mesh.core.view.outliers import (
    FORGET_S,
    IN_A_ROW,
    OUT_S,
    OUT_S_MAX,
    PLACES_MAX,
    SEEN,
    SILENT,
    STUCK_S,
    WIDTH_MAX,
    WINDOW,
    FailingPlaces,
)
from schemas.ids import ModelId
from schemas.state import RESULTS_MAX, EngineResults

A, M, OTHER = "us-0", ModelId("m"), ModelId("other")


def fail(places: FailingPlaces, times: int = IN_A_ROW, now: float = 0.0) -> None:
    for _ in range(times):
        places.failed(A, M, "HTTP 500", now)


def results(in_a_row: int, failed: int | None = None, of: int | None = None) -> EngineResults:
    failed = in_a_row if failed is None else failed
    return EngineResults(failed=failed, of=of or failed, in_a_row=in_a_row, what="HTTP 503")


def test_a_place_is_left_out_after_failures_in_a_row() -> None:
    places = FailingPlaces()
    assert not places.places
    fail(places, IN_A_ROW - 1)
    assert places.bars(A, M, 0.0) is None
    fail(places, 1)
    assert places.bars(A, M, 0.0) == "failing: 3 of its last 3, HTTP 500"
    assert places.bars("us-1", M, 0.0) is None
    assert places.out() == {A: "failing: 3 of its last 3, HTTP 500"}


def test_it_is_left_out_for_the_model_that_it_fails() -> None:
    places = FailingPlaces()
    fail(places)
    assert places.bars(A, OTHER, 0.0) is None


def test_half_of_the_last_ones_are_enough() -> None:
    places = FailingPlaces()
    for _ in range(4):
        fail(places, 1)
        places.answered(A, M)
    assert places.bars(A, M, 0.0) is None
    fail(places, 1)
    assert places.bars(A, M, 0.0) == "failing: 5 of its last 9, HTTP 500"


def test_a_few_failures_are_forgotten() -> None:
    places = FailingPlaces()
    fail(places, IN_A_ROW - 1)
    for _ in range(WINDOW):
        assert places.bars(A, M, 0.0) is None
        places.answered(A, M)
    assert not places.places


def test_it_comes_back_one_request_at_a_time_then_twice_as_many() -> None:
    places = FailingPlaces()
    fail(places)
    now, key, width = OUT_S, 0, 1
    while width <= WIDTH_MAX:
        begun = []
        while places.bars(A, M, now) is None and len(begun) < 100:
            key += 1
            begun.append(key)
            places.tries(A, M, key, now)
        assert len(begun) == width
        assert "tried again" in str(places.bars(A, M, now))
        for one in begun:
            places.left(A, M, one)
        places.answered(A, M)
        width *= 2
    assert places.bars(A, M, now) is None
    assert not places.out()
    fail(places, 1, now)
    assert places.bars(A, M, now) is None, "like any other: one failure is one"


def test_one_that_was_silent_is_back_with_its_first_answer() -> None:
    for weight, bars in ((SILENT, None), (1, "failing: 3 of its last 4, HTTP 500")):
        places = FailingPlaces()
        for _ in range(1 if weight == SILENT else IN_A_ROW):
            places.failed(A, M, "HTTP 500", 0.0, weight=weight)
        assert places.bars(A, M, 0.1) is not None
        places.answered(A, M)
        assert places.bars(A, M, 0.1) == bars
    places = FailingPlaces()
    for now in (0.0, 0.2):
        places.failed(A, M, "nothing in 0.6 s", now, weight=SILENT)
        places.answered(A, M)
    assert places.bars(A, M, 0.3) is not None, "it is no pause: it answers slowly"
    places = FailingPlaces()
    places.failed(A, M, "nothing in 0.6 s", 0.0, weight=SILENT)
    fail(places, 1, 0.1)
    places.answered(A, M)
    assert places.bars(A, M, 0.1) is not None, "it has failed besides"


def test_one_that_was_silent_and_answers_another_was_late() -> None:
    places = FailingPlaces()
    for now in (0.0, 0.2):
        places.failed(A, M, "nothing in 0.6 s", now, weight=SILENT)
    assert places.words(A, M) == "failing: 2 of its last 2, nothing in 0.6 s"
    places.answered(A, M)
    assert places.words(A, M) == "late: 2 of its last 3, nothing in 0.6 s"
    places.failed(A, M, "HTTP 500", 0.3)
    assert places.words(A, M) == "failing: 3 of its last 4, HTTP 500"


def test_a_request_that_failed_elsewhere_is_not_the_one_that_tries_it() -> None:
    places = FailingPlaces()
    fail(places)
    assert places.bars(A, M, OUT_S) is None
    assert places.bars(A, M, OUT_S, has_failed=True) is not None


def test_a_failure_while_it_comes_back_leaves_it_out_for_longer() -> None:
    places, now, out_s = FailingPlaces(), 0.0, OUT_S
    fail(places)
    for _ in range(8):
        assert places.bars(A, M, now + out_s - 0.1) is not None
        now += out_s
        assert places.bars(A, M, now) is None
        places.tries(A, M, 1, now)
        places.failed(A, M, "HTTP 500", now)
        places.left(A, M, 1)
        out_s = min(2 * out_s, OUT_S_MAX)


def test_an_attempt_whose_end_is_never_seen_bars_others_for_a_while_only() -> None:
    places = FailingPlaces()
    fail(places)
    places.tries(A, M, 1, OUT_S)
    assert places.bars(A, M, OUT_S + STUCK_S - 1.0) is not None
    places.expire(OUT_S + STUCK_S + 1.0)
    assert places.bars(A, M, OUT_S + STUCK_S + 1.0) is None


def test_what_its_agent_tells_is_of_all_its_models() -> None:
    places = FailingPlaces()
    places.told(A, results(IN_A_ROW - 1), 0.0)
    assert not places.places
    places.told(A, results(9, 9, 10), 0.0)
    assert places.bars(A, M, 0.0) == "failing: 9 of its last 10 requests, HTTP 503"
    assert places.bars(A, OTHER, 0.0) is not None


def test_what_was_told_counts_once() -> None:
    places = FailingPlaces()
    places.told(A, results(6), 0.0)
    for in_a_row in (6, 5, 4):  # they leave the agent's window; nothing has failed since
        places.told(A, results(in_a_row), OUT_S)
        assert places.bars(A, M, OUT_S) is None
    places.told(A, results(5), OUT_S + 1.0)
    assert places.bars(A, M, OUT_S + 1.0) is not None


def test_as_many_as_an_agent_can_tell_count_again() -> None:
    places = FailingPlaces()
    places.told(A, results(RESULTS_MAX), 0.0)
    places.told(A, results(RESULTS_MAX), OUT_S)
    assert places.bars(A, M, OUT_S) is not None


def test_an_answer_that_its_agent_tells_of_ends_it() -> None:
    places = FailingPlaces()
    places.told(A, results(9), 0.0)
    places.told(A, None, OUT_S)
    assert set(places.out()) == {A}, "no failure in its window, and no answer either"
    places.told(A, results(0, 9, 10), OUT_S)
    assert not places.places


def test_it_is_avoided_until_its_time_is_over_and_nothing_speaks_against_it() -> None:
    places = FailingPlaces()
    fail(places)
    assert places.avoided(0.0) == places.out()
    assert places.avoided(OUT_S) == places.out(), "for as long again people are told"
    late = 2 * OUT_S
    assert places.avoided(late) == {}, "the next request will show it"
    assert places.words(A, M) == "failing: 3 of its last 3, HTTP 500"
    places.tries(A, M, 1, late)
    assert places.avoided(late) == places.out()
    places.left(A, M, 1)
    places.told(A, results(9), late)
    later = late + 2 * OUT_S_MAX
    assert places.avoided(later) == places.out(), "its agent says so"
    places.told(A, None, later)
    assert places.avoided(later) == {}


def test_what_failed_long_ago_is_forgotten() -> None:
    places = FailingPlaces()
    fail(places)
    places.told("us-1", results(9), 0.0)
    places.expire(FORGET_S)
    assert places.places
    places.expire(FORGET_S + 1.0)
    assert not places.places


def test_there_is_a_limit_of_places() -> None:
    places = FailingPlaces()
    for number in range(PLACES_MAX):
        places.failed(f"eu-{number}", M, "reset", 0.0)
    fail(places)
    assert places.bars(A, M, 0.0) is None
    places.forget("eu-7")
    fail(places)
    assert places.bars(A, M, 0.0) is not None


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_leaves_a_place_usable_in_the_end(seed: int) -> None:
    dice, places, now = Random(seed), FailingPlaces(), 0.0
    begun: set[int] = set()
    for key in range(2000):
        now += dice.expovariate(2.0)
        places.expire(now)
        if places.bars(A, M, now) is None:
            places.tries(A, M, key, now)
            begun.add(key)
        if dice.random() < 0.1:
            places.told(A, dice.choice([None, results(0, 1, 2), results(3), results(9)]), now)
        if begun and dice.random() < 0.7:
            one = begun.pop()
            if dice.random() < 0.5:
                places.failed(A, M, "reset", now)
            elif dice.random() < 0.8:
                places.answered(A, M)
            places.left(A, M, one)
    for one in begun:
        places.left(A, M, one)
    now += OUT_S_MAX
    for _ in range(WIDTH_MAX + 2 * WINDOW):
        assert places.bars(A, M, now) is None
        places.answered(A, M)
    assert not places.places


def test_failures_that_clients_saw_count_twice() -> None:
    places = FailingPlaces()
    places.failed(A, M, "the stream was cut", 0.0, weight=SEEN)
    assert places.bars(A, M, 0.0) is None
    places.failed(A, M, "the stream was cut", 0.0, weight=SEEN)
    assert places.bars(A, M, 0.0) == "failing: 2 of its last 2, the stream was cut"
    places = FailingPlaces()
    for _ in range(2):
        places.failed(A, M, "", 0.0, weight=SEEN)
        places.answered(A, M)
    assert places.bars(A, M, 0.0) is None
    places.failed(A, M, "", 0.0, weight=SEEN)
    assert places.bars(A, M, 0.0) == "failing: 3 of its last 5"
