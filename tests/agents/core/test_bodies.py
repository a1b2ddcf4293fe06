"""Bodies from parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.bodies import PART_TIMEOUT_S, Bodies, BodyLost


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20))
def test_parts_in_order_make_the_body(parts) -> None:
    whole = b"".join(parts)
    bodies = Bodies()
    bodies.open("a", len(whole), 0.0)
    offset, results = 0, []
    for part in parts:
        results.append(bodies.add("a", offset, part, 0.0))
        offset += len(part)
    assert results == [None] * (len(parts) - 1) + [whole]
    assert bodies.add("a", 0, b"x", 0.0) is None


def test_repeated_and_unknown_parts_are_ignored() -> None:
    bodies = Bodies()
    bodies.open("a", 4, 0.0)
    assert bodies.add("b", 0, b"ab", 0.0) is None
    assert bodies.add("a", 0, b"ab", 0.0) is None
    assert bodies.add("a", 0, b"ab", 0.0) is None
    assert bodies.add("a", 2, b"cd", 0.0) == b"abcd"


@pytest.mark.parametrize(("offset", "data"), [(1, b"x"), (0, b"12345")])
def test_a_hole_or_an_excess_loses_the_body(offset, data) -> None:
    bodies = Bodies()
    bodies.open("a", 4, 0.0)
    with pytest.raises(BodyLost):
        bodies.add("a", offset, data, 0.0)
    assert bodies.add("a", 0, b"abcd", 0.0) is None


def test_a_part_is_overdue_after_the_timeout() -> None:
    bodies = Bodies()
    bodies.open("a", 4, 0.0)
    bodies.add("a", 0, b"ab", 5.0)
    assert bodies.late(PART_TIMEOUT_S) == []
    assert bodies.late(5.0 + PART_TIMEOUT_S) == ["a"]
