"""Admission: what is expected, what is too late, and a Retry-After that is true."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.placing.placement import Place
from mesh.core.policies.base import FirstToken
from mesh.core.requests.inflight import Inflight
from mesh.core.waiting.admission import (
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    SLO_MARGIN,
    Admission,
    Late,
)
from mesh.core.waiting.hold_queue import HoldQueue
from schemas.decision import Placement
from schemas.exchange import Priority
from tests.mesh.core.build import request

PACE_PER_S = 2.0


class Door:
    """A line that has moved at PACE_PER_S, with `waiting` in it since time 0."""

    def __init__(self, waiting=0, *, moved=True):
        self.held = HoldQueue(1000)
        self.admission = Admission(self.held)
        self.now = 0.0
        for key in range(waiting + (10 if moved else 0)):
            self.put(request(key, arrived_at=0.0))
        for key in range(10 if moved else 0):
            self.now += 1 / PACE_PER_S
            self.held.release(request(key, arrived_at=0.0))
            self.admission.released(request(key), self.now)

    def put(self, one):
        self.held.put(one)
        self.admission.waits(one, self.now)

    def late(self, slo_s, place=None, waited_s=0.0):
        asked = request(999, arrived_at=self.now - waited_s, slo_ttft_s=slo_s)
        return self.admission.late(Inflight(asked), place, self.now)


def place(seconds=None, queue_s=0.0, target=None):
    first = None if seconds is None else FirstToken(seconds, queue_s)
    placement = Placement.HOLD if target is None else Placement.LOCAL
    return Place(placement, target, "because", "mesh", first_token=first)


def test_without_an_objective_nothing_is_too_late():
    assert Door(500).late(None, place(1e6), waited_s=1e6) is None


def test_at_a_cold_start_nobody_is_shed():
    assert Door(500, moved=False).late(0.001) is None
    assert Door(500, moved=False).late(0.001, place(target="a")) is None


def test_its_place_in_line_at_the_pace_of_the_line():
    door = Door(7)
    assert door.admission.expected_s(request(999, arrived_at=door.now), None, door.now) == (
        pytest.approx(8 / PACE_PER_S)
    )


def test_a_higher_class_expects_less():
    door = Door(7)
    asked = [request(999, arrived_at=door.now, priority=each) for each in Priority]
    waits = [door.admission.expected_s(one, None, door.now) for one in asked]
    assert waits == [pytest.approx(1 / PACE_PER_S), pytest.approx(4.0), pytest.approx(4.0)]


def test_line_and_engine_queue_drain_side_by_side():
    door, asked = Door(7), request(999, arrived_at=5.0)
    expected = [
        door.admission.expected_s(asked, place(3.0, queue_s), door.now) for queue_s in (2.0, 0.0)
    ]
    assert expected == [pytest.approx(1.0 + 4.0), pytest.approx(3.0 + 4.0)]
    assert door.admission.expected_s(asked, place(9.0, 8.0), door.now) == pytest.approx(9.0)


def test_who_is_placed_does_not_wait_in_line():
    door = Door(7)
    assert door.admission.expected_s(request(999), place(0.3, 0.1, "a"), door.now) == 0.3
    assert door.admission.expected_s(request(999), place(target="a"), door.now) is None


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0), st.floats(0.001, 100.0), st.booleans())
def test_only_what_is_clearly_beyond_the_objective_is_shed(slo_s, waited_s, seconds, placed):
    late = Door(moved=False).late(slo_s, place(seconds, 0.0, "a" if placed else None), waited_s)
    left_s = slo_s - waited_s
    if late is None:
        assert seconds <= SLO_MARGIN * left_s
    else:
        assert left_s <= 0.0 or seconds > SLO_MARGIN * left_s
        assert late == Late(pytest.approx(waited_s + seconds), slo_s)


def test_an_objective_that_has_passed_is_missed_whatever_is_known():
    assert Door(moved=False).late(1.0, None, waited_s=1.0) == Late(1.0, 1.0)


def test_retry_after_is_when_those_before_it_are_gone():
    door, asked = Door(9), request(999, arrived_at=50.0)
    assert door.admission.retry_after_s(asked, None, door.now) == pytest.approx(9 / PACE_PER_S)
    first = request(998, arrived_at=5.0, priority=Priority.HIGH)
    assert door.admission.retry_after_s(first, None, door.now) == RETRY_AFTER_S_MIN
    assert Door(500).admission.retry_after_s(asked, None, 5.0) == RETRY_AFTER_S_MAX


def test_retry_after_is_when_it_would_be_in_time():
    door, asked = Door(), request(999, arrived_at=50.0)
    assert door.admission.retry_after_s(asked, Late(12.0, 2.0), door.now) == pytest.approx(10.0)
    assert Door(9).admission.retry_after_s(asked, Late(3.0, 2.0), 5.0) == pytest.approx(4.5)


def test_lines_of_different_models_have_their_own_pace():
    door = Door(7)
    other = request(999, arrived_at=door.now, model="other")
    assert door.admission.expected_s(other, None, door.now) is None
