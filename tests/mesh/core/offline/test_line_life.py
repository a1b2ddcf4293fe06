"""One line's life: refused, preempted, failed, lost, unserved, expired, cancelled, stored."""

from itertools import pairwise

import pytest

from mesh.core.model import events as ev
from mesh.core.offline import effects as ofx
from mesh.core.offline import events as oev
from mesh.core.offline.attempts import PEER_REPLY_S_MAX
from mesh.core.offline.lines import LineState
from mesh.core.requests.record import ImpossibleTransition
from schemas.exchange import SILENCE_S_MAX, Refusal
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import EU, beat
from tests.mesh.core.offline.world import EUROPE, World, offline_state

US_0 = ReplicaId("us-0")


def one_line(**settings: object) -> tuple[World, int]:
    """A line under way at us-0, and its key."""
    world = World(**settings)
    world.replica(US_0)
    world.submit(lines=1)
    world.run(1.0)
    (key,) = world.open
    return world, key


def result(world: World, number: int = 1, name: str = "j") -> ofx.SettleLine:
    return world.results[name, number]


def test_an_answer_is_its_result_and_frees_the_window_once_it_is_stored():
    world, key = one_line()
    world.end(key)
    assert result(world).settlement is ofx.Settlement.ANSWER
    assert len(world.core.state.window) == 1, "its place is kept until the result is stored"
    world.stored()
    assert len(world.core.state.window) == 0
    assert world.core.is_idle


@pytest.mark.parametrize("reason", [*Refusal])
def test_a_refusal_costs_no_failure(reason: Refusal):
    world, _ = one_line(failures_max=2)
    while world.now < 300 and not world.results:
        world.run(0.5)
        for key in list(world.open):
            world.refuse(key, reason)
    if reason is Refusal.BAD_WORK:
        assert result(world).settlement is ofx.Settlement.ERROR
    else:
        assert not world.results
        assert world.core.counts.refused > 10


def test_a_preempted_line_is_tried_again_at_the_next_heartbeat_and_for_ever():
    world, _ = one_line(failures_max=1)
    for _ in range(50):
        (key,) = world.open
        world.fail(key, preempted=True)
        assert not world.open
        world.beats()
    assert world.core.counts.preempted == 50
    assert not world.results


def test_a_preempted_prompt_is_taken_for_cached():
    """Its replica has mostly computed it: where not, it does once, and its neighbours wait less."""
    world, key = one_line()
    told = [world.prefill_tokens]
    world.fail(key, preempted=True)
    world.run(2.0)
    assert [*told, world.prefill_tokens] == [90, 26]


@pytest.mark.parametrize("why", ["refused", "lost"])
def test_a_prompt_that_was_not_computed_is_not_taken_for_cached(why: str):
    world, key = one_line()
    told = [world.prefill_tokens]
    if why == "refused":
        world.refuse(key)
    else:
        world.restart(US_0)
    world.run(2.0)
    told.append(world.prefill_tokens)
    assert world.core.counts.given == 2
    assert told == [90, 90]


def test_one_that_is_worked_on_for_ever_ends_after_its_deadline():
    world, key = one_line(attempt_s_max=60.0)
    for _ in range(70):
        world.feed(ev.AttemptProgressed(key, world.open[key].attempt))
        world.run(1.0, step_s=0.5)
    assert world.open
    world.run(SILENCE_S_MAX - 9.0)
    world.feed(ev.AttemptProgressed(key, 1))
    assert world.core.counts.failed == 1
    assert [one.attempt for one in world.cancelled] == [1]


def test_failed_attempts_are_bounded_and_the_pauses_between_them_grow():
    world, _ = one_line(failures_max=4)
    failed_at = []
    while not world.results and world.now < 3000:
        for key in list(world.open):
            failed_at.append(world.now)
            world.fail(key)
        world.run(1.0, step_s=0.25)
    pauses = [round(after - before) for before, after in pairwise(failed_at)]
    assert len(failed_at) == 4
    assert pauses == sorted(pauses) and pauses[0] >= 15 and pauses[-1] >= 200, pauses
    assert (result(world).settlement, result(world).code) == ("error", "engine_failed")
    assert result(world).message == "why"


