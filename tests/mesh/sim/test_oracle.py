from dataclasses import replace
from random import Random

import pytest

from agents.sim.engine import EngineSim
from agents.sim.events import SimRequest
from agents.sim.profiles import Publishing
from mesh.core.policies import POLICIES, find_maker
from mesh.sim.oracle import Oracle, OracleOptions, _common, _held, _memory_s
from mesh.sim.twin_policies import GlobalView, TwinPolicies, checked_twin_policy
from mesh.sim.workload import RequestNode, Segment
from mesh.sim.world import World
from schemas.settings import BLIND
from tests.mesh.sim.build import EU, PLAIN, US, arrivals, config, node, steady

SELFISH = OracleOptions(stall_weight=0.0)


class Remembering(Oracle):
    """Keeps what it expected of each request it placed."""

    def __init__(self, world, dice, options):
        super().__init__(world, dice, options)
        self.expected_s = {}

    def placed(self, request, spot, now):
        self.expected_s[request.key] = self._chosen.seconds
        super().placed(request, spot, now)


def judged(workload, world_config):
    """Each request's number with what was expected of it and what came, in seconds."""
    inside = []

    def makers(world):
        if not inside:
            inside.append(Remembering(world, Random(0), SELFISH))
            inside.append(GlobalView(world, inside[0], Random(0)))
        return {**POLICIES, "oracle": lambda settings, dice: inside[1]}

    world = World(workload, world_config, makers=makers)
    came_s = {}
    world.requests.watch = lambda sent, end, now: came_s.update(
        {sent.number: sent.first_at - sent.sent_at}
    )
    world.run()
    expected_s = inside[0].expected_s
    assert expected_s.keys() == came_s.keys()
    return [(expected_s[number], came_s[number]) for number in sorted(came_s)]


def oracle(regions=None, **fields):
    return config(regions, policy="oracle", pushing=BLIND, **fields)


def test_what_it_expects_is_what_comes():
    for expected_s, came_s in judged(
        steady(30, 0.15, US, EU, prompt=300, answer=10), oracle({US: 1, EU: 1})
    ):
        assert came_s == pytest.approx(expected_s, abs=0.012)  # one more iteration


def follow(prompt: tuple[Segment, ...], name: int, tokens: int = 16) -> RequestNode:
    return RequestNode(prompt=(*prompt, Segment(name, tokens)), answer=Segment(name + 1, 2))


@pytest.mark.parametrize(("shared", "replica"), [(900, "us-1"), (64, "eu-1")])
def test_a_far_cache_is_worth_a_round_trip_only_if_it_is_long(shared, replica):
    first = node(shared, 2, name=1)
    again = follow(first.prompt, 5)
    world = World(
        arrivals((0.0, US, first), (5.0, EU, again)),
        oracle({US: 1, EU: 1}),
        makers=TwinPolicies(),
    )
    served = []
    world.requests.watch = lambda sent, end, now: served.append(end.replica)
    world.run()
    assert served == ["us-1", replica]


@pytest.mark.parametrize(
    ("publishing", "unsure"),
    [(Publishing.SCHEDULED, 0), (Publishing.COMPUTED, PLAIN.batch_tokens)],
)
def test_a_prompt_that_is_queued_counts_as_held_when_it_is_published(publishing, unsure):
    sim = EngineSim(replace(PLAIN, publishing=publishing))
    keys = list(range(200))
    assert _held(sim, keys, 3200, []) == 0
    assert _held(sim, keys, 3200, [(keys, 3200)]) == 199 * 16 - unsure
    assert _held(sim, keys, 3200, [(keys, 3200), ([], 1000)]) == 199 * 16


@pytest.mark.parametrize("length", [0, 1, 7, 64])
def test_common_keys_are_counted_from_the_start(length):
    keys = [*range(length), *range(1000, 1010)]
    others = [*range(length), *range(2000, 2100)]
    assert _common(keys, others) == length
    assert _common(keys, keys) == len(keys)


def test_memory_is_waited_for_until_enough_answers_have_ended():
    sim = EngineSim(PLAIN)
    for number, answer in enumerate((400, 800)):
        sim.submit(SimRequest(number, 7000, answer), 0.0)
    sim.step(15.0)
    inside = sim.inside(15.0)
    assert len(inside.decoding) == 2
    assert _memory_s(sim, inside, [], 16, 16) == 0.0
    one_s, both_s = (_memory_s(sim, inside, [], size, size) for size in (2500, 9500))
    assert 0.0 < one_s < 400 * 0.012 < both_s < 800 * 0.012


def test_its_weight_is_an_option_and_is_checked():
    assert checked_twin_policy("oracle:0.02") == "oracle:0.02"
    assert checked_twin_policy("mesh") == "mesh"
    for name in ("oracle:2", "oracle:x", "orakel"):
        with pytest.raises(ValueError, match=r"stall_weight|unknown policy"):
            checked_twin_policy(name)
    with pytest.raises(ValueError, match="unknown policy"):
        find_maker("oracle")  # a live router can't have it
