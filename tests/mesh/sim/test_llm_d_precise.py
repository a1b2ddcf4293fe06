"""llm-d's scores over exact caches."""

from random import Random

import pytest

from mesh.core.policies import find_maker
from mesh.core.policies.base import Target
from mesh.core.policies.llm_d import Signals
from mesh.core.view.replica import Replica
from mesh.sim.llm_d_precise import LlmDPrecise, PreciseOptions, between_holders
from mesh.sim.twin_policies import TwinPolicies, checked_twin_policy
from mesh.sim.world import World
from schemas.settings import BLIND
from tests.mesh.core.build import beat
from tests.mesh.sim.build import EU, US, arrivals, config, node, steady

PUBLISHED = PreciseOptions()
WHOLE = 10


def rank(blocks, options=PUBLISHED, queue=(1.0, 1.0, 1.0), kv=(0.5, 0.5, 0.5)):
    policy = LlmDPrecise(World(arrivals(), config({US: 1})), Random(1), 100, options)
    return [-total for _, total in policy._ranks(Signals([*queue], [*kv], blocks, WHOLE))]


def test_its_published_weights():
    # Prefix 2 · blocks / 10 + KV 0.5 + queue 1.
    assert rank([0, 5, 10]) == [1.5, 2.5, 3.5]
    assert rank([10, 0, 0], queue=(0.0, 1.0, 0.5), kv=(0.2, 0.9, 0.9)) == [2.2, 1.9, 1.4]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([0, 5, 10], ([0, 0, 5], 5)),  # the least holder gets no more than who holds nothing
        ([4, 5, 6], ([0, 1, 2], 2)),
        ([0, 7, 7], ([0, 1, 1], 1)),
        ([3], ([1], 1)),
        ([0, 0], ([0, 0], 1)),
    ],
)
def test_the_earlier_scorer_compares_holders(blocks, expected):
    assert between_holders(blocks) == expected


def test_relative_scores_weigh_a_small_difference_fully():
    assert rank([9, 10, 0], PreciseOptions(relative=1)) == [1.5, 3.5, 1.5]


def test_it_knows_what_was_evicted_and_what_others_computed():
    world = World(arrivals((0.0, US, node(640, 2, name=1))), config({US: 1, EU: 1}))
    policy = LlmDPrecise(world, Random(1), 100, PreciseOptions())
    targets = [Target(name, 0, replica=Replica(beat(name), 0.0)) for name in ("us-1", "eu-1")]
    cache = world.replicas["eu-1"].engine.sim.cache
    keys = list(range(100, 140))
    policy._caches.prompt = lambda request: (640, keys)
    asked = {}
    for step in ("empty", "computed", "evicted"):
        policy._now += 1.0
        asked[step] = policy._depths(None, targets)
        if step == "empty":
            cache.take(40)
            cache.release(cache.publish(keys), 0)
        if step == "computed":
            cache.take(cache.available - 30)  # leaves 30 of the 40; the deepest go first
    assert asked == {
        "empty": {"us-1": 0, "eu-1": 0},
        "computed": {"us-1": 0, "eu-1": 10},
        "evicted": {"us-1": 0, "eu-1": 7},
    }


def test_equal_seeds_give_equal_digests_and_every_request_is_answered():
    digests = set()
    for _ in range(2):
        fields = {"policy": "llm-d-precise", "topology": "central:us", "pushing": BLIND}
        world = World(
            steady(40, 0.05, US, EU), config({US: 1, EU: 1}, **fields), makers=TwinPolicies()
        )
        ends = []
        world.requests.watch = lambda sent, end, now, ends=ends: ends.append(end.outcome.value)
        world.run()
        assert ends == ["ok"] * 40
        digests.add(world.requests.digest())
    assert len(digests) == 1


@pytest.mark.parametrize(("speculative_s", "replicas"), [(0, 2), (2, 1)])
def test_equal_prompts_of_one_moment_go_together_if_their_caching_is_assumed(
    speculative_s, replicas
):
    policy = f"llm-d-precise:0/0/1//{speculative_s}"
    fields = {"policy": policy, "topology": "central:us", "pushing": BLIND}
    rows = [(0.0, US, node(320, 2, name=1)) for _ in range(8)]
    world = World(arrivals(*rows), config({US: 1, EU: 1}, **fields), makers=TwinPolicies())
    found = set()
    world.requests.watch = lambda sent, end, now: found.add(end.replica)
    world.run()
    assert len(found) == replicas


@pytest.mark.parametrize("policy", ["dynamo", "llm-d-precise"])
def test_routers_with_peers_can_not_have_it(policy):
    world = World(arrivals(), config({US: 1, EU: 1}, policy=policy), makers=TwinPolicies())
    with pytest.raises(ValueError, match="use --topology central:REGION or region-local"):
        world.run()


def test_names_and_options():
    for name in ("dynamo:0.5/0.5/1", "llm-d-precise:2/2/3/1"):
        assert checked_twin_policy(name) == name
        with pytest.raises(ValueError, match="unknown policy"):
            find_maker(name)  # a live router has no such knowledge
    for name in (
        "dynamo:-1",
        "llm-d-precise:///2",
        "llm-d-precise:0/0/0/1",
        "llm-d-precise:////-1",
    ):
        with pytest.raises(ValueError, match=r"0 or more|relative"):
            checked_twin_policy(name)
