"""Bodies from parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.requests import (
    PART_TIMEOUT_S,
    AgentRequest,
    AgentRequestState,
    BodyLost,
    RequestTable,
)
from agents.core.routers import RouterKey
from agents.core.work_message import WorkRequest


def receiving(size: int) -> tuple[RequestTable, AgentRequest]:
    """A table with one request whose body of that size comes in parts."""
    table = RequestTable()
    work = WorkRequest("m", "/v1/completions", "", 10.0, size)
    record = AgentRequest("a", RouterKey("us", "r1"), work, {}, size, 0.0)
    table.add(record, 0.0)
    assert record.state is AgentRequestState.RECEIVING
    return table, record


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20))
def test_parts_in_order_make_the_body(parts) -> None:
    whole = b"".join(parts)
    table, record = receiving(len(whole))
    offset, results = 0, []
    for part in parts:
        results.append(table.add_part("a", offset, part, 0.0))
        offset += len(part)
    assert results == [None] * (len(parts) - 1) + [whole]
    table.send(record, 0.0)
    assert table.add_part("a", 0, b"x", 0.0) is None


def test_repeated_and_unknown_parts_are_ignored() -> None:
    table, _ = receiving(4)
    assert table.add_part("b", 0, b"ab", 0.0) is None
    assert table.add_part("a", 0, b"ab", 0.0) is None
    assert table.add_part("a", 0, b"ab", 0.0) is None
    assert table.add_part("a", 2, b"cd", 0.0) == b"abcd"


@pytest.mark.parametrize(("offset", "data"), [(1, b"x"), (0, b"12345")])
def test_a_hole_or_an_excess_loses_the_body(offset, data) -> None:
    table, record = receiving(4)
    with pytest.raises(BodyLost):
        table.add_part("a", offset, data, 0.0)
    table.remove(record)
    assert table.add_part("a", 0, b"abcd", 0.0) is None
    assert table.without_next_part(2 * PART_TIMEOUT_S) == []


def test_a_part_is_overdue_after_the_timeout() -> None:
    table, record = receiving(4)
    table.add_part("a", 0, b"ab", 5.0)
    assert table.without_next_part(PART_TIMEOUT_S) == []
    assert table.without_next_part(5.0 + PART_TIMEOUT_S) == [record]
