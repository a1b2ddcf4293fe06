"""How many requests may be computed again after an engine's server error."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.core.requests.retry_budget import PER_S_MIN, SAVED_S, SHARE, RetryBudget


def test_what_was_saved_is_spent_at_once_and_no_more():
    budget = RetryBudget()
    spent = sum(budget.spend(100.0, 5.0) for _ in range(1000))
    assert spent == SAVED_S * (PER_S_MIN + SHARE * 100.0)
    assert not budget.spend(100.0, 5.0)
    assert budget.spend(100.0, 5.05)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 500.0)), min_size=1, max_size=200))
def test_no_interleaving_spends_more_than_the_share_of_the_highest_rate(steps):
    budget, now, spent = RetryBudget(), 0.0, 0
    per_s = PER_S_MIN + SHARE * max(rate for _, rate in steps)
    for wait_s, rate in steps:
        now += wait_s
        spent += budget.spend(rate, now)
    assert spent <= (SAVED_S + now) * per_s + 1e-6
