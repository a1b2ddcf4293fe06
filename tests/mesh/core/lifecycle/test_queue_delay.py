"""The limit of a wait: for newcomers, for those in line, and not for a long job or an outage."""

import pytest

from mesh.core.lifecycle.admission import HELD_FACTOR, QueueDelay
from mesh.core.placement.placement import PlacementResult
from mesh.core.policies.base import FirstToken
from mesh.core.requests.hold_queue import HoldQueue, kind_of
from mesh.core.requests.record import RequestRecord
from schemas.decision import Placement
from schemas.exchange import Priority
from tests.mesh.core.build import MODEL, request

LIMIT_S = 10.0


class Line:
    """`waiting` of a model since time 0, in a line that moves at `per_s`, if that is known."""

    def __init__(self, waiting=0, per_s=None, serving=1, limit_s=LIMIT_S):
        self.held, self.per_s, self.serving = HoldQueue(1000), per_s, serving
        self.inflight, self.absent = {}, set()
        self.delay = QueueDelay(
            *(limit_s, self.held, self.inflight, self._line_s, self._ahead),
            lambda kind, now, enough: min(self.serving, enough),
            self.absent,
        )
        for key in range(waiting):
            self.put(request(key))

    def put(self, one, since=0.0):
        self.held.put(one)
        self.inflight[one.key] = record = RequestRecord(one)
        record.hold(since)
        return record

    def _line_s(self, one, now):
        return None if self.per_s is None else (self.held.ahead(one) + 1) / self.per_s

    def _ahead(self, one):
        return self.held.ahead(one, self.absent)

    def newcomer(self, now=0.0, place=None, **fields):
        asked = request(999, arrived_at=now, **fields)
        return self.delay.too_long(RequestRecord(asked), place, now)

    def held_one(self, now, key):
        return self.delay.too_long(self.inflight[key], None, now)


def place(queue_s, placement=Placement.HOLD):
    target = None if placement is Placement.HOLD else "eu"
    return PlacementResult(
        placement, target, "", "mesh", first_token=FirstToken(queue_s + 1.0, queue_s)
    )


def test_a_newcomer_is_refused_where_the_line_is_longer_than_the_limit():
    assert Line(99, per_s=10.0).newcomer() is None
    refused = Line(100, per_s=10.0).newcomer()
    assert (refused.wait_s, refused.limit_s) == (pytest.approx(10.1), LIMIT_S)
    assert str(refused) == "expected wait 10.1 s > limit 10 s"


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
    line.per_s = 2.0
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
    assert Line(150, per_s=10.0).delay.too_long(back, None, 25.0) is None


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
    line.serving = 4
    assert line.newcomer() is None


def test_while_no_replica_serves_all_wait_and_then_time_begins_anew():
    line = Line(5, per_s=10.0, serving=0)
    line.per_s = 0.1
    assert line.newcomer(now=40.0) is None
    line.absent.add(kind_of(request(0)))
    for now in (10.0, 40.0):
        line.delay.look(now)
        assert line.held_one(now, 4) is None
    line.serving, line.per_s = 1, 0.5
    line.absent.clear()
    line.delay.look(40.1)
    assert line.held_one(40.0 + LIMIT_S, 4) is None
    assert line.held_one(40.1 + LIMIT_S, 4).wait_s == pytest.approx(LIMIT_S + 0.1 + 10.0)
    for key in range(5):
        line.held.remove(request(key))
    line.delay.look(60.0)
    assert line.delay._unserved_at == {}, "of no held request"


def test_it_knows_the_kinds_that_are_held():
    line = Line(2, serving=0)
    line.put(request(7, residency=("eu",)))
    line.absent.update(line.held.held_kinds)
    line.delay.look(1.0)
    assert line.delay._unserved_at.keys() == {kind_of(request(0)), (MODEL, ("eu",), False)}


def test_requests_without_replicas_are_no_crowd_for_others():
    line = Line()
    for key in range(50):
        line.put(request(key, residency=("eu",)))
    assert line.newcomer(now=LIMIT_S + 0.1) is not None
    line.absent.add((MODEL, ("eu",), False))
    assert line.newcomer(now=LIMIT_S + 0.1) is None, "neither by their wait"
    line.put(request(60), since=0.0)
    assert line.held_one(HELD_FACTOR * LIMIT_S + 0.1, 60) is None, "nor by their number"
