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


def test_what_the_engine_has() -> None:
    table = AnswerTable()
    for inbox in "abcd":
        table.add(answer(inbox, 1))
    for inbox, at in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        table.hand(table.get(inbox), at)
    table.begin(table.get("c"), 4.0)
    assert (table.handed, table.since_look.unbegun) == (3, 2)
    table.look(1.0, 1.5)
    assert (table.since_look.still, table.since_look.since) == (1, 1)
    table.remove(table.get("a"))
    table.remove(table.get("c"))
    table.remove(table.get("d"))
    assert (table.handed, table.since_look.unbegun, table.since_look.still) == (1, 1, 0)