@pytest.mark.parametrize(
    ("status", "attempts", "settlement"),
    [(500, 2, "engine_error"), (503, 2, "engine_error"), (501, 1, "engine_error")],
)
def test_an_engines_error_is_passed_on_after_one_more_engine(
    status: int, attempts: int, settlement: str
):
    world, _ = one_line()
    tried = 0
    while not world.results and world.now < 500:
        for key in list(world.open):
            tried += 1
            world.fail(key, status)
        world.run(1.0, step_s=0.25)
    assert (tried, result(world).settlement) == (attempts, settlement)


def test_an_engine_that_is_full_is_tried_again_without_end():
    world, _ = one_line(failures_max=1)
    while world.now < 200:
        for key in list(world.open):
            world.fail(key, 429)
        world.run(0.5)
    assert not world.results
    assert world.core.counts.refused > 10


def test_a_line_goes_elsewhere_after_a_failure():
    world, key = one_line()
    world.replica("us-1")
    world.fail(key)
    world.run(1.0)
    assert world.attempted("us-1") == [1]


@pytest.mark.parametrize("how", ["gone", "epoch", "silent"])
def test_a_lost_replicas_lines_go_back(how: str):
    world = World()
    one = world.replica(US_0, room_max=500)
    world.submit(lines=5)
    world.run(1.0)
    assert sorted(world.attempted(US_0)) == [1, 2, 3, 4, 5]
    world.replica("us-1", room_max=0)  # so that a silent one is not taken for lost heartbeats
    if how == "gone":
        world.feed(ev.HeartbeatSeen(beat(US_0, 10**6, state=ReplicaState.GONE)))
        one.silent = True
    elif how == "epoch":
        world.restart(US_0)
        one.room_max = 0
        world.beats()
    else:
        one.silent = True
        world.run(4.0)
    assert not world.open
    assert len(world.cancelled) == 5
    world.replica("us-2")
    world.run(1.0)
    assert sorted(world.attempted("us-2")) == [1, 2, 3, 4, 5]
    assert world.core.counts.failed == 5


def test_an_attempt_without_a_sign_of_life_is_given_up_and_one_with_is_not():
    world = World()
    world.replica(US_0, room_max=200)
    world.submit(lines=2)
    world.run(1.0)
    silent, alive = world.open
    until = world.now + SILENCE_S_MAX + 2
    while world.now < until:
        world.run(0.5)
        world.feed(ev.AttemptProgressed(alive, 1))
    assert alive in world.open
    assert silent not in world.open or world.open[silent].attempt == 2
    assert [effect.key for effect in world.cancelled] == [silent]


def test_a_process_that_was_suspended_gives_nothing_up():
    world, key = one_line()
    world.tick(60.0)
    world.tick(0.05)
    assert key in world.open and not world.cancelled


def test_what_was_under_way_when_the_bus_was_away_is_not_counted_as_failed():
    world, key = one_line(failures_max=1)
    world.feed(ev.BusLost())
    world.tick(25.0)
    assert key in world.open
    world.feed(ev.BusReturned())
    world.run(SILENCE_S_MAX + 2)
    assert not world.results
    assert world.core.counts.failed == 0
    assert world.open[key].attempt == 2


def test_nothing_is_handed_out_while_the_bus_is_away():
    world = World()
    world.replica(US_0)
    world.feed(oev.OfflineStateSeen(offline_state(EU)))
    world.submit(lines=3)
    world.tick()
    world.feed(ev.BusLost())
    world.answer_fetches()
    for _ in range(10):
        world.tick()
    world.beats()
    assert not world.open
    world.feed(ev.BusReturned())
    world.run(0.5)
    assert len(world.open) == 3


