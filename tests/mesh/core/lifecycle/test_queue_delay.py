"""The limit of a wait: for newcomers, for those in line, and not for a long job or an outage."""

import pytest

from mesh.core.lifecycle import admission
from mesh.core.lifecycle.admission import HELD_FACTOR
from mesh.core.model.rates import ReleasePace
from mesh.core.placement.placement import PlacementResult
from mesh.core.policies.base import Destination, FirstToken
from mesh.core.requests.record import RequestRecord
from schemas.decision import CandidateKind, Placement
from schemas.exchange import Priority
from tests.mesh.core.build import MODEL, beat, request, state

LIMIT_S = 10.0


class SteadyPace(ReleasePace):
    """A pace that does not depend on the past."""

    def __init__(self, per_s):
        super().__init__()
        self._steady_per_s = per_s

    def per_s(self, now):
        return self._steady_per_s


class Line:
    """`waiting` of a model since time 0, in a line that moves at `per_s`, if that is known."""

    def __init__(self, waiting=0, per_s=None, serving=1, limit_s=LIMIT_S):
        # Replicas send one heartbeat here: none may be late.
        self.state = state(
            policy="least-load",
            queue_delay_s_max=limit_s,
            heartbeat_late_s=1e6,
            heartbeat_lost_s=1e6,
        )
        self.held, self.inflight = self.state.held, self.state.inflight
        self.moves_at(per_s)
        self.serve(serving)
        for key in range(waiting):
            self.put(request(key))

    def moves_at(self, per_s):
        self.state.paces[MODEL] = SteadyPace(per_s)

    def serve(self, replicas):
        for name in [*self.state.replicas.by_name]:
            self.state.replicas.remove(name)
        for number in range(replicas):
            self.state.replicas.see(beat(f"us-{number}"), 0.0)

    def put(self, one, since=0.0):
        self.held.put(one)
        self.inflight[one.key] = record = RequestRecord(one)
        record.hold(since)
        return record

    def newcomer(self, now=0.0, place=None, **fields):
        asked = request(999, arrived_at=now, **fields)
        return admission.too_long(self.state, RequestRecord(asked), place, now)

    def held_one(self, now, key):
        return admission.too_long(self.state, self.inflight[key], None, now)


def place(queue_s, placement=Placement.HOLD):
    target = None if placement is Placement.HOLD else "eu"
    return PlacementResult(
        placement, target, "", "mesh", first_token=FirstToken(queue_s + 1.0, queue_s)
    )


def test_a_newcomer_is_refused_where_the_line_is_longer_than_the_limit():
    assert Line(99, per_s=10.0).newcomer() is None
    refused = Line(100, per_s=10.0).newcomer()
    assert (refused.wait_s, refused.limit_s) == (pytest.approx(10.1), LIMIT_S)
    assert str(refused) == "expected wait 10.1 s > the queue_delay_s_max of 10 s"


def test_without_a_limit_or_with_an_objective_no_request_is_refused_for_it():
    assert Line(900, per_s=1.0, limit_s=0.0).newcomer() is None
    assert Line(900, per_s=1.0).newcomer(slo_ttft_s=30.0) is None


def test_a_higher_class_joins_where_a_lower_one_may_not():
    line = Line(100, per_s=10.0)
    told = [line.newcomer(priority=priority) is None for priority in Priority]
    assert told == [True, False, False]


def test_before_the_pace_is_known_the_first_requests_wait_counts():
    line = Line(5)
    assert line.newcomer(now=LIMIT_S) is None
    assert line.newcomer(now=LIMIT_S + 0.1).wait_s == pytest.approx(LIMIT_S + 0.1)


def test_before_the_pace_is_known_the_policys_estimate_refuses_beyond_twice_the_limit():
    line = Line(5)
    assert line.newcomer(place=place(HELD_FACTOR * LIMIT_S)) is None
    assert line.newcomer(place=place(21.0)).wait_s == pytest.approx(21.0)
    assert line.newcomer(now=LIMIT_S + 0.1, place=place(0.0)) is not None, "its head has waited"
    assert Line(5, per_s=10.0).newcomer(place=place(60.0)) is None, (
        "the line moves, whatever it says"
    )


def test_who_goes_to_a_peer_waits_there_and_not_here():
    peer = Placement.PEER
    assert Line(500, per_s=10.0).newcomer(place=place(19.0, peer)) is None
    assert Line(5, per_s=10.0).newcomer(place=place(21.0, peer)) is not None


def test_who_was_let_in_is_refused_when_the_line_has_become_slow():
    line = Line(50, per_s=10.0)
    assert [line.held_one(LIMIT_S + 0.1, key) for key in (1, 49)] == [None, None]
    line.moves_at(2.0)
    assert line.held_one(LIMIT_S - 0.1, 49) is None, "its limit has not passed"
    assert line.held_one(LIMIT_S + 0.1, 49).wait_s == pytest.approx(LIMIT_S + 0.1 + 25.0)
    assert line.held_one(LIMIT_S + 0.1, 15) is None, "it will be served within twice the limit"


