"""Which asking routers are gone."""

import pytest

from agents.core.routers import (
    AWAY_S_MAX,
    MISSED_S,
    ROUTERS_MAX,
    SILENCE_ABROAD_S,
    SILENCE_S,
    RouterChange,
    RouterKey,
    RouterLiveness,
)
from mesh.core.model.settings import RouterSettings
from schemas.exchange import WORKING_S
from schemas.ids import RegionId, RouterId

US, EU = RouterKey("us", "r1"), RouterKey("eu", "r1")


def test_a_router_without_a_keepalive_gets_its_time_from_the_first_work() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(US, 10.0)
    assert watch.silent(10.0 + SILENCE_S - 0.01) == []
    assert watch.silent(10.0 + SILENCE_S) == [US]


def test_a_router_of_another_region_has_more_time() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(EU, 10.0)
    assert watch.silent(10.0 + SILENCE_ABROAD_S - 0.01) == []
    assert watch.silent(10.0 + SILENCE_ABROAD_S) == [EU]


def test_over_a_cut_link_neither_end_gives_the_other_up_first() -> None:
    assert RouterSettings().heartbeat_lost_s + WORKING_S == SILENCE_ABROAD_S


def test_signs_keep_a_router_alive_until_its_last_answer() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(US, 0.0)
    watch.join(US, 0.0)
    watch.alive(US, 1, 2.5)
    assert watch.silent(5.0) == []
    assert watch.silent(5.5) == [US]
    watch.leave(US)
    assert watch.silent(5.5) == [US]
    watch.leave(US)
    assert watch.silent(99.0) == []


def test_a_long_silent_router_that_sends_work_again_starts_anew() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.alive(US, 1, 0.0)
    watch.join(US, 100.0)
    assert watch.silent(101.0) == []


def test_a_new_epoch_is_a_restart() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(US, 0.0)
    assert not watch.alive(US, 1, 0.1).restarted
    assert not watch.alive(US, 1, 0.2).restarted
    assert watch.alive(US, 2, 0.3).restarted


def test_the_epoch_is_known_before_the_first_work() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.alive(US, 1, 0.0)
    watch.join(US, 0.1)
    assert watch.alive(US, 2, 0.2).restarted


def test_a_keepalive_after_missing_ones_means_that_frames_may_be_lost() -> None:
    watch = RouterLiveness(RegionId("us"))
    new = RouterChange(restarted=False, resync=False, is_new=True)
    assert watch.alive(US, 1, 0.0) == new
    assert not watch.alive(US, 1, MISSED_S - 0.01).resync
    assert watch.alive(US, 1, 2 * MISSED_S) == RouterChange(restarted=False, resync=True)
    assert not watch.alive(US, 1, 2 * MISSED_S).resync


def test_what_is_missed_of_a_router_at_rest_goes_by_its_word() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.alive(US, 1, 0.0, next_within_s=1.0)
    assert not watch.alive(US, 1, 1.39, next_within_s=1.0).resync
    assert watch.alive(US, 1, 2.79, next_within_s=1.0).resync
    watch.join(US, 3.0)  # it is not at rest any more
    assert watch.alive(US, 1, 3.01 + MISSED_S).resync
    watch.alive(US, 1, 4.0, next_within_s=1.0)  # that left before
    assert watch.alive(US, 1, 4.01 + MISSED_S).resync


def test_no_router_is_silent_while_the_bus_is_away() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(US, 0.0)
    watch.alive(EU, 1, 0.0)
    watch.bus_lost(1.0)
    watch.bus_lost(2.0)  # it is gone already
    assert watch.silent(20.0) == []
    watch.bus_returned(20.0)
    assert watch.alive(EU, 1, 20.1) == RouterChange(restarted=False, resync=True), "however soon"
    assert watch.alive(EU, 1, 20.2) == RouterChange(restarted=False, resync=False)
    assert watch.silent(20.0 + SILENCE_S - 0.01) == []
    assert watch.silent(20.0 + SILENCE_S) == [US]


@pytest.mark.parametrize("work_first", [False, True])
def test_a_router_that_is_new_after_the_bus_was_away_gets_its_frames_at_its_first_keepalive(
    work_first,
) -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.bus_lost(1.0)
    watch.bus_returned(2.0)
    if work_first:
        watch.join(EU, 3.0)
    found = RouterChange(restarted=False, resync=True, is_new=not work_first)
    assert watch.alive(EU, 1, 3.1) == found
    assert watch.alive(EU, 1, 3.2) == RouterChange(restarted=False, resync=False)
    later = RouterKey(RegionId("ap"), RouterId("r1"))
    assert not watch.alive(later, 1, 3.1 + SILENCE_ABROAD_S).resync


def test_routers_are_lost_when_the_bus_stays_away() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(US, 0.0)
    watch.alive(EU, 1, 0.0)
    watch.bus_lost(1.0)
    watch.bus_lost(2.0)
    assert watch.silent(1.0 + AWAY_S_MAX - 0.01) == []
    assert watch.silent(1.0 + AWAY_S_MAX) == [US]


def test_the_table_is_bounded_and_keeps_routers_with_answers() -> None:
    watch = RouterLiveness(RegionId("us"))
    watch.join(US, 0.0)
    for number in range(2 * ROUTERS_MAX):
        watch.alive(RouterKey("eu", f"r{number}"), 1, 1.0 + number)
    assert len(watch._routers) == ROUTERS_MAX
    assert watch.silent(10.0) == [US]
