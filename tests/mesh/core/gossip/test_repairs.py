"""Answers go out at their region's pace, one an asker."""

from mesh.core.gossip.stream_receiver import ASKERS_MAX, Repairs
from schemas.gossip import TrieDelta, size_bytes
from schemas.ids import REGION_ROUTERS_MAX

DELTA = TrieDelta("us", "r1", 1, 1, tuple(range(100)), ())
SIZE = size_bytes(DELTA)


def test_an_answer_takes_as_long_as_its_budget():
    repairs = Repairs(float(SIZE))  # a message a second, four at once
    repairs.put("eu1", "eu", [DELTA] * 6)
    assert list(repairs.due(0.0)) == [("eu", "eu1", DELTA)] * 4
    assert list(repairs.due(0.5)) == []
    assert list(repairs.due(2.01)) == [("eu", "eu1", DELTA)] * 2


def test_regions_do_not_wait_for_each_other_but_their_routers_do():
    repairs = Repairs(float(SIZE))
    for inbox, region in (("eu1", "eu"), ("eu2", "eu"), ("ap1", "ap")):
        repairs.put(inbox, region, [DELTA] * 4)
    assert [inbox for _, inbox, _ in repairs.due(0.0)] == ["eu1"] * 4 + ["ap1"] * 4
    assert [inbox for _, inbox, _ in repairs.due(4.01)] == ["eu2"] * 4


def test_a_region_behind_a_slow_link_is_sent_less():
    repairs = Repairs(4.0 * SIZE, {"ap": float(SIZE)})
    for region in ("eu", "ap"):
        repairs.put(region, region, [DELTA] * 40)
    sent = [inbox for _, inbox, _ in repairs.due(0.0)]
    assert (sent.count("eu"), sent.count("ap")) == (16, 4)
    repairs.share(2)
    sent = [inbox for now in (2.0, 4.0) for _, inbox, _ in repairs.due(now)]
    assert (sent.count("eu"), sent.count("ap")) == (8, 2)


def test_a_repeated_request_meanwhile_is_ignored():
    repairs = Repairs(float(SIZE))
    repairs.put("eu1", "eu", [DELTA] * 5)
    assert not repairs.has_room("eu1", "eu")
    assert repairs.has_room("eu2", "eu")
    assert len(list(repairs.due(0.0))) == 4
    assert not repairs.has_room("eu1", "eu")
    assert len(list(repairs.due(100.0))) == 1
    assert repairs.has_room("eu1", "eu")


def test_askers_beyond_the_limit_ask_again():
    repairs = Repairs(1e9)
    for number in range(ASKERS_MAX):
        assert repairs.has_room(f"inbox-{number}", f"region-{number}")
        repairs.put(f"inbox-{number}", f"region-{number}", [DELTA])
    assert not repairs.has_room("late", "late")
    assert len(list(repairs.due(0.0))) == ASKERS_MAX
    assert repairs.has_room("late", "late")


def test_a_region_of_many_askers_takes_no_room_from_others():
    repairs = Repairs(float(SIZE))
    for number in range(REGION_ROUTERS_MAX):
        repairs.put(f"eu{number}", "eu", [DELTA] * 9)
    assert not repairs.has_room("eu-late", "eu")
    assert repairs.has_room("ap1", "ap")
