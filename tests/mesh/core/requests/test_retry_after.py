"""Retry-After: later for each who is refused, parted by chance, and never beyond a minute."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.requests.retry_after import (
    JITTER_RATIO,
    LATEST_S,
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    RetryAfter,
)

SOME_S = st.floats(0.0, 1e4)


@given(st.none() | SOME_S, SOME_S, st.integers(1, 200), st.integers())
def test_it_is_whole_seconds_from_one_to_a_minute(wait_s, pace_per_s, refused, seed):
    returns, dice = RetryAfter(), Random(seed)
    for _ in range(refused):
        after_s = returns.after_s(wait_s, pace_per_s, 5.0, dice)
        assert RETRY_AFTER_S_MIN <= after_s <= RETRY_AFTER_S_MAX
        assert after_s == int(after_s)
        assert after_s >= min(LATEST_S, LATEST_S if wait_s is None else wait_s)


def test_a_crowd_retries_at_the_pace_of_the_queue():
    returns, dice, pace_per_s = RetryAfter(), Random(1), 4.0
    told = [returns.after_s(2.0, pace_per_s, 0.0, dice) for _ in range(120)]
    for number, after_s in enumerate(told):
        due_s = 2.0 + number / pace_per_s
        assert due_s <= after_s <= (due_s + 1.0) * (1.0 + JITTER_RATIO) + 1.0


def test_booked_clients_are_counted_until_they_are_due():
    returns, dice = RetryAfter(), Random(1)
    for _ in range(100):
        returns.after_s(0.0, 10.0, 0.0, dice)
    assert returns.after_s(0.0, 10.0, 4.0, dice) == pytest.approx(6.5, abs=1.0)
    assert returns.after_s(0.0, 10.0, 60.0, dice) <= 2.0


def test_a_thousand_bookings_lapse_within_a_minute():
    returns, dice = RetryAfter(), Random(1)
    for _ in range(100_000):
        returns.after_s(0.0, 10.0, 0.0, dice)
    assert returns.after_s(0.0, 10.0, RETRY_AFTER_S_MAX, dice) <= 2.0


def test_equal_waits_are_parted_by_chance():
    told = {RetryAfter().after_s(30.0, 5.0, 0.0, Random(seed)) for seed in range(100)}
    assert told == {30.0 + more for more in range(7)}
