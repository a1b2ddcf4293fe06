"""Dynamo's cost: its documentation's example, its terms, and its choice in a world."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.prompt import Prompt
from mesh.core.policies.base import Target
from mesh.sim.dynamo_kv import (
    ActiveRequests,
    DynamoKv,
    DynamoOptions,
    Sent,
    WorkerLoad,
    chances,
    costs_in_blocks,
)
from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.workload import RequestNode, Segment
from mesh.sim.world import World
from schemas.settings import BLIND
from tests.mesh.core.build import request, spot
from tests.mesh.sim.build import EU, US, arrivals, config, node, steady

PLAIN_COST = DynamoOptions()
# "Routing concepts", v1.2: ten blocks of prompt; cached 2, 5, 8; decoding 10, 5, 9.
DOCUMENTED = [WorkerLoad(0, 2, 10), WorkerLoad(0, 5, 5), WorkerLoad(0, 8, 9)]


def test_the_example_of_its_documentation():
    assert costs_in_blocks(PLAIN_COST, 160, DOCUMENTED) == [18, 10, 11]
    # A larger scale prefers the longer prefix: 2 · 2 + 9 is less than 2 · 5 + 5.
    assert costs_in_blocks(DynamoOptions(prefill_scale=2.0), 160, DOCUMENTED) == [26, 15, 13]


@pytest.mark.parametrize(
    ("options", "workers", "expected"),
    [
        # Active prefill counts as prompt: 160 + 160 tokens are 20 blocks, less 8 cached.
        (PLAIN_COST, [WorkerLoad(160, 8, 0), WorkerLoad(0, 0, 0)], [12, 10]),
        # Decay 1, one prompt of excess: the credit of 8 blocks is halved.
        (DynamoOptions(decay=1.0), [WorkerLoad(160, 8, 0), WorkerLoad(0, 8, 0)], [16, 2]),
        (DynamoOptions(decay=1.0), [WorkerLoad(160, 8, 0)], [12]),  # itself the least loaded
        (PLAIN_COST, [WorkerLoad(0, 11, 3)], [3]),  # never below 0
        (DynamoOptions(prefill_scale=0.0), [WorkerLoad(99, 0, 3)], [3]),
    ],
)
def test_each_term(options, workers, expected):
    assert costs_in_blocks(options, 160, workers) == expected


def test_temperature_is_relative_to_the_range_of_costs():
    assert chances([3.0, 3.0], 0.5) == [0.5, 0.5]
    # Scaled to 0, 0.5 and 1: exp(0), exp(-1), exp(-2) at temperature 0.5.
    shares = [1.0, 0.36788, 0.13534]
    expected = [pytest.approx(share / sum(shares), abs=1e-4) for share in shares]
    assert chances([10.0, 15.0, 20.0], 0.5) == chances([0.0, 500.0, 1000.0], 0.5) == expected


def test_active_blocks_are_counted_once_and_prefill_until_the_first_token():
    active = ActiveRequests()
    active.add(1, Sent("a", [1, 2, 3], 48))
    active.add(2, Sent("a", [1, 2, 4], 16))
    assert active.blocks_with("a", []) == 4
    assert active.blocks_with("a", [1, 2, 4, 5]) == 5
    assert active.blocks_with("b", [1, 2, 4, 5]) == 4
    assert active.prefill_tokens("a") == 64
    active.began(1)
    active.began(1)
    assert active.prefill_tokens("a") == 16
    assert active.blocks_with("a", []) == 4  # decoding keeps its blocks
    active.end(1)
    assert active.blocks_with("a", []) == 3
    active.add(2, Sent("b", [1], 0))  # placed again, elsewhere
    assert (active.blocks_with("a", []), active.prefill_tokens("a")) == (0, 0)
    active.end(2)
    active.end(2)
    assert active.blocks_with("b", []) == 0


loads = st.builds(WorkerLoad, st.integers(0, 10_000), st.integers(0, 100), st.integers(0, 10_000))


@given(st.integers(1, 5000), st.lists(loads, min_size=1, max_size=8), st.floats(0.01, 5.0))
def test_costs_and_chances_are_of_every_worker(tokens, workers, temperature):
    costs = costs_in_blocks(PLAIN_COST, tokens, workers)
    assert len(costs) == len(workers)
    assert all(cost >= worker.decode_blocks for cost, worker in zip(costs, workers, strict=True))
    shares = chances(costs, temperature)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[costs.index(min(costs))] == max(shares)


def central(policy, **fields):
    return config({US: 1, EU: 1}, policy=policy, topology="central:us", pushing=BLIND, **fields)


def served(workload, world_config):
    world = World(workload, world_config, makers=TwinPolicies())
    found = []
    world.requests.watch = lambda sent, end, now: found.append((end.replica, end.cached_tokens))
    world.run()
    return world, found


@pytest.mark.parametrize(
    "policy", ["dynamo", "dynamo:2/0/1", "llm-d-precise", "llm-d-precise:///1"]
)
def test_a_prompt_returns_to_the_engine_that_holds_it(policy):
    first = node(900, 2, name=1)
    again = RequestNode(prompt=(*first.prompt, Segment(7, 16)), answer=Segment(8, 2))
    _, found = served(arrivals((0.0, US, first), (5.0, EU, again)), central(policy))
    assert found[0][0] == found[1][0]
    assert found[1][1] >= 880


@pytest.mark.parametrize("policy", ["dynamo", "dynamo:1/0.5"])
def test_equal_seeds_give_equal_digests_and_nothing_is_remembered(policy):
    made = []

    def makers(world):
        def make(settings, dice):
            options = DynamoOptions(temperature=0.5 if "/" in policy else 0.0)
            made.append(DynamoKv(world, dice, options))
            return made[-1]

        return {"dynamo": make}

    digests = set()
    for _ in range(2):
        world = World(steady(40, 0.05, US, EU), central("dynamo"), makers=makers)
        world.run()
        digests.add(world.requests.digest())
    assert len(digests) == 1
    for one in made:
        assert one._active._sent == {} and one._active._prefilling == set()
        assert not any(one._active._holders.values())
        assert not any(one._active._prefill_tokens.values())


@pytest.mark.parametrize("text", ["-1", "/-0.1", "//inf", "////-1", "////nan"])
def test_options_out_of_range_are_refused(text):
    values = [float(value) if value else 0.0 for value in text.split("/")]
    with pytest.raises(ValueError, match="each must be 0 or more"):
        DynamoOptions(*values)


def test_its_queue_holds_while_every_worker_has_more_than_its_fill_to_compute():
    world = World(arrivals(), central("dynamo"))
    policy = DynamoKv(world, Random(1), DynamoOptions(queue_batches=1.5))
    policy._caches.prompt = lambda request: (320, range(20))
    both = [Target("us-1", 0), Target("eu-1", 0)]
    policy._active.add(1, Sent("us-1", [], 1501))
    policy._active.add(2, Sent("eu-1", [], 1500))  # PLAIN's batch is 1000 tokens
    assert policy.choose(request(9), both, 1.0).name == "eu-1"
    policy._active.add(3, Sent("eu-1", [], 1))
    assert policy.choose(request(9), both, 1.0).target is None
    policy._active.began(1)
    assert policy.choose(request(9), both, 1.0).name == "us-1"


def test_its_queue_lets_one_go_at_each_first_token_first_come_first_served():
    made, times, prefilling = [], [], []

    def makers(world):
        def make(settings, dice):
            made.append(DynamoKv(world, dice, DynamoOptions(queue_batches=0.0)))
            return made[-1]

        return {"dynamo": make}

    count = 12
    rows = [(0.01 * at, US, node(500, 2, name=1 + at)) for at in range(count)]
    world = World(arrivals(*rows), central("dynamo"), makers=makers)
    world.requests.watch = lambda sent, end, now: (
        times.append((sent.sent_at, sent.first_at)),
        prefilling.append(len(made[0]._active._prefilling)),
    )
    world.run()
    firsts = [first_at for _, first_at in sorted(times)]
    assert len(firsts) == count
    assert all(later > first for first, later in zip(firsts, firsts[2:], strict=False))
    assert max(prefilling) == 2, "one a worker; the others wait at the router"


@pytest.mark.parametrize(("predicted_s", "cached"), [(0.0, 0), (5.0, 319)])
def test_what_it_sent_counts_as_cached_if_that_is_predicted(predicted_s, cached):
    world = World(arrivals(), central("dynamo"))
    policy = DynamoKv(world, Random(1), DynamoOptions(predicted_s=predicted_s))
    policy._caches.prompt = lambda request: (320, range(20))
    asked, there = request(1, prompt=Prompt(320, (1, 2, 3, 4, 5), 64)), Target("us-1", 0)
    policy.placed(asked, spot("us-1"), 0.0)
    assert policy.choose(asked, [there], 4.0).held_tokens == cached
    assert policy.choose(asked, [there], 6.0).held_tokens == 0


def test_ties_are_broken_by_the_dice():
    policy = DynamoKv(None, Random(1), PLAIN_COST)
    assert {policy._pick([2.0, 1.0, 1.0]) for _ in range(50)} == {1, 2}
