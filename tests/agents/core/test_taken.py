"""Hand-offs that have arrived."""

from agents.core.taken import ROUTERS_MAX, Taken
from agents.core.work import Handoff


def test_the_last_number_of_each_router_is_kept() -> None:
    taken = Taken()
    for router, number in (("a", 1), ("b", 9), ("a", 2), ("b", 1)):
        taken.note(Handoff(router, number))
    assert taken.snapshot() == {"a": 2, "b": 1}
    taken.forget("b")
    assert taken.snapshot() == {"a": 2}


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    taken = Taken()
    for number in range(ROUTERS_MAX + 1):
        taken.note(Handoff(f"r{number}", number))
    assert len(taken.snapshot()) == ROUTERS_MAX
    assert "r0" not in taken.snapshot()


def test_routers_of_one_name_in_two_regions_are_two_routers() -> None:
    taken = Taken()
    taken.note(Handoff("r1", 7))
    taken.note(Handoff("r1", 100, owner="eu"))
    assert (taken.snapshot(), taken.snapshot("eu"), taken.snapshot("ap")) == (
        {"r1": 7},
        {"r1": 100},
        {},
    )
    taken.forget("r1", "eu")
    assert (taken.snapshot(), taken.snapshot("eu")) == ({"r1": 7}, {})
