"""The table of replicas: selective pushing, order of heartbeats, losses."""

from random import Random

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.core.view import replica_table as module
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, ReplicaId
from schemas.settings import Pushing, PushingKind
from schemas.state import ReplicaState
from tests.mesh.core.build import MODEL, ROUTER, beat

A = ReplicaId("a")


@pytest.fixture
def table():
    return ReplicaTable(ROUTER, RouterSettings(handoffs_blind_max=2))


def why(table, now=0.0, model=MODEL):
    replica = table.get(A)
    assert replica is not None
    return table.unavailable_because(replica, model, now)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"running": 8}, None),  # a full batch with nothing waiting may end a request any moment
        ({"pending": None}, None),  # an engine without a queue is bounded by its agent's word
        ({"pending": 1}, "pending"),
        ({"full": True}, "full"),
        ({"pending": None, "full": True}, "full"),
        ({"models": (ModelId("other"),)}, "other model"),
        ({"state": ReplicaState.STARTING}, "starting"),
        ({"state": ReplicaState.DRAINING}, "draining"),
        ({"state": ReplicaState.DOWN}, "down"),
    ],
)
def test_a_heartbeat_decides_whether_work_may_be_pushed(table, fields, reason):
    table.see(beat("a", **fields), 0.0)
    assert why(table) == reason


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({"running": 5, "batch_max": 8}, 3),
        ({"running": 8, "batch_max": 8}, 1),
        ({"running": 9, "batch_max": 8}, 1),
        ({"running": None, "batch_max": 8}, 2),
        ({"running": 1, "batch_max": None}, 2),
        ({"kv_capacity_tokens": 1000, "kv_used_ratio": 0.75}, 3),  # 250 tokens in pieces of 100
        ({"kv_capacity_tokens": 1000, "kv_used_ratio": None}, 8),
        ({"kv_capacity_tokens": 1000, "kv_used_ratio": 1.0}, 1),
    ],
)
def test_handoffs_fill_the_room_it_left_and_no_more(table, fields, room):
    table.see(beat("a", **fields), 0.0)
    sent = 0
    while why(table) is None:
        table.hand_off(A, tokens=100, prefill_tokens=100, now=0.0)
        sent += 1
    assert (sent, why(table)) == (room, "handed off")


def test_a_begun_answer_keeps_its_slot_but_frees_a_blind_engines_turn(table):
    table.see(beat("a", running=7), 0.0)
    number = table.hand_off(A, 10, 10, 0.0)
    table.began(A, number)
    assert why(table) == "handed off"
    table.see(beat("a", 2, batch_max=None, taken={ROUTER: number}), 0.0)
    numbers = [table.hand_off(A, 10, 10, 0.0) for _ in range(2)]
    assert why(table) == "handed off"
    table.began(A, numbers[0])
    assert why(table) is None


def test_a_heartbeat_confirms_what_its_agent_took_from_this_router(table):
    table.see(beat("a", running=6), 0.0)
    first, second = (table.hand_off(A, 10, 10, 0.0) for _ in range(2))
    table.see(beat("a", 2, running=6, taken={"another-router": 99}), 0.0)
    assert why(table) == "handed off"
    table.see(beat("a", 3, running=7, taken={ROUTER: first}), 0.0)
    assert table.get(A).on_the_way.waiting == 1
    table.see(beat("a", 4, running=7, taken={ROUTER: second}), 0.0)
    assert why(table) is None


def test_numbers_go_on_when_a_replica_comes_back(table):
    table.see(beat("a"), 0.0)
    before = table.hand_off(A, 10, 10, 0.0)
    assert table.expire(5.0) == [(A, ())]
    table.see(beat("a", 2, running=7, taken={ROUTER: before}), 5.0)
    assert table.hand_off(A, 10, 10, 5.0) > before
    table.see(beat("a", 3, running=7, taken={ROUTER: before}), 5.0)
    assert why(table, 5.0) == "handed off"


def test_load_and_pending_count_what_is_on_its_way(table):
    table.see(beat("a", pending=2, running=3, outstanding=4), 0.0)
    replica = table.get(A)
    number = table.hand_off(A, 10, 10, 0.0)
    assert (replica.load, replica.pending) == (6, 3)
    table.began(A, number)
    assert (replica.load, replica.pending) == (6, 2)
    table.see(beat("a", 2, pending=None, running=None, outstanding=4, taken={ROUTER: number}), 0.0)
    assert (replica.load, replica.pending) == (4, None)


