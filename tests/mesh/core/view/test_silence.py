"""From when on a replica's silence counts: one at rest says how long it will be silent."""

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ReplicaId
from tests.mesh.core.build import MODEL, ROUTER, beat, core, request

A, B = ReplicaId("a"), ReplicaId("b")
SETTINGS = RouterSettings()
LATE_S, LOST_S = SETTINGS.heartbeat_late_s, SETTINGS.heartbeat_lost_s
REST_S = 1.0
MORE_S = REST_S - 0.1


@pytest.fixture
def table():
    table = ReplicaTable(ROUTER, SETTINGS)
    table.see(beat(A, next_within_s=REST_S), 0.0)
    return table


def fell_silent(table, name=A):
    """When it counts as late, and when as lost, if nothing more comes."""
    replica, late_at = table.get(name), None
    for now in (number / 100 for number in range(1000)):
        if late_at is None and table.unavailable_because(replica, MODEL, now) == "heartbeat late":
            late_at = now
        if any(lost == name for lost, _ in table.expire(now)):
            return pytest.approx(late_at, abs=0.02), pytest.approx(now, abs=0.02)
    return None


def test_it_counts_from_when_the_next_one_was_due(table):
    assert fell_silent(table) == (MORE_S + LATE_S, MORE_S + LOST_S)


def test_a_replica_that_says_nothing_of_it_is_late_as_ever(table):
    """As all agents of the last release."""
    table.see(beat(A, 2), 0.0)
    assert fell_silent(table) == (LATE_S, LOST_S)


def test_once_it_is_given_work_it_has_to_speak(table):
    table.hand_off(A, 10, 10, 0.5)
    table.see(beat(A, 2, next_within_s=REST_S), 0.52)  # it left before the work arrived
    assert fell_silent(table) == (0.52 + LATE_S, 0.52 + LOST_S)


def test_work_that_it_has_taken_and_ended_changes_nothing(table):
    number = table.hand_off(A, 10, 10, 0.5)
    table.see(beat(A, 2, taken={ROUTER: number}), 0.6)
    table.see(beat(A, 3, taken={ROUTER: number}, next_within_s=REST_S), 2.0)
    assert fell_silent(table) == (2.0 + MORE_S + LATE_S, 2.0 + MORE_S + LOST_S)


def test_room_kept_for_a_decode_stage_is_no_work_yet(table):
    """The replica doesn't know of it."""
    table.reserve(A, 10)
    table.see(beat(A, 2, next_within_s=REST_S), 0.5)
    assert fell_silent(table) == (0.5 + MORE_S + LATE_S, 0.5 + MORE_S + LOST_S)


def test_of_two_at_rest_the_silence_of_both_is_blindness_when_both_are_late(table):
    table.see(beat(B, next_within_s=REST_S), 0.2)
    late_at = 0.2 + MORE_S + LATE_S
    assert not table.is_blind_to(table.get(A), late_at - 0.01)
    assert table.is_blind_to(table.get(A), late_at + 0.01)


def placed(router, key, now):
    effects = router.handle(ev.RequestArrived(request(key, arrived_at=now)), now)
    return next((one.replica for one in effects if isinstance(one, fx.Dispatch)), None)


@pytest.mark.parametrize("policy", ["mesh", "least-load"])
def test_a_replica_that_does_not_speak_after_work_gets_no_more(policy):
    """What placement keeps of the fleet from one request to the next goes by this too."""
    router = core(policy=policy)
    for name in (A, B):
        router.handle(ev.HeartbeatSeen(beat(name, next_within_s=REST_S)), 0.0)
    first = placed(router, 1, 0.0)
    assert placed(router, 2, LATE_S + 0.01) == ({A, B} - {first}).pop()
    assert placed(router, 3, LATE_S + 0.02) == ({A, B} - {first}).pop()
