"""Admission: what is expected, what is too late, and a Retry-After that is true."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.lifecycle import admission
from mesh.core.lifecycle.admission import SLO_MARGIN, LateFirstToken, retry_after_s
from mesh.core.model.prompt import Prompt
from mesh.core.model.rates import KEPT_S
from mesh.core.placement.placement import PlacementResult
from mesh.core.policies.base import FirstToken
from mesh.core.requests.record import RequestRecord
from mesh.core.requests.retry_after import JITTER_RATIO, LATEST_S, RETRY_AFTER_S_MAX
from schemas.decision import Placement
from schemas.exchange import Priority
from schemas.ids import ReplicaId
from tests.mesh.core.build import beat, request, state

PACE_PER_S = 2.0


class Door:
    """A line that has moved at PACE_PER_S, with `waiting` in it since time 0."""

    def __init__(self, waiting=0, *, moved=True, limit_s=0.0, shorter_first=False):
        policy = "mesh" if shorter_first else "least-load"  # of which the first judges load
        self.state = state(policy=policy, queue_delay_s_max=limit_s)
        self.held = self.state.held
        self.state.replicas.see(beat("a"), 0.0)
        self.now = 0.0
        for key in range(waiting + (10 if moved else 0)):
            self.put(request(key, arrived_at=0.0))
        for key in range(10 if moved else 0):
            self.now += 1 / PACE_PER_S
            self.held.remove(request(key, arrived_at=0.0))
            admission.released(self.state, request(key), self.now)

    def put(self, one):
        self.held.put(one)
        self.state.inflight[one.key] = record = RequestRecord(one)
        record.hold(self.now)
        admission.waits(self.state, one, self.now)

    def late(self, slo_s, place=None, waited_s=0.0):
        asked = request(999, arrived_at=self.now - waited_s, slo_ttft_s=slo_s)
        return admission.late(self.state, RequestRecord(asked), place, self.now)


def place(seconds=None, queue_s=0.0, target=None):
    first = None if seconds is None else FirstToken(seconds, queue_s)
    placement = Placement.HOLD if target is None else Placement.LOCAL
    return PlacementResult(placement, target, "because", "mesh", first_token=first)


def test_without_an_objective_nothing_is_too_late():
    assert Door(500).late(None, place(1e6), waited_s=1e6) is None


def test_at_a_cold_start_no_request_is_shed():
    assert Door(500, moved=False).late(0.001) is None
    assert Door(500, moved=False).late(0.001, place(target="a")) is None


def test_its_place_in_line_at_the_pace_of_the_line():
    door = Door(7)
    assert admission.expected_s(door.state, request(999, arrived_at=door.now), None, door.now) == (
        pytest.approx(8 / PACE_PER_S)
    )


def test_a_higher_class_expects_less():
    door = Door(7)
    asked = [request(999, arrived_at=door.now, priority=each) for each in Priority]
    waits = [admission.expected_s(door.state, one, None, door.now) for one in asked]
    assert waits == [pytest.approx(1 / PACE_PER_S), pytest.approx(4.0), pytest.approx(4.0)]


def test_line_and_engine_queue_drain_side_by_side():
    door, asked = Door(7), request(999, arrived_at=5.0)
    expected = [
        admission.expected_s(door.state, asked, place(3.0, queue_s), door.now)
        for queue_s in (2.0, 0.0)
    ]
    assert expected == [pytest.approx(1.0 + 4.0), pytest.approx(3.0 + 4.0)]
    assert admission.expected_s(door.state, asked, place(9.0, 8.0), door.now) == pytest.approx(9.0)


def test_who_is_placed_does_not_wait_in_line():
    door = Door(7)
    assert admission.expected_s(door.state, request(999), place(0.3, 0.1, "a"), door.now) == 0.3
    assert admission.expected_s(door.state, request(999), place(target="a"), door.now) is None


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0), st.floats(0.001, 100.0), st.booleans())
def test_only_what_is_clearly_beyond_the_objective_is_shed(slo_s, waited_s, seconds, placed):
    late = Door(moved=False).late(slo_s, place(seconds, 0.0, "a" if placed else None), waited_s)
    left_s = slo_s - waited_s
    if late is None:
        assert seconds <= SLO_MARGIN * left_s
    else:
        assert left_s <= 0.0 or seconds > SLO_MARGIN * left_s
        assert late == LateFirstToken(pytest.approx(waited_s + seconds), slo_s)


def test_an_objective_that_has_passed_is_missed_whatever_is_known():
    assert Door(moved=False).late(1.0, None, waited_s=1.0) == LateFirstToken(1.0, 1.0)


def is_told(after_s, wait_s):
    """What it says for that wait, up to chance."""
    return wait_s <= after_s <= (wait_s + 1) * (1 + JITTER_RATIO) + 1


def test_retry_after_is_when_those_before_it_are_gone():
    door, asked = Door(9), request(999, arrived_at=50.0)
    assert is_told(retry_after_s(door.state, asked, None, door.now), 9 / PACE_PER_S)
    door, first = Door(9), request(998, arrived_at=5.0, priority=Priority.HIGH)
    assert is_told(retry_after_s(door.state, first, None, door.now), 1.0)
    assert LATEST_S <= retry_after_s(Door(500).state, asked, None, 5.0) <= RETRY_AFTER_S_MAX


def test_retry_after_is_when_the_line_is_short_enough_to_be_joined():
    door, asked = Door(39, limit_s=10.0), request(999, arrived_at=5.0)
    assert is_told(retry_after_s(door.state, asked, None, door.now), 39 / PACE_PER_S - 10.0)


def test_a_held_request_is_not_ahead_of_itself():
    door = Door(1)
    [held] = door.held
    assert is_told(retry_after_s(door.state, held, None, door.now), 1.0)


def test_retry_after_is_when_it_would_be_in_time():
    asked = request(999, arrived_at=50.0, slo_ttft_s=2.0)
    assert is_told(retry_after_s(Door().state, asked, LateFirstToken(12.0, 2.0), 5.0), 10.0)
    assert is_told(retry_after_s(Door(9).state, asked, LateFirstToken(3.0, 2.0), 5.0), 4.5)


def test_of_a_crowd_each_gets_a_later_time():
    door = Door(39, limit_s=10.0)
    told = [
        retry_after_s(door.state, request(n, arrived_at=5.0), None, door.now)
        for n in range(100, 160)
    ]
    for number, after_s in enumerate(told):
        assert is_told(after_s, 39 / PACE_PER_S - 10.0 + number / PACE_PER_S)


def test_a_queue_without_replicas_keeps_its_pace():
    door, asked = Door(9), request(999, arrived_at=1000.0)
    expected_s = admission.expected_s(door.state, asked, None, door.now)
    door.state.replicas.remove(ReplicaId("a"))
    admission.look(door.state, door.now)
    assert admission.expected_s(door.state, asked, None, door.now + KEPT_S) == expected_s
    door.state.replicas.see(beat("a", 2), door.now)
    admission.look(door.state, door.now + KEPT_S)
    assert admission.expected_s(door.state, asked, None, door.now + KEPT_S + 10.0) > 2 * expected_s


def test_requests_without_replicas_are_not_ahead_of_others():
    door, asked = Door(9), request(999, arrived_at=1000.0)
    expected_s = admission.expected_s(door.state, asked, None, door.now)
    for key in range(500, 530):
        door.put(request(key, residency=("eu",)))
    assert admission.expected_s(door.state, asked, None, door.now) > 3 * expected_s
    admission.look(door.state, door.now)
    assert admission.expected_s(door.state, asked, None, door.now) == expected_s
    assert is_told(retry_after_s(door.state, asked, None, door.now), 9 / PACE_PER_S)


def test_lines_of_different_models_have_their_own_pace():
    door = Door(7)
    other = request(999, arrived_at=door.now, model="other")
    assert admission.expected_s(door.state, other, None, door.now) is None


# At 0.09 ms a token they give way for 6, and for 0.3 s.
LONG, SHORT = Prompt(2000, ()), Prompt(100, ())


def with_long_prompts(*, limit_s=10.0, arrived_at=0.0, **options):
    door = Door(30, limit_s=limit_s, **options)
    for one in list(door.held):
        door.held.remove(one)
        door.put(replace(one, key=one.key + 100, prompt=LONG, arrived_at=arrived_at))
    return door


@pytest.mark.parametrize("shorter_first", [False, True])
def test_a_prompt_that_goes_before_those_held_is_not_refused_for_them(shorter_first):
    door = with_long_prompts(shorter_first=shorter_first)

    def refused(key, prompt):
        newcomer = request(key, arrived_at=door.now, prompt=prompt)
        return admission.too_long(door.state, RequestRecord(newcomer), None, door.now)

    assert (refused(901, SHORT) is None) is shorter_first
    assert str(refused(902, LONG)) == "expected wait 15.5 s > the queue_delay_s_max of 10 s"


def test_a_prompt_that_goes_first_may_wait_for_the_only_replica_whatever_the_pace():
    door = with_long_prompts(limit_s=0.4, arrived_at=4.95, shorter_first=True)
    first = request(901, arrived_at=door.now, prompt=SHORT)
    assert admission.too_long(door.state, RequestRecord(first), None, door.now) is None
    door.put(first)
    second = RequestRecord(replace(first, key=902))
    assert admission.too_long(door.state, second, None, door.now) is not None


def test_short_prompts_that_were_held_since_the_last_try_are_waited_for():
    door, admitted = with_long_prompts(shorter_first=True), 0
    for key in range(900, 1000):
        newcomer = request(key, arrived_at=door.now, prompt=SHORT)
        if admission.too_long(door.state, RequestRecord(newcomer), None, door.now) is None:
            door.put(newcomer)
            admitted += 1
    assert admitted == 10.0 * PACE_PER_S


@pytest.mark.parametrize(("prompt", "wait_s"), [(SHORT, 1.0), (LONG, 5.0)])
def test_retry_after_is_by_the_turns_too(prompt, wait_s):
    door = with_long_prompts(shorter_first=True)
    [*_, last] = door.held
    door.held.remove(last)
    door.put(refused := replace(last, key=900, prompt=prompt))
    after_s = retry_after_s(door.state, refused, None, door.now)
    assert wait_s <= after_s <= wait_s * (1.0 + JITTER_RATIO) + 1.0
