"""Round trips: a median, a running average, its unsteadiness, and what never came back."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.view.peers import PINGS_COUNTED, RoundTripEstimate


def told(*samples):
    pings = RoundTripEstimate()
    for rtt_s in samples:
        pings.lost() if rtt_s is None else pings.measured(rtt_s)
    return pings


def test_nothing_is_known_before_the_first_ping():
    assert (told().rtt_s, told().jitter_s, told().loss_ratio) == (None, None, None)
    assert (told(None).rtt_s, told(None).loss_ratio) == (None, 1.0)
    assert (told(0.1).rtt_s, told(0.1).jitter_s, told(0.1).loss_ratio) == (0.1, None, 0.0)


def test_one_late_ping_is_not_a_trend():
    pings = told(0.080, 0.081, 0.079, 0.900, 0.080)
    assert pings.rtt_s == pytest.approx(0.080, abs=0.001)
    for _ in range(30):
        pings.measured(0.2)
    assert pings.rtt_s == pytest.approx(0.2, abs=0.001)


def test_jitter_is_the_change_from_one_to_the_next():
    assert told(*[0.1] * 50).jitter_s == 0.0
    swinging = told(*[0.08, 0.12] * 100).jitter_s
    assert swinging == pytest.approx(0.04, abs=0.001)
    dice = Random(1)
    steady = told(*(0.1 + dice.uniform(-0.001, 0.001) for _ in range(200)))
    assert 0.0003 < steady.jitter_s < 0.0012


def test_loss_is_of_the_last_pings_only():
    pings = told(*[None] * 10, *[0.1] * 10)
    assert pings.loss_ratio == 0.5
    for _ in range(PINGS_COUNTED):
        pings.measured(0.1)
    assert pings.loss_ratio == 0.0


@given(st.lists(st.none() | st.floats(0.0, 10.0), max_size=100))
def test_estimates_stay_within_observations(samples):
    pings = told(*samples)
    seen = [rtt_s for rtt_s in samples if rtt_s is not None]
    assert (pings.rtt_s is None) == (not seen)
    assert pings.loss_ratio is None or 0.0 <= pings.loss_ratio <= 1.0
    if seen:
        assert min(seen) - 1e-9 <= pings.rtt_s <= max(seen) + 1e-9
        assert pings.jitter_s is None or 0.0 <= pings.jitter_s <= max(seen) - min(seen) + 1e-9
