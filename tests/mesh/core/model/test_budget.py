"""Bytes a second, and a burst."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.rates import ByteBudget


def test_what_is_spent_is_earned_again_at_the_rate():
    budget = ByteBudget(100.0, 50.0)
    assert budget.spend(50, 0.0)
    assert not budget.spend(10, 0.05)
    assert budget.spend(10, 0.1)


def test_quiet_times_earn_no_more_than_the_burst():
    budget = ByteBudget(100.0, 50.0)
    assert budget.left(0.0) == budget.left(1000.0) == 50.0


def test_one_message_larger_than_the_burst_goes_when_the_bucket_is_full():
    budget = ByteBudget(100.0, 50.0)
    assert budget.spend(120, 0.0)
    assert not budget.spend(1, 0.6)  # it is in debt
    assert budget.spend(1, 0.72)


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 200)), max_size=60))
def test_never_more_than_the_burst_the_rate_and_one_message(asks):
    budget, now, spent = ByteBudget(100.0, 50.0), 0.0, 0
    for wait_s, size_bytes in asks:
        now += wait_s
        spent += size_bytes if budget.spend(size_bytes, now) else 0
    assert spent <= 50.0 + 100.0 * now + 200
