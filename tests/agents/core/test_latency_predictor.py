"""The latency predictor: what it fits, what it refuses, and the chunk that fits a budget."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.core.latency_predictor import (
    OBSERVATIONS_PER_FIT,
    BatchLoad,
    LatencyPredictor,
    NoSamples,
    Sample,
    mean_error,
    non_negative_least_squares,
)

loads = st.builds(
    BatchLoad,
    prefill_tokens=st.integers(1, 8192),
    context_tokens=st.integers(0, 400_000),
    prefills=st.integers(1, 8),
    decodes=st.integers(0, 256),
    prefill_pairs=st.integers(0, 10**8),
)
decode_loads = st.builds(
    BatchLoad,
    prefill_tokens=st.just(0),
    context_tokens=st.integers(1, 400_000),
    prefills=st.just(0),
    decodes=st.integers(1, 256),
    prefill_pairs=st.just(0),
)


def random_load(dice: random.Random) -> BatchLoad:
    load = BatchLoad()
    for _ in range(dice.randrange(128)):
        load = load.with_decode(dice.randint(1, 2000))
    for _ in range(dice.randrange(3) if load.decodes else 1):
        load = load.with_prefill(dice.randint(1, 512), dice.randrange(9000))
    return load


def linear_s(load: BatchLoad) -> float:
    """A GPU that is exactly what equation 1 can say."""
    tokens, context, prefills, decodes, pairs = load
    return 0.011 + 9e-5 * tokens + 2e-7 * context + 3e-9 * pairs + 1e-4 * prefills + 2e-5 * decodes


def run_of(count: int, seed: int, seconds=linear_s) -> list[Sample]:
    dice = random.Random(seed)
    return [Sample(load, seconds(load)) for load in (random_load(dice) for _ in range(count))]


TRAINED = LatencyPredictor(run_of(200, seed=1))


def test_a_linear_gpu_is_predicted_exactly():
    assert mean_error(TRAINED, run_of(500, seed=2)) < 1e-4


def roofline_s(load: BatchLoad) -> float:
    """Weights and KV are read, or tokens computed, whichever takes longer."""
    waiting_s = 0.011 + 3e-7 * load.context_tokens
    tokens = load.prefill_tokens + load.decodes
    return max(waiting_s, 0.003 + 9e-5 * tokens + 2e-9 * load.prefill_pairs)


def test_a_gpu_that_waits_for_memory_or_computes_is_predicted():
    predictor = LatencyPredictor(run_of(2000, seed=1, seconds=roofline_s))
    assert mean_error(predictor, run_of(500, seed=2, seconds=roofline_s)) < 0.01
    few = [Sample(s, roofline_s(s)) for s in (BatchLoad(n, 20 + n, 1, 1) for n in range(1, 60))]
    assert mean_error(predictor, few) < 0.02, "a few tokens of prefill beside a decode are free"
    slower = run_of(6000, seed=6, seconds=lambda load: 1.3 * roofline_s(load))
    for sample in slower:
        predictor.observe(sample)
    assert mean_error(predictor, slower) < 0.03


def test_noise_averages_out():
    dice = random.Random(3)
    noisy = [Sample(s.load, s.seconds * dice.gauss(1.0, 0.05)) for s in run_of(4000, seed=3)]
    assert mean_error(LatencyPredictor(noisy), run_of(500, seed=4)) < 0.01


@given(load=st.one_of(loads, decode_loads), more=st.integers(1, 5000))
def test_more_work_never_takes_less_time(load, more):
    predicted = TRAINED.predict_s(load)
    assert predicted > 0
    assert TRAINED.predict_s(load.with_decode(more)) >= predicted
    if load.prefills:
        assert TRAINED.predict_s(load.with_prefill(more, 0)) >= predicted


@given(
    load=st.one_of(loads, decode_loads, st.just(BatchLoad())),
    budget_s=st.floats(-1.0, 3.0),
    tokens_max=st.integers(0, 8192),
    computed=st.integers(0, 100_000),
)
def test_the_longest_prefill_fits_and_one_more_token_does_not(load, budget_s, tokens_max, computed):
    tokens = TRAINED.longest_prefill(budget_s, tokens_max, load, computed)
    assert 0 <= tokens <= tokens_max
    if tokens:
        assert TRAINED.predict_s(load.with_prefill(tokens, computed)) <= budget_s
    if tokens < tokens_max:
        after_s = TRAINED.predict_s(load.with_prefill(tokens + 1, computed))
        assert after_s > budget_s * (1 - 1e-9) - 1e-12


@settings(max_examples=60)
@given(
    samples=st.lists(
        st.builds(Sample, st.one_of(loads, decode_loads), st.floats(1e-6, 3600.0)),
        min_size=1,
        max_size=12,
    )
)
def test_any_run_gives_finite_coefficients_of_zero_or_more(samples):
    predictor = LatencyPredictor(samples)
    for coefficients in predictor.coefficients:
        assert all(value >= 0 and math.isfinite(value) for value in coefficients)
    assert any(value > 0 for value in predictor.coefficients[0])


def test_one_sample_and_constant_features_are_enough():
    load = BatchLoad(512, 600, 1, 10)
    for count in (1, 50):
        predictor = LatencyPredictor([Sample(load, 0.05)] * count)
        assert predictor.predict_s(load) == pytest.approx(0.05, rel=1e-6)


def test_a_kind_that_was_not_profiled_is_guessed_from_the_other():
    decodes = [s for s in run_of(500, seed=5) if not s.load.prefills]
    predictor = LatencyPredictor(decodes)
    load = BatchLoad(100, 10_000, 1, 50)
    assert predictor.predict_s(load) > predictor.predict_s(BatchLoad(0, 9_900, 0, 50)) * 0.99


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0, 1e9])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(NoSamples, match="no time"):
        LatencyPredictor([Sample(BatchLoad(decodes=1), seconds)])
    with pytest.raises(NoSamples):
        TRAINED.observe(Sample(BatchLoad(decodes=1), seconds))


@pytest.mark.parametrize("load", [BatchLoad(), BatchLoad(5, 5, 0, 0), BatchLoad(-1, 0, 1, 1)])
def test_a_batch_that_is_none_is_refused(load):
    with pytest.raises(NoSamples, match="no batch"):
        LatencyPredictor([Sample(load, 1.0)])


def test_no_samples_are_refused():
    with pytest.raises(NoSamples, match="no sample"):
        LatencyPredictor([])


def test_an_empty_batch_takes_no_time():
    assert TRAINED.predict_s(BatchLoad()) == 0.0


def test_a_gpu_that_slows_down_is_learned():
    predictor = LatencyPredictor(run_of(2000, seed=1))
    slower = run_of(6000, seed=6, seconds=lambda load: 1.3 * linear_s(load))
    assert mean_error(predictor, slower) > 0.2
    for sample in slower:
        predictor.observe(sample)
    assert mean_error(predictor, slower) < 0.03


def test_equal_batches_for_a_day_leave_the_rest_as_it_was():
    predictor = LatencyPredictor(run_of(2000, seed=1))
    load = BatchLoad(512, 20_000, 1, 30)
    for _ in range(10_000):
        predictor.observe(Sample(load, linear_s(load)))
    assert mean_error(predictor, run_of(500, seed=2)) < 0.01


def test_a_stall_moves_the_prediction_little():
    predictor = LatencyPredictor(run_of(2000, seed=1))
    load = BatchLoad(512, 20_000, 1, 30)
    before_s = predictor.predict_s(load)
    for _ in range(OBSERVATIONS_PER_FIT - 1):
        predictor.observe(Sample(load, before_s))
    predictor.observe(Sample(load, 3600.0))
    assert predictor.predict_s(load) == pytest.approx(before_s, rel=0.02)


@given(
    rows=st.lists(st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=3), min_size=3, max_size=8),
    right=st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=3),
)
def test_non_negative_least_squares_meets_the_conditions_of_an_optimum(rows, right):
    factor = np.array(rows)
    matrix = factor.T @ factor + 1e-3 * np.eye(3)
    wanted = np.array(right)
    x = non_negative_least_squares(matrix, wanted)
    gradient = wanted - matrix @ x
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all(), "no coefficient that should grow"
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-6, "the others lie at their best"
