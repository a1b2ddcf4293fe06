"""The closed form of many iterations agrees with itself, whatever the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.sim.engine import Stretch

seconds = st.floats(1e-4, 1.0)


@given(
    start=st.floats(0, 1e6),
    first=seconds,
    growth=st.one_of(st.just(0.0), st.floats(1e-9, 1e-3)),
    rounds=st.integers(1, 5000),
    data=st.data(),
)
def test_rounds_by_is_the_inverse_of_end_of(start, first, growth, rounds, data):
    stretch = Stretch(start, first, growth, rounds)
    k = data.draw(st.integers(0, rounds))
    end = stretch.end_of(k)
    assert stretch.rounds_by(end) == k
    between = end + first / 2
    assert stretch.rounds_by(between) == k
    assert stretch.rounds_by(start - 1.0) == 0
    assert stretch.rounds_by(stretch.end_s + 1.0) == rounds


def test_the_end_is_the_sum_of_its_iterations():
    stretch = Stretch(10.0, 0.05, 0.001, 100)
    expected = 10.0 + sum(0.05 + 0.001 * i for i in range(100))
    assert stretch.end_s == pytest.approx(expected)


def test_a_cut_keeps_the_iteration_that_runs():
    stretch = Stretch(0.0, 0.1, 0.0, 50)
    stretch.cut(0.25)
    assert stretch.rounds == 3
    stretch.cut(100.0)
    assert stretch.rounds == 3, "a cut never makes a stretch longer"
    stretch.done = 2
    stretch.cut(0.0)
    assert stretch.rounds == 3, "what is settled, and the iteration after it, stay"
