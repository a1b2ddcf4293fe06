"""The table of requests: states, and the counts of what it holds."""

import pytest

from agents.core.requests import AgentRequest, AgentRequestState, RequestTable
from agents.core.routers import RouterKey
from agents.core.work_message import WorkRequest


def added(table: RequestTable, inbox: str, size: int = 1) -> AgentRequest:
    work = WorkRequest("m", "/v1/completions", "", 10.0, None)
    record = AgentRequest(inbox, RouterKey("us", "r1"), work, {}, size, 0.0)
    table.add(record, 0.0)
    return record


def test_a_life_from_message_to_end() -> None:
    table = RequestTable()
    record = added(table, "a")
    states = [record.state]
    for step in (table.send, table.begin, table.settle):
        step(record, 1.0)
        states.append(record.state)
    assert states == [
        AgentRequestState.ACCEPTED,
        AgentRequestState.SENT,
        AgentRequestState.ANSWERING,
        AgentRequestState.ANSWERING,
    ]
    table.remove(record)
    assert table.by_inbox == {}


def test_no_step_twice_and_none_forgotten_while_the_engine_has_it() -> None:
    table = RequestTable()
    record = added(table, "a")
    table.send(record, 1.0)
    with pytest.raises(AssertionError):
        table.send(record, 2.0)
    with pytest.raises(AssertionError):
        table.remove(record)
    assert table.abort(record)
    assert not table.abort(record)
    table.settle(record, 3.0)
    assert record.state is AgentRequestState.SETTLED
    table.remove(record)


def test_bodies_are_held_until_the_first_byte() -> None:
    table = RequestTable()
    a, b = added(table, "a", 10), added(table, "b", 5)
    assert table.held_bytes == 15
    for record in (a, b):
        table.send(record, 0.5)
    table.begin(a, 1.0)
    table.begin(a, 2.0)
    assert (table.held_bytes, a.began_at) == (5, 1.0)
    table.remove(a)
    table.settle(b, 3.0)
    table.remove(b)
    assert (table.held_bytes, len(table.by_inbox)) == (0, 0)


def test_what_the_engine_has() -> None:
    table = RequestTable()
    a, b, c, d = (added(table, inbox) for inbox in "abcd")
    for record, at in ((a, 1.0), (b, 2.0), (c, 3.0)):
        table.send(record, at)
    assert (a.alone, b.alone) == (True, False)
    table.begin(c, 4.0)
    counters = table.counters
    assert (table.at_engine, counters.waiting) == (3, 2)
    table.scraped(1.0, 1.5)
    assert (counters.sent_before, counters.sent_since) == (1, 1)
    table.settle(a, 5.0)
    for record in (a, c, d):
        table.remove(record)
    assert (table.at_engine, counters.waiting, counters.sent_before) == (1, 1, 0)


def test_deadlines() -> None:
    table = RequestTable()
    a, b = added(table, "a"), added(table, "b")
    assert table.overdue(9.9) == []
    assert table.overdue(10.0) == [a, b]
    table.remove(a)
    assert table.overdue(11.0) == [b]
