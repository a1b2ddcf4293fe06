"""The rules of pending and full, as tables."""

import pytest

from agents.core.engine_load import EngineLoad, occupancy, pending, room, still_waiting
from agents.core.events import NOTHING_KNOWN, EngineReading, EngineScraped, TokenUsage
from agents.core.prefill_speed import PrefillLine
from agents.core.requests import AgentRequest, RequestTable, ScrapeCounters
from agents.core.routers import RouterKey
from agents.core.work_message import WorkRequest


def counters(*, sent_since: int) -> ScrapeCounters:
    """Of so many requests sent after the scrape."""
    made = ScrapeCounters()
    made.scraped(1.0, 1.0, ())
    for _ in range(sent_since):
        made.sent(2.0)
    return made


def reading(**known) -> EngineReading:
    return EngineReading(**known)


@pytest.mark.parametrize(
    ("look", "handed_since", "tokens", "expected"),
    [
        (NOTHING_KNOWN, 5, None, None),
        (reading(waiting=0), 5, None, 0),
        (reading(waiting=3), 5, None, 3),
        (reading(waiting=0, running=6, batch_max=8), 2, None, 0),
        (reading(waiting=0, running=6, batch_max=8), 5, None, 3),
        (reading(waiting=2, running=8, batch_max=8), 1, None, 3),
        (reading(waiting=0, running=9, batch_max=8), 1, None, 1),
        (reading(waiting=0, kv_capacity_tokens=1000, kv_used_ratio=0.5), 3, 200.0, 1),
        (reading(waiting=0, kv_capacity_tokens=1000, kv_used_ratio=0.5), 3, None, 0),
        (reading(waiting=0, kv_used_ratio=1.0), 3, 200.0, 0),
    ],
)
def test_pending(look, handed_since, tokens, expected) -> None:
    assert pending(look, counters(sent_since=handed_since), tokens) == expected


@pytest.mark.parametrize(
    ("said", "still", "settled", "expected"),
    [
        (0, 0, 0, 0),
        (1, 1, 0, 1),  # nothing happened since
        (1, 0, 1, 0),  # the one that waited has its first byte
        (2, 1, 1, 1),
        (2, 3, 1, 2),  # others were prefilling: any of them may be the one
        (2, 1, 3, 1),  # more than the waiting ones have begun
        (5, 0, 1, 4),  # requests of other clients wait too
        (5, 0, 0, 5),
        (3, 0, 9, 0),
    ],
)
def test_what_can_still_be_waiting(said, still, settled, expected) -> None:
    assert still_waiting(said, still, settled) == expected


def test_the_smaller_room_counts() -> None:
    look = reading(waiting=0, running=0, batch_max=8, kv_capacity_tokens=1000, kv_used_ratio=0.0)
    assert room(look, 500.0) == 2
    assert room(look, 10.0) == 8
    assert room(NOTHING_KNOWN, 10.0) is None


@pytest.mark.parametrize(
    ("pending_now", "outstanding", "expected"),
    [(None, 7, False), (None, 8, True), (0, 7, False), (1, 0, True), (0, 9, True)],
)
def test_full(pending_now, outstanding, expected) -> None:
    load = EngineLoad(outstanding_max=8, batch_max=None, counts_own=False)
    load.scraped(EngineScraped(1.0, reading(waiting=pending_now), ("m",)))
    assert load.counts(ScrapeCounters(), outstanding, 0).full is expected


WAITS = {"waiting": 2, "running": 1, "kv_used_ratio": 0.1, "kv_capacity_tokens": 1000}


@pytest.mark.parametrize(
    ("shown", "batch_max", "now", "expected"),
    [
        (WAITS, None, 12.0, 1.9),  # the second of three has waited for 2 s
        (WAITS, None, 10.05, None),  # no longer than first tokens take
        (WAITS | {"waiting": 0}, None, 12.0, None),
        (WAITS | {"waiting": 9}, None, 12.0, 2.9),  # others' requests wait before them
        (WAITS, 1, 12.0, None),  # routers know when it is full
        (WAITS | {"kv_used_ratio": 0.99}, None, 12.0, None),  # it waits for memory
        ({"waiting": 2}, None, 12.0, 1.9),  # nothing else is shown
    ],
)
def test_how_long_a_batch_of_unknown_size_has_been_full(shown, batch_max, now, expected) -> None:
    load = EngineLoad(outstanding_max=8, batch_max=batch_max, counts_own=False)
    load.scraped(EngineScraped(9.0, reading(**shown), ("m",)))
    load.answers.add(TokenUsage(100, 0, 100), None)
    requests = RequestTable()
    for number, sent_at in enumerate((9.0, 10.0, 10.5)):
        work = WorkRequest("m", "/v1/completions", "", 10.0, None, 10)
        one = AgentRequest(str(number), RouterKey("us", "r1"), work, {}, 1, 0.0)
        requests.add(one, sent_at)
        requests.send(one, sent_at)
    assert load.slot_wait_s(load.reading.waiting, requests, now) == (
        expected and pytest.approx(expected, abs=0.01)
    )


def test_the_prompts_before_it_are_no_wait_for_a_slot() -> None:
    requests = RequestTable()
    for number in range(3):
        work = WorkRequest("m", "/v1/completions", "", 10.0, None, 1000)
        one = AgentRequest(str(number), RouterKey("us", "r1"), work, {}, 1, 0.0)
        requests.add(one, 10.0)
        requests.send(one, 10.0)
    line = PrefillLine(s_per_token=0.001, base_s=0.5)
    assert requests.waited_beyond_s(2, line, 14.0) == pytest.approx(4.0 - 2.0 * 2.5)
    assert requests.waited_beyond_s(1, line, 18.0) == pytest.approx(8.0 - 2.0 * 3.5)
    requests.begin(requests.by_inbox["0"], 13.0)
    assert requests.waited_beyond_s(2, line, 14.0) == pytest.approx(4.0 - 2.0 * 2.5), "its was one"
    assert RequestTable().waited_beyond_s(2, line, 14.0) == 0.0


def test_occupancy() -> None:
    assert occupancy(3, 4) == 0.75
    assert occupancy(5, 4) == 1.0
    assert occupancy(None, 4) is None
    assert occupancy(3, None) is None
