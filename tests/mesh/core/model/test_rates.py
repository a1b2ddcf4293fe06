"""A rate follows what happens, forgets what happened, and never divides by nothing."""

import pytest

from mesh.core.model.rates import EventRate


def rate_after(
    per_s: float, seconds: float, rate: EventRate | None = None, start: float = 0.0
) -> EventRate:
    rate = rate or EventRate(window_s=5.0)
    for number in range(round(per_s * seconds)):
        now = start + number / per_s
        rate.count(now)
        rate.per_s(now)
    return rate


def test_nothing_is_a_rate_of_zero():
    assert EventRate(5.0).per_s(0.0) == EventRate(5.0).per_s(1e9) == 0.0


def test_a_steady_stream_has_its_rate():
    assert rate_after(20.0, 60.0).per_s(60.0) == pytest.approx(20.0, rel=0.05)


def test_silence_brings_it_down():
    rate = rate_after(20.0, 60.0)
    assert rate.per_s(62.0) < 20.0
    assert rate.per_s(120.0) == pytest.approx(0.0, abs=0.5)


def test_it_does_not_matter_how_often_it_is_asked():
    rate = EventRate(5.0)
    rate.count(0.0)
    assert [rate.per_s(0.0), rate.per_s(0.0), rate.per_s(0.01)] == [0.0, 0.0, 0.0]
    assert rate.per_s(1.0) == pytest.approx(0.2)  # one in a second, at a fifth of the weight
