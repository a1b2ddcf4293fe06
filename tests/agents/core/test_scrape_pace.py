"""How often an engine is scraped."""

import pytest

from agents.core.events import EngineReading, EngineScraped, PagesSeen, ScrapeFailed
from agents.core.scrape_pace import IDLE_S, REST_S, STILL, ScrapePace

BUSY_S = 0.05
GOOD = EngineScraped(0.0, EngineReading(running=0, progress=(7.0,)), None)
MOVED = EngineScraped(1.0, EngineReading(running=0, progress=(8.0,)), None)
BROKEN = EngineScraped(1.0, EngineReading(), None, pages=PagesSeen("metrics: HTTP 503"))
FAILED = ScrapeFailed(began_at=1.0, last_content_at=0.0, timed_out=False, detail="refused")


def at_rest() -> ScrapePace:
    pace = ScrapePace(BUSY_S)
    for _ in range(STILL):
        assert pace.next_in_s(GOOD, is_busy=False, is_connected=True) == IDLE_S
        assert not pace.rests
    assert pace.next_in_s(GOOD, is_busy=False, is_connected=True) == REST_S
    assert pace.rests
    return pace


@pytest.mark.parametrize("found", [MOVED, BROKEN, FAILED])
def test_an_engine_that_shows_something_new_does_not_rest(found) -> None:
    pace = at_rest()
    for scrape in (found, GOOD):
        assert pace.next_in_s(scrape, is_busy=False, is_connected=True) == IDLE_S


@pytest.mark.parametrize("found", [BROKEN, FAILED])
def test_one_that_stays_broken_never_rests(found) -> None:
    pace = ScrapePace(BUSY_S)
    for _ in range(3 * STILL):
        assert pace.next_in_s(found, is_busy=False, is_connected=True) == IDLE_S


def test_nor_does_one_whose_death_no_connection_would_tell() -> None:
    assert at_rest().next_in_s(GOOD, is_busy=False, is_connected=False) == IDLE_S


def test_nor_one_that_has_a_request() -> None:
    pace = at_rest()
    assert pace.next_in_s(GOOD, is_busy=True, is_connected=True) == BUSY_S
    assert pace.next_in_s(GOOD, is_busy=False, is_connected=True) == IDLE_S


def test_once_woken_it_has_to_be_still_again() -> None:
    pace = at_rest()
    pace.woken()
    assert not pace.rests
    assert pace.next_in_s(GOOD, is_busy=False, is_connected=True) == IDLE_S


def test_an_operators_longer_interval_holds_at_rest_too() -> None:
    pace = ScrapePace(1.0)
    for _ in range(2 * STILL):
        assert pace.next_in_s(GOOD, is_busy=False, is_connected=True) == 1.0
