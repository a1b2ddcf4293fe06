"""Whose silence counts when the bus was away."""

import pytest

from mesh.core.model.events import DigestSeen, HeartbeatSeen, Tick
from mesh.core.model.settings import RouterSettings
from mesh.core.view.bus_status import STOOD_STILL_S, BusStatus
from tests.mesh.core.build import beat, core, digest


def bus() -> BusStatus:
    return BusStatus(RouterSettings(heartbeat_blind_s=30.0))


def test_while_it_is_there_all_silence_counts() -> None:
    assert bus().silent_s(3.0, 10.0) == 7.0
    assert not bus().is_away(10.0)


def test_time_without_the_bus_does_not_count_as_silence() -> None:
    ours = bus()
    ours.lost(10.0)
    ours.lost(20.0)  # it is gone already
    assert ours.is_away(40.0)
    assert ours.silent_s(9.0, 40.0) == 1.0
    assert ours.silent_s(11.0, 40.0) == 0.0, "received though it is away: then it is well"
    ours.returned(40.0)
    assert not ours.is_away(40.0)
    assert ours.silent_s(9.0, 41.5) == 1.5
    assert ours.silent_s(41.0, 41.5) == 0.5


def test_after_a_while_those_behind_it_are_as_lost_as_they_look() -> None:
    ours = bus()
    ours.lost(10.0)
    assert not ours.is_away(40.1)
    assert ours.silent_s(9.0, 40.1) == 40.1 - 9.0
    ours.returned(50.0)
    assert ours.silent_s(9.0, 50.5) == 0.5


def test_time_in_which_this_process_was_suspended_does_not_count_as_silence() -> None:
    ours = bus()
    ours.tick(10.0)
    ours.tick(10.0 + STOOD_STILL_S)
    assert ours.silent_s(9.0, 11.0) == 2.0
    ours.tick(111.0)  # whatever the length
    assert ours.silent_s(9.0, 111.0) == 2.0, "before it"
    assert ours.silent_s(9.0, 112.5) == 3.5
    assert ours.silent_s(50.0, 112.5) == 1.5, "received meanwhile, and read afterwards"
    ours.tick(111.1)
    assert ours.silent_s(9.0, 111.1) == 111.1 - 109.0
    assert ours.silent_s(111.05, 111.1) == 111.1 - 111.05


@pytest.mark.parametrize("gap_s", [1.1, 1.5, 5.0])
def test_a_process_whose_ticks_are_all_late_forgives_for_a_while_only(gap_s: float) -> None:
    ours, now = bus(), 10.0
    ours.tick(now)
    while ours.silent_s(10.0, now) <= 2.0:
        assert now < 10.0 + 30.0 + 2 * gap_s + 2.0
        ours.tick(now := now + gap_s)
    assert now > 10.0 + 30.0
    assert ours.silent_s(now, now) == 0.0, "a new message starts anew"


@pytest.mark.parametrize("gap_s", [0.1, 1.1, 5.0])
def test_a_router_whose_ticks_are_all_late_still_loses_the_dead(gap_s: float) -> None:
    router, now = core(), 100.0
    router.handle(HeartbeatSeen(beat("us-0")), now)
    router.handle(DigestSeen(digest("eu")), now)
    while router.models():
        assert now < 100.0 + 50.0
        now += gap_s
        router.handle(Tick(), now)
