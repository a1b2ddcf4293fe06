"""No more is ever spent than the share of what was idle."""

from random import Random

import pytest

from mesh.core.warming.idle_replicas import SAVED_S_MAX, STEP_S_MAX, IdleBudget


@pytest.mark.parametrize("seed", range(5))
def test_what_is_spent_is_within_the_share_of_what_was_idle(seed):
    dice, now = Random(seed), 0.0
    share = dice.uniform(0.01, 1.0)
    budget = IdleBudget(share)
    really_idle_s = 0.0
    for _ in range(2000):
        step_s, idle = dice.expovariate(2.0), dice.randint(0, 4)
        now += step_s
        really_idle_s += idle * step_s
        budget.look(idle, 1, now)
        before = budget.saved_s
        wanted = dice.uniform(0.0, 3.0)
        assert budget.spend(wanted) is (wanted <= before)
        assert 0.0 <= budget.saved_s <= SAVED_S_MAX
        assert budget.spent_s <= share * budget.idle_s + 1e-6
        assert budget.idle_s <= really_idle_s + 1e-6


def test_routers_of_a_region_share_it_and_a_stop_of_the_process_is_no_idle_time():
    budget = IdleBudget(0.5)
    budget.look(4, 2, 0.0)
    budget.look(4, 2, 1.0)
    assert budget.saved_s == pytest.approx(0.5 * 4 / 2)
    budget.look(4, 2, 1000.0)
    assert budget.idle_s == pytest.approx(4 / 2 * (1.0 + STEP_S_MAX))


def test_what_is_saved_has_a_limit():
    budget = IdleBudget(1.0)
    for second in range(200):
        budget.look(10, 1, float(second))
    assert budget.saved_s == SAVED_S_MAX
