"""Operators' orders at the agent: which router's counts, and what they do to its state."""

import pytest

from agents.core.events import DrainOrder, RouterKey
from agents.core.routers import ACK_ROUTERS_MAX, ORDERS_KEPT_S, RouterLiveness
from schemas.state import ReplicaState

HOME = "us"


def state(routers: RouterLiveness) -> ReplicaState:
    return routers.orders.applied_to(ReplicaState.READY)


def alive(routers: RouterLiveness, name: str, order, now: float, region: str = HOME) -> None:
    order = None if order is None else DrainOrder(*order)
    routers.alive(RouterKey(region, name), 1, now, order)


def test_a_replica_is_drained_while_its_own_routers_say_so():
    routers = RouterLiveness(HOME)
    assert state(routers) is ReplicaState.READY
    alive(routers, "r1", (1, True), 0.0)
    assert state(routers) is ReplicaState.DRAINING
    alive(routers, "r1", (2, False), 0.5)
    assert state(routers) is ReplicaState.READY


@pytest.mark.parametrize("found", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_a_replica_that_is_not_ready_is_what_it_is(found):
    routers = RouterLiveness(HOME)
    alive(routers, "r1", (1, True), 0.0)
    assert routers.orders.applied_to(found) is found


def test_other_regions_and_routers_without_orders_have_no_say():
    routers = RouterLiveness(HOME)
    alive(routers, "r1", (9, True), 0.0, region="eu")
    alive(routers, "r1", None, 0.0)
    assert state(routers) is ReplicaState.READY
    alive(routers, "r1", (1, True), 1.0)
    alive(routers, "r2", None, 1.1)
    alive(routers, "r2", (9, False), 1.2, region="eu")
    assert state(routers) is ReplicaState.DRAINING


def test_of_routers_that_differ_the_newest_record_counts():
    routers = RouterLiveness(HOME)
    alive(routers, "r1", (5, True), 0.0)
    alive(routers, "r2", (4, False), 0.1)
    assert state(routers) is ReplicaState.DRAINING
    alive(routers, "r2", (6, False), 0.2)
    alive(routers, "r1", (5, True), 0.3)
    assert state(routers) is ReplicaState.READY


def test_orders_hold_when_all_routers_are_gone():
    routers = RouterLiveness(HOME)
    alive(routers, "r1", (5, True), 0.0)
    assert routers.silent(1e6) == []
    assert state(routers) is ReplicaState.DRAINING


def test_a_router_that_is_gone_does_not_outvote_those_after_it():
    """The stream was made anew: its numbers begin again."""
    routers = RouterLiveness(HOME)
    alive(routers, "old", (500, True), 0.0)
    alive(routers, "r1", (0, False), 1.0)
    assert state(routers) is ReplicaState.DRAINING
    alive(routers, "r1", (0, False), ORDERS_KEPT_S + 0.1)
    assert state(routers) is ReplicaState.READY


def test_the_table_of_routers_is_bounded():
    routers = RouterLiveness(HOME)
    for n in range(3 * ACK_ROUTERS_MAX):
        alive(routers, f"r{n}", (n, True), n / 1000)
    assert len(routers.orders._by_router) == ACK_ROUTERS_MAX
    assert state(routers) is ReplicaState.DRAINING
