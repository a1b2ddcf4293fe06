"""Counts over time stay true when slices double; a distribution is read at equal steps."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.tally import Samples
from mesh.sim.study.cells import SLICE_S, SLICES_MAX, RateSlices
from schemas.ids import RegionId

US, EU = RegionId("us"), RegionId("eu")
events = st.lists(
    st.tuples(st.sampled_from([US, EU]), st.floats(0, 100_000)), min_size=1, max_size=60
)


@given(events)
def test_every_event_is_in_the_slice_of_its_time(found: list[tuple[RegionId, float]]) -> None:
    slices = RateSlices([US, EU])
    for region, at_s in found:
        slices.add(region, at_s)
    rates = slices.rates_per_s()
    for region in (US, EU):
        expected = [0.0] * len(rates[region])
        for other, at_s in found:
            if other == region:
                expected[int(at_s / slices.slice_s)] += 1 / slices.slice_s
        assert rates[region] == expected
    latest_s = max(at_s for _, at_s in found)
    assert slices.slice_s * SLICES_MAX > latest_s
    assert slices.slice_s == SLICE_S or slices.slice_s * SLICES_MAX / 2 <= latest_s


def test_a_curve_runs_from_the_least_to_the_most() -> None:
    samples = Samples(Random(1))
    assert samples.curve(3) == []
    samples.extend([3.0, 1.0, 2.0])
    assert samples.curve(5) == [1.0, 1.5, 2.0, 2.5, 3.0]
