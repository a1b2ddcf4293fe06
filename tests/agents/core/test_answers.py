"""The table of owed answers counts what it holds."""

from agents.core.answers import Answer, AnswerTable
from agents.core.routers import RouterName
from agents.core.work import Work


def answer(inbox: str, size: int) -> Answer:
    work = Work("m", "/v1/completions", "", 10.0, None)
    return Answer(inbox, RouterName("us", "r1"), work, {}, size, 0.0)


def test_bodies_are_held_until_the_first_byte() -> None:
    table = AnswerTable()
    a, b = answer("a", 10), answer("b", 5)
    table.add(a)
    table.add(b)
    assert table.held_bytes == 15
    table.begin(a, 1.0)
    table.begin(a, 2.0)
    assert (table.held_bytes, a.began_at) == (5, 1.0)
    table.remove(a)
    table.settle(b, 3.0)
    table.remove(b)
    assert (table.held_bytes, len(table)) == (0, 0)


def test_unbegun_counts_what_was_handed_later_and_has_no_byte() -> None:
    table = AnswerTable()
    for inbox, handed_at in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", None)):
        entry = answer(inbox, 1)
        entry.handed_at = handed_at
        table.add(entry)
    table.begin(table.get("c"), 4.0)
    assert table.unbegun() == 2
    assert table.unbegun(after=1.0) == 1
    assert table.unbegun(until=1.0) == 1
    assert table.handed() == 3


def test_settled_is_remembered_for_a_while() -> None:
    table = AnswerTable()
    for inbox, handed_at, settled_at in (("a", 1.0, 2.0), ("b", 1.5, 4.0), ("c", 3.5, 5.0)):
        entry = answer(inbox, 1)
        entry.handed_at = handed_at
        table.add(entry)
        table.settle(entry, settled_at)
        table.settle(entry, settled_at + 9.0)
    assert table.settled(until=3.0, since=1.0) == 2
    assert table.settled(until=3.0, since=3.0) == 1
    table.forget_settled(4.0)
    assert table.settled(until=9.0, since=0.0) == 1
