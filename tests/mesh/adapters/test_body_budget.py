import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.adapters.body_budget import UNANNOUNCED_BYTES, BodyBudget


def test_what_fits_is_taken_and_what_does_not_is_not():
    budget = BodyBudget(limit_bytes=100)
    assert budget.take(60) == 60
    assert budget.take(41) is None
    assert budget.take(40) == 40
    budget.give_back(60)
    assert budget.take(60) == 60


def test_an_unannounced_length_is_guessed_and_settled():
    budget = BodyBudget(limit_bytes=2 * UNANNOUNCED_BYTES)
    taken = budget.take(None)
    assert taken == UNANNOUNCED_BYTES
    budget.settle(taken, 7)
    assert budget.taken_bytes == 7


def test_giving_back_what_was_not_taken_is_our_own_fault():
    with pytest.raises(AssertionError):
        BodyBudget().give_back(1)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90))))
def test_nothing_is_left_when_everybody_has_left(bodies):
    budget = BodyBudget(limit_bytes=100)
    kept = []
    for announced, actual in bodies:
        taken = budget.take(announced)
        if taken is not None:
            budget.settle(taken, actual)
            kept.append(actual)
        assert budget.taken_bytes == sum(kept)
    for actual in kept:
        budget.give_back(actual)
    assert budget.taken_bytes == 0
