"""When all replicas fall silent at once, the router goes on without heartbeats."""

from dataclasses import replace

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.view.bus_status import REST_S, HeartbeatLossDetector
from mesh.core.view.replica import replica_name_at
from mesh.core.view.replica_table import ReplicaTable
from schemas.exchange import Refusal
from schemas.ids import RegionId, ReplicaId, RouterId
from tests.mesh.core.build import US, beat, core, request


@pytest.mark.parametrize(
    ("known", "silent_s", "blind"),
    [(2, 0.3, False), (2, 0.31, True), (1, 0.31, False), (9, 30.0, True), (9, 30.01, False)],
)
def test_the_silence_of_all_is_blindness_and_of_one_is_not(known, silent_s, blind):
    sight = HeartbeatLossDetector(RouterSettings())
    sight.known = known
    sight.seen(0.0)
    assert sight.is_blind(silent_s) is blind


def test_without_any_heartbeat_it_is_not_blind():
    sight = HeartbeatLossDetector(RouterSettings())
    sight.known = 5
    assert not sight.is_blind(1e9)


def region(**fields):
    router = core(policy="least-load")
    for name in ("a", "b"):
        router.handle(ev.HeartbeatSeen(beat(name, **fields)), 0.0)
    return router


def ticked(router, until, start=0.0):
    """Ticks without a heartbeat; what was done meanwhile."""
    done, now = [], start
    while now < until:
        now = round(now + 0.1, 3)
        done += router.handle(ev.Tick(), now)
    return [one for one in done if not isinstance(one, fx.PublishDigest | fx.PublishTrie)]


def ask(router, key, now):
    """Where the request goes, or None when it is held."""
    effects = router.handle(ev.RequestArrived(request(key, arrived_at=now)), now)
    return next((one.replica for one in effects if isinstance(one, fx.Dispatch)), None)


def test_work_goes_on_and_what_is_in_flight_takes_room():
    router = region(batch_max=2)
    ticked(router, 5.0)
    assert router.models()
    placed = [ask(router, key, 5.0) for key in range(1, 5)]
    assert sorted(placed) == ["a", "a", "b", "b"]
    assert ask(router, 5, 5.0) is None
    ticked(router, 8.0, 5.0)  # hand-offs don't expire while none is confirmed
    assert len(router.held) == 1
    router.handle(ev.AnswerStarted(1, 1), 8.0)
    done = router.handle(ev.AnswerEnded(1, 1), 8.1)
    assert [one.replica for one in done if isinstance(one, fx.Dispatch)] == [placed[0]]


def test_who_refuses_rests_for_a_moment_only():
    router = region()
    ticked(router, 3.0)
    first = ask(router, 1, 3.0)
    refusal = ev.AttemptRefused(1, 1, Refusal.FULL, US, ReplicaId(first), 3, 8)
    [again] = [o for o in router.handle(refusal, 3.1) if isinstance(o, fx.Dispatch)]
    assert again.replica != first
    router.handle(ev.AnswerEnded(1, 2), 3.2)
    placed = {ask(router, key, 3.3 + REST_S) for key in (2, 3)}
    assert placed == {"a", "b"}


def test_a_replica_whose_last_heartbeat_was_full_is_tried():
    router = region(pending=4, full=True)
    assert ask(router, 1, 0.0) is None
    done = ticked(router, 0.5)
    assert [one.key for one in done if isinstance(one, fx.Dispatch)] == [1]


def test_an_answer_that_never_comes_is_given_up_without_heartbeats():
    router = region()
    ticked(router, 1.0)
    first = ask(router, 1, 1.0)
    done = ticked(router, 9.0, 1.0)
    [again] = [one for one in done if isinstance(one, fx.Dispatch)]
    assert (again.key, again.attempt, again.replica != first) == (1, 2, True)


def test_after_one_heartbeat_the_others_have_time_for_theirs():
    router = region()
    ticked(router, 10.0)
    for tenth in range(21):
        now = 10.0 + tenth / 10
        assert {replica.heartbeat.replica for replica in router.replicas} == {"a", "b"}
        router.handle(ev.HeartbeatSeen(beat("a", 2 + tenth)), now)
        router.handle(ev.Tick(), now)
    router.handle(ev.Tick(), 12.1)
    assert {replica.heartbeat.replica for replica in router.replicas} == {"a"}


def test_it_ends():
    router = region()
    ticked(router, 29.0)
    assert router.models()
    ticked(router, 30.2, 29.0)
    assert not router.models()


@pytest.mark.parametrize(("heard", "silent"), [("us", "eu"), ("eu", "us")])
def test_one_regions_heartbeats_do_not_count_for_another(heard, silent):
    """A router of us with the replicas of eu, which it adopted: each region is seen by itself."""
    table = ReplicaTable(RouterId("r1"), RouterSettings())

    def beats(region, seq, now):
        for name in ("a", "b"):
            known = replica_name_at(RegionId(region), name, US)
            table.see(replace(beat(name, seq), replica=known, region=RegionId(region)), now)

    beats(silent, 1, 0.0)
    for seq in range(1, 100):
        now = seq / 10
        beats(heard, seq, now)
        assert table.expire(now) == []
    of = {region: table.get(table.names_of(RegionId(region))[0]) for region in (heard, silent)}
    assert {r: table.is_blind_to(one, 9.9) for r, one in of.items()} == {heard: False, silent: True}
    model = of[silent].heartbeat.models[0]
    assert table.unavailable_because(of[silent], model, 9.9) is None

    table.remove(table.names_of(RegionId(silent))[0])  # one alone: its silence is its own
    [(gone, _)] = table.expire(9.9)
    assert table.names_of(RegionId(silent)) == [] and gone not in table.names_of(RegionId(heard))
