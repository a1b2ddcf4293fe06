"""The pace of a queue: while requests waited, and unknown at first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.rates import BUSY_S_MIN, KEPT_S, RELEASES_MIN, WINDOW_S, ReleasePace


def moving(pace, per_s, seconds, begin=0.0):
    """Requests wait all the time, one is released every 1 / per_s; returns the end."""
    pace.waits(begin)
    for step in range(1, round(seconds * per_s) + 1):
        pace.released(begin + step / per_s)
    return begin + seconds


def test_nothing_is_known_before_enough_was_seen():
    pace = ReleasePace()
    assert pace.per_s(1e6) is None
    pace.waits(0.0)
    for _ in range(RELEASES_MIN):
        assert pace.per_s(2 * BUSY_S_MIN) is None
        pace.released(0.0)
    pace = ReleasePace()
    moving(pace, 100.0, 0.5 * BUSY_S_MIN)
    assert pace.per_s(0.5 * BUSY_S_MIN) is None


@given(st.floats(1.0, 50.0), st.floats(4.0, 60.0))
def test_it_is_the_releases_a_second(per_s, seconds):
    pace = ReleasePace()
    end = moving(pace, per_s, seconds)
    assert pace.per_s(end) == pytest.approx(per_s, rel=0.3)


def test_idle_time_does_not_count():
    pace = ReleasePace()
    end = moving(pace, 5.0, 8.0)
    known = pace.per_s(end)
    pace.nobody_waits(end)
    assert pace.per_s(end + KEPT_S) == known
    pace.waits(end + KEPT_S)
    assert pace.per_s(end + KEPT_S) == known


def test_what_was_learned_long_ago_does_not_count():
    for asked_first in (False, True):
        pace = ReleasePace()
        end = moving(pace, 0.5, 30.0)
        pace.nobody_waits(end)
        pace.nobody_waits(end + KEPT_S)  # still empty
        later = end + KEPT_S + 0.1
        assert not asked_first or pace.per_s(later) is None
        pace.waits(later)
        assert pace.per_s(later + 5.0) is None
        assert pace.per_s(moving(pace, 10.0, 5.0, later)) == pytest.approx(10.0, rel=0.1)


def test_the_pace_falls_while_no_request_is_released_and_recovers():
    pace = ReleasePace()
    end = moving(pace, 10.0, 2 * WINDOW_S)
    assert pace.per_s(end + 2 * WINDOW_S) < 5.0
    assert pace.per_s(end + 2 * WINDOW_S) < 5.0, "asking changes nothing"
    assert 0.0 <= pace.per_s(end + 2 * WINDOW_S) < 5.0
    end = moving(pace, 10.0, 3 * WINDOW_S, end + 2 * WINDOW_S)
    assert pace.per_s(end) == pytest.approx(10.0, rel=0.1)


def test_an_outage_does_not_count_from_the_last_release_on():
    """That nobody serves the queue is known seconds later."""
    pace = ReleasePace()
    end = moving(pace, 5.0, 8.0)
    known = pace.per_s(end)
    assert pace.per_s(end + WINDOW_S) < known / 2
    for later_s in range(10, 20):
        pace.nobody_serves(end + later_s)
    pace.waits(end + 20.0)
    assert pace.per_s(end + 20.0) == known
    assert pace.per_s(end + 30.0) < known / 2, "it may be slow again"
