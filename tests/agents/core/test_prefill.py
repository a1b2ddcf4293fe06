"""The estimator finds the line that made the samples, and says nothing when it can't."""

import random

import pytest

from agents.core.prefill_speed import PrefillEstimator

# GORGO, table 1: a100-mistral-7b.
BASE_S, SLOPE_S = 0.15072, 0.0000938


def samples(seed: int, count: int, *, slope=SLOPE_S, base=BASE_S, noise=0.1):
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(count):
        tokens = int(dice.lognormvariate(7.5, 1.0))
        yield tokens, (base + slope * tokens) * dice.gauss(1.0, noise)


@pytest.mark.parametrize("seed", range(10))
def test_the_line_is_recovered_under_noise(seed) -> None:
    estimator = PrefillEstimator()
    for tokens, ttft_s in samples(seed, 300):
        estimator.add(tokens, ttft_s)
    line = estimator.line
    assert line is not None
    assert line.s_per_token == pytest.approx(SLOPE_S, rel=0.35)
    assert line.ttft_s(4000) == pytest.approx(BASE_S + SLOPE_S * 4000, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_stalls_do_not_bend_the_line(seed) -> None:
    estimator, dice = PrefillEstimator(), random.Random(seed)
    for tokens, ttft_s in samples(seed, 300, noise=0.05):
        estimator.add(tokens, ttft_s + (10.0 if dice.random() < 0.03 else 0.0))
    line = estimator.line
    assert line is not None
    assert line.ttft_s(4000) == pytest.approx(BASE_S + SLOPE_S * 4000, rel=0.6)


def test_an_engine_that_slows_down_is_noticed() -> None:
    estimator = PrefillEstimator()
    for tokens, ttft_s in samples(1, 200, noise=0.02):
        estimator.add(tokens, ttft_s)
    for tokens, ttft_s in samples(2, 200, slope=3 * SLOPE_S, base=3 * BASE_S, noise=0.02):
        estimator.add(tokens, ttft_s)
    line = estimator.line
    assert line is not None
    assert line.s_per_token == pytest.approx(3 * SLOPE_S, rel=0.25)


def test_exact_samples_can_still_move() -> None:
    estimator = PrefillEstimator()
    for tokens in range(100, 2100, 100):
        estimator.add(tokens, tokens / 1000)
    for _ in range(30):
        for tokens in range(100, 2100, 100):
            estimator.add(tokens, tokens / 500)
    line = estimator.line
    assert line is not None
    assert line.s_per_token == pytest.approx(1 / 500, rel=0.05)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(100 * n, 0.1 * n) for n in range(1, 8)],  # too few
        [(1000, 0.2 + 0.001 * (n % 5)) for n in range(100)],  # one length
        [(100 * n, 5.0 - 0.1 * n) for n in range(1, 40)],  # longer is faster: nonsense
        [(n % 50, 1.0 + (n * 7919 % 13) / 10) for n in range(100)],  # noise
    ],
)
def test_without_a_line_the_heartbeat_has_none(points) -> None:
    estimator = PrefillEstimator()
    for tokens, ttft_s in points:
        estimator.add(tokens, ttft_s)
    assert estimator.line is None
