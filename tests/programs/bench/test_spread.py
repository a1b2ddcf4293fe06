import math

import pytest

from tests.programs.bench.spread import Spread, Verdict, differences, ratios, spread


def test_a_spread_is_of_the_rounds_that_have_a_figure():
    assert spread([3.0, math.nan, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([math.nan]) is None
    assert spread([]) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.2, 0.9, Verdict.HIT),
        (0.2, 1.0, Verdict.HIT),
        (0.9, 1.1, Verdict.INCONCLUSIVE),
        (1.0, 1.1, Verdict.INCONCLUSIVE),
        (1.1, 1.2, Verdict.MISS),
    ],
)
def test_a_limit_inside_the_spread_is_inconclusive(low, high, verdict):
    assert Spread((low + high) / 2, low, high).verdict(1.0) is verdict


def test_rounds_are_compared_with_their_own_partner():
    assert ratios([2.0, 30.0], [1.0, 10.0]) == [2.0, 3.0]
    assert differences([2.0, 30.0], [1.0, 10.0]) == [1.0, 20.0]
    assert math.isnan(ratios([1.0], [0.0])[0])
    assert math.isnan(ratios([1.0], [math.nan])[0])
