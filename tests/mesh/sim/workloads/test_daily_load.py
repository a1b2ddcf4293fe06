"""The skewed loop, and a day that each region has at its own hour."""

import pytest

from mesh.sim.workloads.daily_load import HOURLY, Day, diurnal, offsets_of
from schemas.ids import RegionId

US, EU, AP, XX = map(RegionId, ("us", "eu", "ap", "xx"))


def per_hour(workload, region) -> list[int]:
    hours = [0] * 24
    for arrival in workload.arrivals:
        if arrival.region == region:
            hours[int(arrival.at_s / 100.0)] += 1
    return hours


def test_without_a_rate_it_is_120_40_40_closed_loop():
    regions = [client.region for client in diurnal().clients]
    assert [regions.count(region) for region in (US, EU, AP)] == [120, 40, 40]


def test_the_curve_is_a_mean_of_one():
    assert len(HOURLY) == 24
    assert sum(HOURLY) / 24 == pytest.approx(1.0, abs=0.001)


def test_a_day_of_2400_s_follows_the_curve_by_each_region_s_clock():
    day = diurnal(clients={US: 1, AP: 1}, seed=1, duration_s=2400.0, rate_per_s=20.0)
    for region, offset in ((US, -5), (AP, 8)):
        counts = per_hour(day, region)
        mean = sum(counts) / 24
        for hour, asked in enumerate(counts):
            here, following = (HOURLY[(hour + offset + ahead) % 24] for ahead in (0, 1))
            expected = 1 + 3.0 * ((here + following) / 2 - 1)
            assert asked / mean == pytest.approx(expected, rel=0.2)


def test_regions_have_their_share_of_the_day_whatever_the_curve():
    day = diurnal(clients={US: 3, EU: 1}, seed=2, duration_s=2400.0, rate_per_s=5.0)
    share = sum(arrival.region == US for arrival in day.arrivals) / len(day.arrivals)
    assert share == pytest.approx(0.75, abs=0.03)


def test_swing_zero_is_flat_and_a_great_one_never_falls_below_nothing():
    flat = Day(24.0, {US: 0.0}, swing=0.0)
    assert flat.peak(US) == 1.0 == flat.at(US, 7.3)
    steep = Day(24.0, {US: 0.0}, swing=20.0)
    rates = [steep.at(US, hour / 10) for hour in range(240)]
    assert min(rates) == 0.0
    assert max(rates) <= steep.peak(US)


def test_zones_are_known_by_name_given_or_spread_around_the_globe():
    assert offsets_of({US: 1, RegionId("eu-west"): 1, XX: 1}) == {US: -5, "eu-west": 1, XX: 16}
    clock = Day(24.0, {US: -5.0, EU: 1.0}, swing=1.0)
    for hour in range(24):
        assert clock.at(EU, hour) == pytest.approx(HOURLY[(hour + 1) % 24])
        assert clock.at(US, hour) == pytest.approx(clock.at(EU, hour - 6))


def test_a_zone_of_one_s_own_moves_the_day():
    asked = {"clients": {US: 1}, "seed": 1, "duration_s": 2400.0, "rate_per_s": 10.0}
    hours = [
        per_hour(diurnal(**asked, utc_offsets_h={US: offset}, swing=5.0), US)
        for offset in (0.0, 12.0)
    ]
    assert hours[0][19] > 1.5 * hours[1][19]
    assert hours[1][7] > 1.5 * hours[0][7]
