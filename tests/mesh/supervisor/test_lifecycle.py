import pytest

from mesh.supervisor.lifecycle import (
    RESTARTS_MAX,
    STEADY_S,
    WAIT_MAX_S,
    ProcessLifecycle,
    ProcessPhase,
)


def restart_waits(process, runs, *, ran_s=1.0):
    """The waits before so many restarts of a process that becomes ready and dies after `ran_s`."""
    waits, now = [], 0.0
    for _ in range(runs):
        process.started(now)
        process.became_ready()
        now += ran_s
        waits.append(process.ended(now))
        if waits[-1] is not None:
            assert (process.phase, process.due) == (ProcessPhase.WAITING, now + waits[-1])
            now = process.due
    return waits


def test_waits_double_up_to_a_limit_and_then_end():
    process = ProcessLifecycle()
    waits = restart_waits(process, RESTARTS_MAX + 1)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert max(wait for wait in waits if wait) <= WAIT_MAX_S
    assert process.phase is ProcessPhase.ENDED


def test_a_steady_run_clears_the_count():
    process = ProcessLifecycle()
    restart_waits(process, RESTARTS_MAX)
    assert restart_waits(process, 1, ran_s=STEADY_S) == [0.25]


def test_what_was_never_ready_is_not_restarted():
    process = ProcessLifecycle()
    process.started(0.0)
    assert process.ended(1.0) is None
    assert process.phase is ProcessPhase.ENDED


def test_without_a_limit_the_longest_wait_goes_on():
    waits = restart_waits(ProcessLifecycle(restarts_max=None), RESTARTS_MAX + 50)
    assert set(waits[RESTARTS_MAX:]) == {WAIT_MAX_S}


def test_ready_is_reported_as_again_after_a_restart():
    process = ProcessLifecycle()
    process.started(0.0)
    assert process.became_ready() is False
    assert process.phase is ProcessPhase.READY
    process.ended(1.0)
    process.started(1.25)
    assert process.phase is ProcessPhase.STARTING
    assert process.became_ready() is True


@pytest.mark.parametrize("grace_s", [3.0, None])
def test_a_stopped_process_is_not_restarted_and_is_due_to_be_killed(grace_s):
    process = ProcessLifecycle()
    process.started(0.0)
    process.became_ready()
    process.stop(10.0, grace_s)
    assert process.phase is ProcessPhase.STOPPING
    assert process.due == (None if grace_s is None else 13.0)
    assert process.ended(11.0) is None
    assert (process.phase, process.due) == (ProcessPhase.ENDED, None)


def test_what_becomes_ready_while_it_is_stopped_is_still_stopping():
    process = ProcessLifecycle()
    process.started(0.0)
    process.stop(1.0, 3.0)
    process.became_ready()
    assert process.phase is ProcessPhase.STOPPING


def test_a_stop_before_the_restart_prevents_it():
    process = ProcessLifecycle()
    restart_waits(process, 1)
    process.stop(2.0, 3.0)
    assert (process.phase, process.due) == (ProcessPhase.ENDED, None)
