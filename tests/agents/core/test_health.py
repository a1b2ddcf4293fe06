"""Is the engine there?"""

from agents.core.engine_health import SILENCE_S, EngineHealth
from agents.core.events import ScrapeFailed
from schemas.state import ReplicaState


def fail(health: EngineHealth, now: float, *, last_content_at=-1.0, timed_out=False) -> None:
    failed = ScrapeFailed(
        began_at=now - 0.1, last_content_at=last_content_at, timed_out=timed_out, detail="x"
    )
    health.failed(failed, now)


def test_an_engine_that_never_answered_is_starting() -> None:
    health = EngineHealth()
    for now in range(10):
        fail(health, now)
    assert health.state is ReplicaState.STARTING
    health.succeeded()
    assert health.state is ReplicaState.READY


def test_three_failures_in_a_row_are_down_and_one_good_scrape_is_up() -> None:
    health = EngineHealth()
    health.succeeded()
    fail(health, 1.0)
    fail(health, 1.1)
    health.succeeded()
    fail(health, 1.2)
    fail(health, 1.3)
    assert health.state is ReplicaState.READY
    fail(health, 1.4)
    assert health.state is ReplicaState.DOWN
    health.succeeded()
    assert health.state is ReplicaState.READY


def test_an_engine_that_sleeps_is_down_until_it_is_woken_up() -> None:
    health = EngineHealth()
    health.succeeded()
    for now in (1.0, 2.0, 3.9):
        health.slept(now)
        assert health.state is ReplicaState.DOWN and health.asleep
        assert not health.lost(now)
    assert health.lost(1.0 + SILENCE_S)
    health.succeeded()
    assert health.state is ReplicaState.READY and not health.asleep


def test_a_busy_engine_that_times_out_is_not_dead() -> None:
    health = EngineHealth()
    health.succeeded()
    for now in (1.0, 2.0, 3.0, 4.0):
        fail(health, now, last_content_at=now - 0.05, timed_out=True)
    assert health.state is ReplicaState.READY
    for now in (5.0, 6.0, 7.0):
        fail(health, now, last_content_at=4.0, timed_out=True)
    assert health.state is ReplicaState.DOWN


def test_answers_are_given_up_after_silence_on_all_of_them() -> None:
    health = EngineHealth()
    health.succeeded()
    assert not health.lost(100.0)
    for now in (1.0, 1.1, 1.2):
        fail(health, now)
    assert not health.lost(1.2 + SILENCE_S - 0.01)
    fail(health, 4.0, last_content_at=3.9)  # refuses scrapes, but its streams still flow
    assert not health.lost(6.8)
    assert health.lost(3.9 + SILENCE_S)
