"""Distributions have the moments they are given."""

import random
from collections import Counter
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.sim.workloads.content import Lengths, Zipf, geometric


def test_lengths_have_their_mean_and_spread():
    rng = random.Random(1)
    drawn = [Lengths(300, 200).draw(rng) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(300, rel=0.03)
    assert pstdev(drawn) == pytest.approx(200, rel=0.1)


@given(
    mean_=st.floats(1, 1e5), ratio=st.floats(0.01, 6), quantile=st.floats(1e-9, 1, exclude_max=True)
)
def test_lengths_stay_within_their_limits(mean_, ratio, quantile):
    assert 3 <= Lengths(mean_, mean_ * ratio, least=3, most=500).at(quantile) <= 500


def test_the_first_ranks_already_have_the_mean():
    lengths = Lengths(10_000, 5000)
    for ranks in (8, 20, 300):
        assert mean(map(lengths.of_rank, range(ranks))) == pytest.approx(10_000, rel=0.12)


def test_zipf_is_drawn_as_it_is_shared_out():
    zipf, rng = Zipf(50, 1.1), random.Random(2)
    drawn = Counter(zipf.draw(rng) for _ in range(40_000))
    assert sum(zipf.share(rank) for rank in range(50)) == pytest.approx(1.0)
    assert zipf.share(0) / zipf.share(9) == pytest.approx(10**1.1)
    for rank in (0, 1, 5, 20):
        assert drawn[rank] / 40_000 == pytest.approx(zipf.share(rank), rel=0.1)


@pytest.mark.parametrize("wanted", [1.0, 1.2, 2.54, 5.1])
def test_geometric_has_its_mean_and_begins_at_one(wanted):
    rng = random.Random(3)
    drawn = [geometric(rng, wanted) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(wanted, rel=0.03)
    assert min(drawn) == 1
