"""When a router that has started is warm, and whom it asks before."""

from mesh.core.gossip.siblings import ALONE_S, GIVE_UP_S, StateSync


def test_who_gets_no_answer_gives_up_and_is_warm():
    warmth = StateSync()
    asked = [warmth.tick({"r2": True, "r3": True, "r4": False}, 0.25 * n) for n in range(41)]
    assert {router for router in asked if router} == {"r2", "r3"}
    assert warmth.warm_at == GIVE_UP_S


def test_a_router_that_got_all_is_warm_by_that_sibling():
    warmth = StateSync()
    assert warmth.tick({"r2": True}, 0.0) == "r2"
    warmth.synced_from("r2", 0.3)
    warmth.synced_from("r3", 0.4)
    assert (warmth.warm_at, warmth.source) == (0.3, "r2")


def test_without_a_warm_sibling_a_router_waits_a_little_and_is_warm():
    warmth = StateSync()
    assert warmth.tick({"r2": False}, 5.0) is None
    assert warmth.tick({"r2": False}, 5.0 + ALONE_S - 0.1) is None and warmth.warm_at is None
    assert warmth.tick({"r2": False}, 5.0 + ALONE_S) is None and warmth.warm_at == 5.0 + ALONE_S


def test_once_warm_always_warm():
    warmth = StateSync()
    warmth.end(1.0)
    warmth.end(2.0)
    assert warmth.warm_at == 1.0
