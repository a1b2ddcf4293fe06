"""Percentiles against the standard library, and the reservoir's bound."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.tally import Samples

values = st.lists(st.floats(0, 1e6), min_size=2, max_size=200)


@given(values=values)
def test_the_summary_is_the_standard_librarys(values: list[float]) -> None:
    samples = Samples(random.Random(0))
    samples.extend(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert samples.summary() == {
        "mean": pytest.approx(statistics.fmean(values)),
        "p50": pytest.approx(cuts[49]),
        "p90": pytest.approx(cuts[89]),
        "p99": pytest.approx(cuts[98]),
    }


def test_one_value_is_every_percentile_and_none_is_none() -> None:
    samples = Samples(random.Random(0))
    assert samples.summary() == {"mean": None, "p50": None, "p90": None, "p99": None}
    samples.add(0.25)
    assert samples.summary() == {"mean": 0.25, "p50": 0.25, "p90": 0.25, "p99": 0.25}


def test_above_the_limit_means_stay_exact_and_percentiles_close() -> None:
    samples = Samples(random.Random(5), limit=2000)
    samples.extend(float(n) for n in range(20_000))
    summary = samples.summary()
    assert samples.count == 20_000
    assert summary["mean"] == 9999.5
    assert summary["p50"] == pytest.approx(10_000, rel=0.1)
    assert summary["p99"] == pytest.approx(19_800, rel=0.02)
