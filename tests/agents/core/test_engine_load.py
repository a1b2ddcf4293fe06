"""The rules of pending and full, as tables."""

import pytest

from agents.core.engine_load import EngineLoad, occupancy, pending, room, still_waiting
from agents.core.events import NOTHING_KNOWN, EngineReading, EngineScraped, TokenUsage
from agents.core.requests import AgentRequest, RequestTable, ScrapeCounters
from agents.core.routers import RouterKey
from agents.core.work_message import WorkRequest
from schemas.state import FirstWaiting


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


def at_engine(*sent_at: float) -> RequestTable:
    """Requests of 10, 11, 12 … tokens, sent then, and a scrape after the last of them."""
    requests = RequestTable()
    for number, at in enumerate(sent_at):
        work = WorkRequest("m", "/v1/completions", "", 10.0, None, 10 + number)
        one = AgentRequest(str(number), RouterKey("us", "r1"), work, {}, 1, 0.0)
        requests.add(one, at)
        requests.send(one, at)
    requests.scraped(max(sent_at), max(sent_at))
    return requests


@pytest.mark.parametrize(
    ("shown", "batch_max", "expected"),
    [
        (WAITS, None, (2.0, 21)),  # the second of three
        (WAITS | {"waiting": 1}, None, (1.5, 33)),
        (WAITS | {"waiting": 0}, None, None),
        (WAITS | {"running": 2}, None, None),  # others use it
        (WAITS | {"waiting": 9}, None, None),
        (WAITS, 1, None),  # routers know when it is full
        (WAITS | {"kv_used_ratio": 0.99}, None, None),  # it waits for memory
        ({"waiting": 2}, None, None),
    ],
)
def test_how_long_the_first_has_waited_in_a_batch_of_unknown_size(
    shown, batch_max, expected
) -> None:
    load = EngineLoad(outstanding_max=8, batch_max=batch_max, counts_own=False)
    load.scraped(EngineScraped(9.0, reading(**shown), ("m",)))
    load.answers.add(TokenUsage(100, 0, 100), None)
    found = load.first_waiting(at_engine(9.0, 10.0, 10.5), 12.0)
    assert found == (expected and FirstWaiting(*expected))


def test_prompts_computed_while_it_waited_count() -> None:
    requests = at_engine(9.0, 10.0, 10.5)
    requests.begin(requests.by_inbox["0"], 11.0)
    assert requests.first_waiting(1, 2, 12.0) == FirstWaiting(2.0, 21)
    assert requests.first_waiting(1, 2, 1e9) == FirstWaiting(3600.0, 21)
    assert RequestTable().first_waiting(1, 2, 12.0) is None


def test_long_plain_answers_do_not_wait() -> None:
    """They have no first byte until their end: the one that waited was sent last, and has begun."""
    requests = at_engine(*range(1, 10))
    assert requests.first_waiting(8, 1, 20.0) == FirstWaiting(11.0, sum(range(10, 19)))
    requests.begin(requests.by_inbox["8"], 9.1)
    assert requests.first_waiting(8, 1, 20.0) is None


def test_those_that_ended_since_the_scrape_were_the_engines() -> None:
    requests = at_engine(9.0, 10.0, 10.5)
    requests.settle(requests.by_inbox["0"], 10.6)
    requests.remove(requests.by_inbox["0"])
    assert requests.first_waiting(1, 2, 12.0) == FirstWaiting(2.0, 21)
    requests.scraped(10.7, 10.8)
    assert requests.first_waiting(1, 2, 12.0) is None


def test_what_the_prompts_take_is_no_wait_for_a_slot() -> None:
    assert FirstWaiting(6.0, 2000).slot_s(0.001, 0.5) == pytest.approx(6.0 - 2 * 2.5)
    assert FirstWaiting(5.09, 2000).slot_s(0.001, 0.5) == 0.0


def test_occupancy() -> None:
    assert occupancy(3, 4) == 0.75
    assert occupancy(5, 4) == 1.0
    assert occupancy(None, 4) is None
    assert occupancy(3, None) is None
