"""The fit of GORGO's weights: it finds what is true, follows it, and can't be thrown about."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import make_policy
from mesh.core.policies.gorgo import (
    AS_WRITTEN,
    RANGES,
    FixedWeights,
    Terms,
    TunedWeights,
)


def terms(dice):
    """Of a fleet: three distances, prefills up to a second, queues that are mostly empty."""
    rtt_s = dice.choice((0.0, 0.08, 0.15, 0.25)) * dice.uniform(0.9, 1.1)
    return Terms(rtt_s, dice.expovariate(4.0), dice.choice((0.0, dice.expovariate(1.0))))


def teach(weights, truth, base_s, lessons, dice, noise_s=0.02):
    for _ in range(lessons):
        one = terms(dice)
        weights.learn(one, one.sum(truth) + base_s + dice.gauss(0.0, noise_s))


@pytest.mark.parametrize("truth", [Terms(1.0, 1.0, 1.0), Terms(1.4, 0.8, 2.0), Terms(1, 2.5, 0.1)])
def test_it_finds_the_true_weights(truth):
    weights = TunedWeights()
    teach(weights, truth, 0.15, 2000, Random(1))
    assert weights.present == pytest.approx(truth, abs=0.05)
    assert weights.base_s == pytest.approx(0.15, abs=0.02)


def test_it_follows_when_the_truth_changes():
    weights, dice = TunedWeights(), Random(2)
    teach(weights, Terms(1.0, 1.0, 0.5), 0.0, 2000, dice)
    teach(weights, Terms(1.0, 2.0, 1.5), 0.0, 5000, dice)
    assert weights.present == pytest.approx((1.0, 2.0, 1.5), abs=0.1)


def test_a_long_tail_does_not_drag_it_away():
    """Every fiftieth answer takes 30 s more, which no term explains."""
    weights, dice = TunedWeights(), Random(3)
    for number in range(5000):
        one = terms(dice)
        late_s = 30.0 if number % 50 == 49 else 0.0
        weights.learn(one, sum(one) + dice.gauss(0.0, 0.02) + late_s)
    assert weights.present == pytest.approx((1.0, 1.0, 1.0), abs=0.15)


def test_it_starts_as_the_paper_writes_it():
    assert TunedWeights().present == FixedWeights().present == AS_WRITTEN == (1.0, 1.0, 0.5)


def test_fixed_weights_learn_nothing():
    fixed = FixedWeights()
    fixed.learn(Terms(1.0, 1.0, 1.0), 99.0)
    assert fixed.present == AS_WRITTEN


def test_long_sameness_forgets_nothing():
    """Nothing but local requests for a day: the weight of distance is what it was."""
    weights, dice = TunedWeights(), Random(4)
    teach(weights, Terms(2.0, 1.0, 1.0), 0.1, 2000, dice)
    for _ in range(20_000):
        weights.learn(Terms(0.0, 0.1, 0.0), 0.2 + dice.gauss(0.0, 0.05))
    assert weights.present.rtt_s == pytest.approx(2.0, abs=0.1)
    before = weights.present.rtt_s
    weights.learn(Terms(0.2, 0.1, 0.0), 3.0)
    assert weights.present.rtt_s == pytest.approx(before, abs=0.4)


SECONDS = st.floats(0.0, 1e4)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), max_size=50))
def test_whatever_comes_the_weights_stay_in_their_ranges(lessons):
    weights = TunedWeights()
    for rtt_s, prefill_s, queue_s, ttft_s in lessons:
        weights.learn(Terms(rtt_s, prefill_s, queue_s), ttft_s)
        for value, (least, most) in zip((*weights.present, weights.base_s), RANGES, strict=True):
            assert least <= value <= most


@pytest.mark.parametrize("name", ["gorgo", "gorgo-proxy"])
def test_the_price_of_a_queue_is_an_option(name):
    usual, whole, none = (
        make_policy(f"{name}{text}", RouterSettings(), Random(1))._weights.present
        for text in ("", ":1", ":0")
    )
    assert [weights.queue_s for weights in (usual, whole, none)] == [0.5, 1.0, 0.0]
    assert usual.rtt_s == whole.prefill_s == 1.0
    with pytest.raises(ValueError, match="queue_weight must be 0 or more"):
        make_policy(f"{name}:-1", RouterSettings(), Random(1))
