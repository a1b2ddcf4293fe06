"""How sglang-router places, where `cache-aware` draws."""

from random import Random

import pytest

from mesh.core.policies import find_maker
from mesh.core.policies.base import Target
from mesh.sim.sglang_router import SglangRouter, SglangRouterOptions
from mesh.sim.twin_policies import TwinPolicies, checked_twin_policy
from mesh.sim.world import World
from schemas.settings import BLIND
from tests.mesh.core.build import request, spot
from tests.mesh.sim.build import EU, LOCAL_S, US, arrivals, config, node, prefill_s, steady


class InOrder(Random):
    """Chance that leaves an order as it is."""

    def shuffle(self, order):
        pass


def router(seed=None):
    dice = InOrder(1) if seed is None else Random(seed)
    policy = SglangRouter(dice, 100, SglangRouterOptions(), {"y", "x", "z"})
    for text, name in (("ABCD", "y"), ("ABEE", "x"), ("ABCDFG", "z")):
        policy.placed(request(1, text), spot(name), 0.0)
    return policy


def pick(policy, text, loads):
    return policy.choose(request(1, text), [Target(*one) for one in loads.items()], 0.0).name


@pytest.mark.parametrize(
    ("text", "loads", "expected"),
    [
        ("QQQQ", {"z": 1, "y": 1, "x": 1}, "x"),  # of equals the first, however they are listed
        ("QQQQ", {"z": 0, "y": 1, "x": 1}, "z"),
        ("ABCD", {"x": 0, "y": 9, "z": 0}, "y"),  # z was given it too, later
        ("AB", {"x": 0, "y": 9, "z": 0}, "y"),
        ("ABEE", {"x": 9, "y": 0, "z": 0}, "x"),
        ("ABCDF", {"x": 0, "y": 0, "z": 9}, "z"),
        ("ABQQQQQ", {"x": 0, "y": 9, "z": 0}, "x"),  # two of seven are no match
        ("ABCD", {"x": 0, "y": 65, "z": 0}, "x"),  # out of balance: the first of the shortest
    ],
)
def test_who_is_chosen(text, loads, expected):
    assert pick(router(), text, loads) == expected


def test_what_a_lost_engine_was_given_first_is_nobodys():
    policy = router()
    policy.forget(spot("y"))
    assert pick(policy, "ABCD", {"x": 1, "z": 0}) == "z"
    assert pick(policy, "ABCD", {"x": 0, "z": 0}) == "x"


def test_its_order_is_another_in_every_process():
    loads = {"x": 1, "y": 1, "z": 1}
    assert {pick(router(seed), "QQ", loads) for seed in range(40)} == set(loads)
    one = router(3)
    assert len({pick(one, "QQ", loads) for _ in range(20)}) == 1


@pytest.mark.parametrize(("policy", "engines"), [("sglang-router", 1), ("cache-aware", 2)])
def test_it_gives_an_idle_fleets_requests_to_one_engine(policy, engines):
    fields = {"policy": policy, "topology": "central:us", "pushing": BLIND}
    world = World(steady(12, 2.0, US, EU), config({US: 1, EU: 1}, **fields), makers=TwinPolicies())
    found = set()
    world.requests.watch = lambda sent, end, now: found.add(end.replica)
    world.run()
    assert len(found) == engines


def test_a_router_that_asks_engines_first_answers_so_much_later():
    seconds = []
    for wait_s in (0.0, 0.15):
        world = World(arrivals((0.0, US, node(100))), config(decides_after_s=wait_s))
        world.requests.watch = lambda sent, end, now: seconds.append(sent.first_at - sent.sent_at)
        world.run()
    assert seconds == pytest.approx([prefill_s(100) + LOCAL_S, prefill_s(100) + LOCAL_S + 0.15])


def test_a_client_that_hangs_up_meanwhile_leaves_nothing():
    fields = {"decides_after_s": 1.0, "patience_s": 0.5}
    world = World(arrivals((0.0, US, node(100))), config(**fields))
    ends = []
    world.requests.watch = lambda sent, end, now: ends.append(end.reason)
    world.run()
    assert ends == ["patience"] and world.routers[US].open_requests == 0


@pytest.mark.parametrize("policy", ["sglang-router", "sglang-router:0.5/32/1.1"])
def test_it_is_a_policy_of_one_router_and_of_the_twin_alone(policy):
    assert checked_twin_policy(policy) == policy
    with pytest.raises(ValueError, match="unknown policy"):
        find_maker(policy)
    world = World(arrivals(), config({US: 1, EU: 1}, policy=policy), makers=TwinPolicies())
    with pytest.raises(ValueError, match="use --topology central:REGION or region-local"):
        world.run()
