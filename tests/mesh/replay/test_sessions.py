"""Sessions of different days run beside each other, each with its own pace."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.schedule import session_starts_s, with_sessions_beside
from mesh.replay.trace import Trace, TraceRequest

DAY_S = 86_400.0


def trace_of(*rows: tuple[float, str]) -> Trace:
    return Trace(64, tuple(TraceRequest(at_s, 10, 1, session=name) for at_s, name in rows))


@given(seed=st.integers(0, 1000), gaps=st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_a_session_keeps_its_own_times(seed: int, gaps: list[float]) -> None:
    first = [(at, "a") for at in sorted(gaps)]
    second = [(DAY_S + at, "b") for at in sorted(gaps)]
    moved = with_sessions_beside(trace_of(*first, *second), random.Random(seed))
    for name, rows in (("a", first), ("b", second)):
        times = [request.at_s for request in moved.requests if request.session == name]
        assert [at - times[0] for at in times] == pytest.approx(
            [at - rows[0][0] for at, _ in rows], abs=1e-6
        )
    assert max(request.at_s for request in moved.requests) < DAY_S


def test_starts_are_gap_s_apart_in_the_mean() -> None:
    starts = session_starts_s(4000, random.Random(1), gap_s=10.0)
    assert starts == sorted(starts)
    assert starts[0] == 0.0
    assert starts[-1] / 3999 == pytest.approx(10.0, rel=0.05)


def test_a_trace_without_names_is_left_alone_and_costs_no_chance() -> None:
    rng = random.Random(1)
    state = rng.getstate()
    trace = trace_of((1.0, ""), (5.0, ""))
    assert with_sessions_beside(trace, rng) is trace
    assert rng.getstate() == state
