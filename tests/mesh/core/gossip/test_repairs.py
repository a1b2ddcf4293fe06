"""Answers go out at their region's pace, one an asker."""

from mesh.core.gossip.repairs import ASKERS_MAX, Repairs
from schemas.gossip import TrieDelta, size_bytes

DELTA = TrieDelta("us", "r1", 1, 1, tuple(range(100)), ())
SIZE = size_bytes(DELTA)


def test_an_answer_takes_as_long_as_its_budget_says():
    repairs = Repairs(float(SIZE))  # a message a second, four at once
    repairs.put("eu1", "eu", [DELTA] * 6)
    assert list(repairs.due(0.0)) == [("eu1", DELTA)] * 4
    assert list(repairs.due(0.5)) == []
    assert list(repairs.due(2.01)) == [("eu1", DELTA)] * 2


def test_regions_do_not_wait_for_each_other_but_their_routers_do():
    repairs = Repairs(float(SIZE))
    for inbox, region in (("eu1", "eu"), ("eu2", "eu"), ("ap1", "ap")):
        repairs.put(inbox, region, [DELTA] * 4)
    assert [inbox for inbox, _ in repairs.due(0.0)] == ["eu1"] * 4 + ["ap1"] * 4
    assert [inbox for inbox, _ in repairs.due(4.01)] == ["eu2"] * 4


def test_who_asks_again_meanwhile_is_not_heard():
    repairs = Repairs(float(SIZE))
    for _ in range(5):
        repairs.put("eu1", "eu", [DELTA] * 5)
    assert len(list(repairs.due(0.0))) == 4
    repairs.put("eu1", "eu", [DELTA] * 5)
    assert len(list(repairs.due(100.0))) == 1
    repairs.put("eu1", "eu", [DELTA])
    assert len(list(repairs.due(200.0))) == 1


def test_askers_beyond_the_limit_ask_again():
    repairs = Repairs(1e9)
    for number in range(ASKERS_MAX + 1):
        repairs.put(f"inbox-{number}", f"region-{number}", [DELTA])
    assert len(list(repairs.due(0.0))) == ASKERS_MAX
    repairs.put(f"inbox-{ASKERS_MAX}", "late", [DELTA])
    assert len(list(repairs.due(0.0))) == 1
