"""A rise is a rise; a level, a fall and silence are not."""

from mesh.core.warming.hot_prefixes import DemandTrend


def fed(*rates, stretch_s=300):
    """A trend over 300 s, after so many requests a second in each stretch."""
    trend, now = DemandTrend(300.0), 0.0
    for rate in rates:
        for _ in range(stretch_s):
            for part in range(rate):
                trend.arrived(now + part / rate)
            now += 1.0
            trend.rises(now)
    return trend, now


def test_more_than_before_is_a_rise_and_as_many_or_fewer_is_none():
    for rates, expected in (((2,) * 8, False), ((2,) * 8 + (4,), True), ((4,) * 8 + (2,), False)):
        trend, now = fed(*rates, stretch_s=150)
        assert trend.rises(now) is expected, rates


def test_after_silence_the_first_clients_are_a_rise_and_silence_is_none():
    assert not DemandTrend(300.0).rises(1000.0)
    trend, now = fed(2, 0, 0, 0, 0, 2, stretch_s=100)
    assert trend.rises(now)
    assert not any(trend.rises(now + second) for second in range(50, 400, 5))