def test_a_model_that_nobody_serves_for_two_minutes_is_not_found():
    world = World()
    world.replica(US_0)
    world.submit(lines=600, model=ModelId("m2"))
    world.run(119.0, step_s=1.0)
    assert not world.results
    world.run(6.0, step_s=1.0)
    assert len(world.results) > 500
    assert {(one.settlement, one.code) for one in world.results.values()} == {
        ("error", "model_not_found")
    }
    world.submit("k", lines=5, model=ModelId("m2"))
    world.run(2.0)
    assert result(world, 3, "k").code == "model_not_found", "known by now"
    assert "m2" in result(world, 3, "k").message


def test_a_model_that_a_peer_serves_or_that_comes_is_waited_for():
    world = World()
    world.submit(lines=2, model=ModelId("m2"))
    world.run(100.0, step_s=1.0)
    world.replica(US_0, models=(ModelId("m2"),), room_max=0)
    world.run(200.0, step_s=1.0)
    world.submit("k", lines=1, model=ModelId("m3"))
    for seq in range(150):
        state = offline_state(EU, seq + 1, model=ModelId("m3"), room=0)
        world.feed(oev.OfflineStateSeen(state))
        world.run(1.0, step_s=0.5)
    assert not world.results


def test_while_the_bus_is_away_no_model_counts_as_unserved():
    world = World()
    world.submit(lines=2, model=ModelId("m2"))
    world.run(100.0, step_s=1.0)
    world.feed(ev.BusLost())
    world.run(30.0, step_s=1.0)
    world.feed(ev.BusReturned())
    world.run(110.0, step_s=1.0)
    assert not world.results
    world.run(15.0, step_s=1.0)
    assert len(world.results) == 2


def test_refusals_by_a_replica_that_takes_other_lines_make_it_rest_shortly():
    """As where two runners of a region share its room."""
    world = World()
    world.replica(US_0, room_max=100_000)
    world.submit(lines=500)
    refused_at: list[float] = []
    while len(refused_at) < 12:
        taken = set(world.open)
        world.run(0.2)
        new = [key for key in world.open if key not in taken]
        for key in new[1:]:
            world.refuse(key)
        if new:
            refused_at.append(world.now)
            world.feed(ev.AttemptProgressed(new[0], world.open[new[0]].attempt))
    assert max(after - before for before, after in pairwise(refused_at)) < 1.0


def test_at_the_deadline_what_was_fetched_expires():
    world = World()
    world.replica(US_0, room_max=200)
    world.submit(lines=8, window_s=60.0)
    world.run(58.0, step_s=0.5)
    running = len(world.open)
    assert running
    world.run(4.0)
    assert {one.code for one in world.results.values()} == {"batch_expired"}
    assert len(world.results) == 8
    assert len(world.cancelled) >= running and not world.open