def test_heartbeats_out_of_order_are_ignored(table):
    assert table.see(beat("a", 5, pending=1), 0.0).changed
    for stale in (beat("a", 5), beat("a", 4), beat("a", 9, epoch=0)):
        assert table.see(stale, 1.0) == module.NO_CHANGE
    assert why(table) == "pending"
    assert table.get(A).seen_at == 0.0


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({}, False),
        ({"running": 3, "pending": 1}, False),
        ({"full": True}, True),
        ({"state": ReplicaState.DOWN}, True),
        ({"models": ()}, True),
    ],
)
def test_changes_of_what_peers_receive_are_reported(table, fields, changed):
    table.see(beat("a"), 0.0)
    assert table.see(beat("a", 2, **fields), 0.0).changed is changed


def test_silence_is_lateness_then_loss(table):
    table.see(beat("a"), 0.0)
    assert why(table, 0.3) is None
    assert why(table, 0.31) == "heartbeat late"
    assert table.expire(2.0) == []
    assert table.expire(2.01) == [(A, ())]
    assert list(table) == []


@pytest.mark.parametrize("last", [{"epoch": 2}, {"epoch": 2, "state": ReplicaState.GONE}])
def test_another_agent_has_none_of_the_old_ones_answers(table, last):
    table.see(beat("a"), 0.0)
    table.hand_off(A, 10, 10, 0.0)
    table.relay(A, "inbox-1", deadline=9.0)
    news = table.see(beat("a", **last), 0.0)
    assert news == module.HeartbeatChange(changed=True, restarted=True, orphans=("inbox-1",))
    replica = table.get(A)
    assert (replica is None) == ("state" in last)
    assert replica is None or (len(replica.on_the_way), len(replica.relayed)) == (0, 0)


def test_a_goodbye_of_an_unknown_replica_changes_nothing(table):
    assert table.see(beat("a", state=ReplicaState.GONE), 0.0) == module.NO_CHANGE
    assert table.get(A) is None


def test_peers_answers_are_dropped_when_nothing_can_come_any_more(table):
    table.see(beat("a"), 0.0)
    for number in range(1, 4):
        table.hand_off(A, 10, 10, 0.0)
        table.relay(A, f"inbox-{number}", deadline=float(number))
    table.see(beat("a", 2, outstanding=3, taken={ROUTER: 3}), 1.0)
    table.expire(1.0)
    assert [answer.inbox for answer in table.get(A).relayed] == ["inbox-2", "inbox-3"]
    table.see(beat("a", 3, outstanding=0, taken={ROUTER: 3}), 1.0)
    assert not table.get(A).relayed


def test_peers_answers_on_their_way_are_kept_though_nothing_is_outstanding(table):
    table.see(beat("a"), 0.0)
    table.hand_off(A, 10, 10, 0.0)
    table.relay(A, "inbox-1", deadline=9.0)
    table.see(beat("a", 2, outstanding=0), 0.0)
    assert table.get(A).relayed


def test_the_tables_have_limits(monkeypatch):
    monkeypatch.setattr(module, "REPLICAS_MAX", 2)
    table = ReplicaTable(ROUTER, RouterSettings(relayed_max=3))
    assert [table.see(beat(name), 0.0).changed for name in "abc"] == [True, True, False]
    for number in range(5):
        table.relay(A, f"inbox-{number}", deadline=9.0)
    assert [answer.inbox for answer in table.get(A).relayed] == ["inbox-2", "inbox-3", "inbox-4"]


def test_refusals_and_ends_of_a_lost_replica_change_nothing(table):
    table.refused(A, 0.0)
    table.began(A, 1)
    table.over(A, 1)
    assert table.get(A) is None


def test_the_same_agent_coming_back_has_its_cache_and_another_one_has_not(table):
    table.see(beat("a", 1), 0.0)
    assert table.expire(5.0) == [(A, ())]
    assert table.see(beat("a", 2), 6.0).restarted is False
    table.expire(20.0)
    assert table.see(beat("a", 1, epoch=99), 21.0).restarted is True


def test_a_replica_lost_for_long_is_forgotten_once(table):
    table.see(beat("a", 1), 0.0)
    table.expire(5.0)
    assert table.forgotten(5.0 + module.KEPT_S) == []
    assert table.forgotten(5.1 + module.KEPT_S) == [A]
    assert table.forgotten(5.2 + module.KEPT_S) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pending": 3, "full": True}, None),
        ({"running": 8, "batch_max": 8}, None),
        ({"models": (ModelId("other"),)}, "other model"),
        ({"state": ReplicaState.DRAINING}, "draining"),
    ],
)
def test_a_policy_that_judges_load_gets_the_other_reasons(table, fields, reason):
    table.see(beat("a", **fields), 0.0)
    table.hand_off(A, 10, 10, 0.0)
    assert table.unavailable_because(table.get(A), MODEL, 0.0, busy_too=True) == reason