def test_in_a_line_that_never_moved_twice_the_limit_is_the_end():
    line, end_s = Line(5), HELD_FACTOR * LIMIT_S
    assert line.held_one(end_s, 4) is None
    assert line.held_one(end_s + 0.1, 4) is not None


def test_an_attempt_that_failed_was_no_wait():
    line = Line()
    for key in range(3):  # they came at 0, were begun at once, and their replica is lost at 25
        record = line.put(request(key), since=25.0)
        record.attempt = 1
    assert [line.held_one(25.1, key) for key in range(3)] == [None] * 3
    assert line.newcomer(now=25.1) is None, "the first in line has not waited either"
    assert line.held_one(25.1 + HELD_FACTOR * LIMIT_S, 2) is not None
    again = line.inflight[2]
    again.held_s, again.held_since = 15.0, 25.0
    assert line.held_one(25.0 + LIMIT_S, 2) is not None, "what it waited before is counted"


def test_who_comes_back_is_no_newcomer():
    back = RequestRecord(request(999))
    back.attempt = 1
    assert admission.too_long(Line(150, per_s=10.0).state, back, None, 25.0) is None


def test_a_peers_wait_in_other_regions_counts_and_not_its_attempts():
    line = Line(5)
    line.put(request(6, arrived_at=-26.0), since=0.0)
    line.put(request(7, arrived_at=-25.0), since=0.0)
    line.put(request(8, arrived_at=-25.0, held_before_s=HELD_FACTOR * LIMIT_S), since=0.0)
    assert line.held_one(0.1, 7) is None
    assert line.held_one(0.1, 8) is not None


def test_as_many_as_there_are_replicas_may_wait_for_a_long_job():
    line = Line(3, per_s=0.01, serving=3)
    assert [line.held_one(50.0, key) for key in range(3)] == [None] * 3
    assert line.newcomer() is not None
    line.serve(4)
    assert line.newcomer() is None


def test_while_no_replica_serves_all_wait_and_then_time_begins_anew():
    line = Line(5, per_s=10.0, serving=0)
    line.moves_at(0.1)
    assert line.newcomer(now=40.0) is None
    for now in (10.0, 40.0):
        admission.look(line.state, now)
        assert line.held_one(now, 4) is None
    line.serve(1)
    line.moves_at(0.5)
    admission.look(line.state, 40.1)
    assert line.held_one(40.0 + LIMIT_S, 4) is None
    assert line.held_one(40.1 + LIMIT_S, 4).wait_s == pytest.approx(LIMIT_S + 0.1 + 10.0)


def test_an_outage_that_is_not_known_yet_is_no_slow_line():
    line = Line(5)
    pace = line.state.paces[MODEL] = ReleasePace()
    pace.waits(0.0)
    for now in range(6):
        pace.released(float(now))
    assert line.newcomer(now=5.0) is None
    admission.look(line.state, 15.0)
    assert line.newcomer(now=15.0).wait_s == pytest.approx(6 * 15.0 / 5), "nothing is released"
    line.serve(0)
    admission.look(line.state, 15.1)
    line.serve(1)
    admission.look(line.state, 20.0)
    assert line.newcomer(now=20.0) is None, "no replica was there"


def test_time_without_a_replica_does_not_count_after_a_peer_that_had_no_room_for_all():
    line = Line(5, serving=0)
    admission.look(line.state, 40.0)
    line.serve(1)
    for key, record in line.inflight.items():  # all go to a replica that came back
        line.held.remove(request(key))
        record.dispatch(Destination(CandidateKind.PEER, "eu"), None, 40.1)
    admission.look(line.state, 41.0)
    for key, record in line.inflight.items():
        line.held.put(request(key))
        record.hold(41.0)
    assert line.inflight[4].in_line_s(41.0) == pytest.approx(0.1)
    assert line.held_one(41.0 + HELD_FACTOR * LIMIT_S - 0.2, 4) is None
    assert line.held_one(41.0 + HELD_FACTOR * LIMIT_S, 4) is not None


def test_requests_without_replicas_are_no_crowd_for_others():
    line = Line()
    for key in range(50):
        line.put(request(key, residency=("eu",)))
    assert line.newcomer(now=LIMIT_S + 0.1) is not None
    admission.look(line.state, 0.0)
    assert line.newcomer(now=LIMIT_S + 0.1) is None, "neither by their wait"
    line.put(request(60), since=0.0)
    assert line.held_one(HELD_FACTOR * LIMIT_S + 0.1, 60) is None, "nor by their number"