def test_a_job_that_has_ended_leaves_nothing_under_way():
    world = World()
    world.replica(US_0, room_max=200)
    world.submit(lines=8)
    world.submit("k", lines=2)
    world.run(1.0)
    world.feed(oev.JobEnded("j"))
    assert {line.job for line in world.out.values()} == {"k"}
    assert sorted(world.store["j"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    late = world.line("j", 3, 100, ())
    world.out[late.key] = late
    world.feed(oev.LinesFetched("j", (late,)))
    assert late.key not in world.out, "put back"
    assert len(world.core.state.jobs) == 1


@pytest.mark.parametrize("over", [True, False])
def test_a_drain_puts_back_what_waits_at_once_and_what_runs_after_a_while(over: bool):
    world = World(drain_s_max=5.0)
    world.replica(US_0, room_max=200)
    world.submit(lines=8)
    world.run(1.0)
    world.feed(ev.Drain())
    assert len(world.open) == len(world.out) == 2
    assert len(world.saved) == 1, "the forecast is kept"
    first = next(iter(world.open))
    world.end(first)
    world.run(3.0)
    assert len(world.open) == 1, "nothing new, and what runs may end"
    if over:
        world.feed(ev.DrainOver())
    else:
        world.run(3.0)
    assert not world.open and not world.out
    assert not world.core.is_idle, "a result is being stored"
    world.stored()
    assert world.core.is_idle
    assert world.published[-1].accepting is False


def test_lines_that_come_while_draining_are_put_back():
    world = World()
    world.replica(US_0)
    world.submit(lines=8)
    world.tick()
    world.feed(ev.Drain())
    world.answer_fetches()
    assert not world.out and world.core.is_idle


def test_a_line_that_comes_twice_is_in_the_window_once():
    world = World()
    world.submit(lines=3)
    world.run(1.0)
    again = world.line("j", 2, 100, ())
    world.out[again.key] = again
    world.feed(oev.LinesFetched("j", (again,)))
    assert again.key not in world.out
    assert len(world.core.state.window) == 3


def test_a_line_that_no_region_may_compute_gets_an_error_at_once():
    world = World()
    world.replica(US_0)
    world.submit(lines=1, residency=("mars",))
    world.run(1.0)
    assert result(world).code == "residency"
    assert "mars" in result(world).message


def test_a_line_waits_for_a_place_that_carries_its_label():
    world = World()
    world.replica(US_0)
    world.submit(lines=1, residency=(EUROPE,))
    world.run(1.0)
    world.peer_labels[EU] = ()
    world.feed(oev.OfflineStateSeen(offline_state(EU)))
    world.run(1.0)
    assert not world.open, "the peer's state names no label"
    world.peer_labels[EU] = (EUROPE,)
    world.feed(oev.OfflineStateSeen(offline_state(EU, 2, residency=(EUROPE,))))
    world.run(1.0)
    assert world.attempted(EU) == [1]


def test_a_peer_that_says_nothing_is_given_up_and_not_counted_against_the_line():
    world = World(failures_max=1)
    world.submit(lines=1)
    world.feed(oev.OfflineStateSeen(offline_state(EU)))
    world.run(1.0)
    assert world.attempted(EU) == [1]
    world.run(PEER_REPLY_S_MAX + 1)
    assert not world.open and not world.results
    assert len(world.cancelled) == 1
    assert world.core.counts.failed == 0


def test_a_peers_replica_is_named_in_a_cancel():
    world = World()
    world.submit(lines=1)
    world.feed(oev.OfflineStateSeen(offline_state(EU)))
    world.run(1.0)
    (key,) = world.open
    world.feed(ev.PlacedByPeer(key, 1, ReplicaId("eu-7")))
    world.feed(oev.JobEnded("j"))
    (cancel,) = world.cancelled
    assert (cancel.region, cancel.replica) == (RegionId("eu"), ReplicaId("eu-7"))


def test_reports_of_an_attempt_that_is_over_change_nothing():
    world, key = one_line()
    world.fail(key, preempted=True)
    world.beats()
    before = world.core.counts.refused, world.core.counts.answered
    for event in (
        ev.AnswerEnded(key, 1),
        ev.AttemptRefused(key, 1, Refusal.FULL, EU, None, -1, -1),
        ev.AttemptFailed(key, 1, "late"),
        ev.AttemptProgressed(key, 1),
        ev.PlacedByPeer(key, 1, US_0),
        oev.LineStored(key),
        ev.ClientGone(key),
    ):
        assert world.feed(event) == []
    assert (world.core.counts.refused, world.core.counts.answered) == before
    assert world.open[key].attempt == 2


def test_a_step_that_the_table_lacks_is_a_defect():
    world, key = one_line()
    record = world.core.state.window.get(key)
    assert record is not None and record.state is LineState.ATTEMPTED
    world.core.state.window.put_back(record)
    with pytest.raises(ImpossibleTransition):
        world.core.state.window.put_back(record)