def test_neither_late_nor_refusing_replicas_are_shown_to_it(table):
    table.see(beat("a"), 0.0)
    assert table.unavailable_because(table.get(A), MODEL, 0.31, busy_too=True) == "heartbeat late"
    table.refused(A, 0.1)
    assert table.unavailable_because(table.get(A), MODEL, 0.1, busy_too=True) == "full"
    table.see(beat("a", 2), 0.2)
    assert table.unavailable_because(table.get(A), MODEL, 0.2, busy_too=True) is None


@pytest.mark.parametrize("kind", [PushingKind.PENDING, PushingKind.BLIND])
@pytest.mark.parametrize("busy_too", [False, True])
def test_they_are_sorted_out_as_each_one_would_be(kind, busy_too):
    table, dice = ReplicaTable(ROUTER, RouterSettings(pushing=Pushing(kind))), Random(1)
    for number in range(300):
        said = {
            "state": dice.choice([ReplicaState.READY] * 4 + [ReplicaState.DOWN]),
            "models": dice.choice([(MODEL,), (ModelId("other"), MODEL), (ModelId("other"),)]),
            "pending": dice.choice([None, 0, 0, 3]),
            "full": dice.random() < 0.2,
        }
        name = ReplicaId(f"r{number}")
        table.see(beat(name, **said), dice.choice([0.0, 0.5]))
        if dice.random() < 0.2:
            table.refused(name, 0.5)
        for _ in range(dice.choice([0, 0, 1, 9])):
            table.hand_off(name, 10, 10, 0.5)
    free, others = table.partition_available(MODEL, 0.6, busy_too=busy_too)
    reasons = dict.fromkeys((one.heartbeat.replica for one in free), None) | {
        one.heartbeat.replica: why for one, why in others
    }
    assert len(free) > 20 < len(others)
    assert reasons == {
        one.heartbeat.replica: table.unavailable_because(one, MODEL, 0.6, busy_too=busy_too)
        for one in table
    }


def test_the_prefill_queue_is_worked_off_and_added_to(table):
    table.see(beat("a", prefill_queued_tokens=1000), 10.0)
    replica = table.get(A)
    assert replica.prefill_queue_tokens(10.0, 0.001) == 1000
    assert replica.prefill_queue_tokens(10.4, 0.001) == pytest.approx(600)
    number = table.hand_off(A, 900, 300, 10.4)
    assert replica.prefill_queue_tokens(12.0, 0.001) == 300
    assert replica.prefill_queue_tokens(12.0, 0.0) == 1300  # no speed, no progress
    table.began(A, number)
    assert replica.prefill_queue_tokens(12.0, 0.001) == 0
    table.see(beat("a", 2), 12.0)
    assert replica.prefill_queue_tokens(12.0, 0.001) is None


def test_replicas_whose_load_changed_are_noted_until_they_are_read(table):
    for name in "abc":
        table.see(beat(name), 0.0)
    assert list(table.changed) == ["a", "b", "c"]
    table.changed.clear()
    number = table.hand_off(A, 10, 10, 0.0)
    table.over(A, number)
    table.see(beat("b", 2), 0.1)
    table.remove(ReplicaId("b"))
    assert list(table.changed) == ["a"]


def test_a_heartbeat_that_leaves_the_load_as_it_was_is_not_noted(table):
    table.see(beat("a", outstanding=2), 0.0)
    table.changed.clear()
    table.see(beat("a", 2, outstanding=2, kv_used_ratio=0.5), 0.1)
    assert not table.changed
    table.see(beat("a", 3, outstanding=3), 0.2)
    assert list(table.changed) == ["a"]


def test_the_roll_is_called_again_when_one_comes_goes_or_has_no_more_room(table):
    rolls = [table.roll]

    def is_new():
        rolls.append(table.roll)
        return rolls[-1] > rolls[-2]

    table.see(beat("a", outstanding_max=2), 0.0)
    assert is_new()
    number = table.hand_off(A, 10, 10, 0.0)
    table.see(beat("a", 2, outstanding_max=2, outstanding=1, taken={ROUTER: number}), 0.1)
    assert not is_new()
    table.hand_off(A, 10, 10, 0.1)
    assert is_new()
    table.see(beat("a", 3, outstanding_max=4, outstanding=2), 0.2)
    assert is_new()
    table.refused(A, 0.3)
    assert is_new()
    table.see(beat("a", 4, state=ReplicaState.DRAINING, outstanding=2), 0.4)
    assert is_new()
    table.remove(A)
    assert is_new()
