import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.http.read_request import SMALL_BYTES, BodyBudget


def test_what_fits_is_taken_and_what_does_not_is_not():
    budget = BodyBudget(limit_bytes=100, for_small_bytes=0)
    assert budget.take(60)
    assert not budget.take(41)
    assert budget.taken_bytes == 60
    assert budget.take(40)
    budget.give_back(60)
    assert budget.take(60)


def test_large_bodies_leave_room_for_small_ones():
    budget = BodyBudget(limit_bytes=4 * SMALL_BYTES, for_small_bytes=SMALL_BYTES)
    for _ in range(3):  # one body, that grows
        assert budget.take(SMALL_BYTES, budget.taken_bytes)
    assert not budget.take(1, budget.taken_bytes)
    assert budget.take(1) and budget.take(SMALL_BYTES - 1)
    assert budget.is_full and not budget.take(1)


def test_it_is_full_when_a_small_body_may_not_fit():
    budget = BodyBudget(limit_bytes=4 * SMALL_BYTES, for_small_bytes=2 * SMALL_BYTES)
    assert budget.take(2 * SMALL_BYTES) and not budget.is_full
    assert budget.take(SMALL_BYTES) and not budget.is_full
    assert budget.take(1) and budget.is_full


def test_giving_back_what_was_not_taken_is_our_own_fault():
    with pytest.raises(AssertionError):
        BodyBudget().give_back(1)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90))))
def test_nothing_is_left_when_everybody_has_left(bodies):
    budget = BodyBudget(limit_bytes=100, for_small_bytes=0)
    kept = []
    for arrived, actual in bodies:
        if budget.take(arrived):
            budget.settle(arrived, actual)
            kept.append(actual)
        assert budget.taken_bytes == sum(kept)
    for actual in kept:
        budget.give_back(actual)
    assert budget.taken_bytes == 0
