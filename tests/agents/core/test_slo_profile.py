"""The search for the largest budget: against a scan, with several objectives, and at its ends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.slo_profile import Measure, keeps, levels, limits_of
from tests.support.profiled import largest_knob

TBT, TTFT = Measure.TBT_MEAN, Measure.TTFT_P99
ALONE = {TBT: 0.020, TTFT: 0.5}


@given(
    values=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=100, unique=True).map(sorted),
    limit=st.floats(1e-4, 1e4),
)
def test_it_finds_what_a_scan_finds_in_log2_runs(values, limit):
    played = []

    def play(knob: float) -> dict[Measure, float]:
        played.append(knob)
        return {TBT: knob}

    found = largest_knob(play, {TBT: limit}, tuple(values))
    kept = [value for value in values if value <= limit]
    assert found.knob == (kept[-1] if kept else None)
    assert len(played) <= math.ceil(math.log2(len(values) + 1))
    assert [trial.knob for trial in found.trials] == played
    assert all(trial.kept == (trial.knob <= limit) for trial in found.trials)


def test_of_several_objectives_the_tightest_decides():
    def play(knob: float) -> dict[Measure, float]:
        return {TBT: 0.020 + 0.1 * knob, TTFT: 0.5 + 1.0 * knob}

    values = levels(0.001, 1.0, 200)

    def found(tolerances: dict[Measure, float]) -> float:
        knob = largest_knob(play, limits_of(ALONE, tolerances), values).knob
        assert knob is not None
        return knob

    tbt, ttft = found({TBT: 0.5}), found({TTFT: 0.08})
    assert tbt == pytest.approx(0.1, rel=0.04) and ttft == pytest.approx(0.04, rel=0.04)
    assert found({TBT: 0.5, TTFT: 0.08}) == ttft
    assert found({TBT: 0.05, TTFT: 0.08}) == found({TBT: 0.05}) < ttft


def test_nothing_may_be_kept():
    found = largest_knob(lambda knob: {TBT: 9.0}, {TBT: 1.0}, levels(1.0, 2.0, 8))
    assert found.knob is None
    assert found.trials and not any(trial.kept for trial in found.trials)


def test_a_measure_that_a_run_lacks_is_not_kept():
    assert not keeps({}, {TBT: 1.0})
    assert not keeps({TBT: math.nan}, {TBT: 1.0})
    assert keeps({TBT: 1.0}, {TBT: 1.0})


def test_levels_rise_by_one_factor():
    values = levels(0.01, 0.16, 5)
    assert values == pytest.approx((0.01, 0.02, 0.04, 0.08, 0.16))


@pytest.mark.parametrize(("low", "high", "count"), [(0, 1, 5), (2, 1, 5), (1, 2, 1)])
def test_levels_that_are_none_are_refused(low, high, count):
    with pytest.raises(ValueError, match="levels need"):
        levels(low, high, count)


@pytest.mark.parametrize(
    ("alone", "tolerances", "why"),
    [
        (ALONE, {}, "no objective"),
        (ALONE, {TBT: -0.1}, "0 or more"),
        (ALONE, {TBT: math.nan}, "0 or more"),
        ({}, {TBT: 0.1}, "has no mean TBT"),
        ({TBT: math.nan}, {TBT: 0.1}, "has no mean TBT"),
    ],
)
def test_objectives_that_are_none_are_refused(alone, tolerances, why):
    with pytest.raises(ValueError, match=why):
        limits_of(alone, tolerances)
