"""Hand-offs that have arrived."""

from agents.core.routers import ACK_ROUTERS_MAX, HandoffAcks, HandoffNumber


def test_the_last_number_of_each_router_is_kept() -> None:
    taken = HandoffAcks()
    for router, number in (("a", 1), ("b", 9), ("a", 2), ("b", 1)):
        taken.record(HandoffNumber(router, number))
    assert taken.snapshot() == {"a": 2, "b": 1}
    taken.forget("b")
    assert taken.snapshot() == {"a": 2}


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    taken = HandoffAcks()
    for number in range(ACK_ROUTERS_MAX + 1):
        taken.record(HandoffNumber(f"r{number}", number))
    assert len(taken.snapshot()) == ACK_ROUTERS_MAX
    assert "r0" not in taken.snapshot()


def test_routers_of_one_name_in_two_regions_are_two_routers() -> None:
    taken = HandoffAcks()
    taken.record(HandoffNumber("r1", 7))
    taken.record(HandoffNumber("r1", 100, owner="eu"))
    assert (taken.snapshot(), taken.snapshot("eu"), taken.snapshot("ap")) == (
        {"r1": 7},
        {"r1": 100},
        {},
    )
    taken.forget("r1", "eu")
    assert (taken.snapshot(), taken.snapshot("eu")) == ({"r1": 7}, {})
