"""Prefix gossip in the twin: what eu served is known in us, at a price that is counted."""

from dataclasses import replace

import pytest

from mesh.core.gossip.remote_prefixes import Origin
from mesh.sim.config import Cut
from mesh.sim.world import World, report
from tests.mesh.sim.build import EU, US, arrivals, config, leftovers, node, played, steady

FLEET = {US: 1, EU: 1}


def known_and_published(world, receiver, origin):
    """What one router has received of another's set, and that set."""
    sets = world.routers[receiver].core.gossip.remote.blocks(Origin(origin, "r1"))
    return set(sets), set(world.routers[origin].core.gossip.outgoing.published)


def test_each_region_knows_what_the_other_served():
    world = played(steady(20, 0.2, US, EU, prompt=640), config(FLEET, policy="mesh"))
    for pair in ((US, EU), (EU, US)):
        known, published = known_and_published(world, *pair)
        assert len(known) > 20 and known <= published  # the last delta may be on its way


@pytest.mark.parametrize(("gossip_s", "has_sent_all"), [(0.0, True), (3600.0, False)])
def test_prefixes_are_published_at_the_pace_of_gossip(gossip_s, has_sent_all):
    pace = config(FLEET, policy="mesh", gossip_s=gossip_s)
    world = played(steady(20, 0.2, EU, prompt=640), pace)
    known, published = known_and_published(world, US, EU)
    assert known and known <= published
    assert world.routers[EU].core.gossip.outgoing.is_empty == has_sent_all


@pytest.mark.parametrize(
    "fault", [{"loss": 0.2}, {"faults": (Cut(one=US, other=EU, at_s=1.0, until_s=3.0),)}]
)
def test_gossip_recovers_from_losses_and_cuts(fault):
    world = played(steady(60, 0.1, US, EU, prompt=640), config(FLEET, policy="mesh", **fault))
    known, published = known_and_published(world, US, EU)
    holes = world.routers[US].core.gossip.counts.holes
    assert len(published & known) > 0.8 * len(published) and holes > 0


def test_bytes_are_counted_for_each_direction_and_lie_within_the_budget():
    workload = steady(40, 0.05, US, EU, prompt=6400)
    world = played(workload, config(FLEET, policy="mesh", trie_bytes_per_s=2000))
    sent = world.gossip.sent_bytes
    assert sent.keys() == {(US, EU), (EU, US)}
    burst = 4 * 2000
    assert all(0 < size < 2000 * world.queue.now + burst for size in sent.values())
    rates = report(world, workload)["trie_bytes_per_s"]
    assert rates["us>eu"] == pytest.approx(sent[US, EU] / world.queue.now)


def test_without_a_budget_nothing_is_published_nor_by_regions_without_peers():
    workload = steady(10, 0.2, US, EU)
    silent = played(workload, config(FLEET, policy="mesh", trie_bytes_per_s=0))
    alone = played(workload, config(FLEET, policy="mesh", topology="region-local"))
    assert silent.gossip.sent_bytes == alone.gossip.sent_bytes == {}


def test_routers_of_one_region_know_what_the_others_placed():
    """Ten prompts requested again and again through either of two routers, on two replicas."""
    rows = [(0.4 * n, US, node(prompt=640, answer=5, name=1 + n % 10)) for n in range(60)]
    cached = {}
    for bytes_per_s in (0, 4_000_000):
        known = config({US: 2}, policy="prefix-tree", routers=2, siblings_bytes_per_s=bytes_per_s)
        world = played(arrivals(*rows), known)
        assert all(router.core.replicas for router in world.region_routers[US])
        cached[bytes_per_s] = report(world, arrivals(*rows))["cached_token_ratio"]
        assert leftovers(world) == {}
    assert cached[4_000_000] > cached[0] + 0.05
    assert world.gossip.sent_bytes == {}


def test_a_region_whose_routers_restart_one_after_the_other_forgets_nothing_of_its_replicas():
    rows = [(0.2 * n, US, node(prompt=640, answer=20, name=10 + n)) for n in range(20)]
    last = (9.0, US, node(name=1))
    world = World(arrivals(*rows, last), config(FLEET, policy="mesh", routers=2))
    for number, router in enumerate(world.region_routers[US]):
        world.queue.at(5.0 + 2.0 * number, router.crash)
        world.queue.at(5.5 + 2.0 * number, world.open_router, router)
    world.run()
    assert world.queue.now > 11.0
    [[one], [other]] = [router.core.gossip.siblings.indexes for router in world.region_routers[US]]
    assert one.blocks("us-1") == other.blocks("us-1") > 40


def test_a_long_prefix_that_only_the_peer_holds_is_worth_the_way():
    """One second of prefill against 80 ms: us never requested it before, eu holds it."""
    long = node(prompt=1024, answer=5, name=1)
    rows = [(0.0, EU, long), (0.0, US, node(name=2)), (3.0, US, long)]
    cached = {}
    for bytes_per_s in (0, 65_536):
        known = config(FLEET, policy="mesh", trie_bytes_per_s=bytes_per_s)
        assert known.settings == replace(known.settings, trie_bytes_per_s=bytes_per_s)
        world = played(arrivals(*rows), known)
        cached[bytes_per_s] = report(world, arrivals(*rows))["cached_token_ratio"]
    assert cached[0] == 0.0
    assert cached[65_536] > 0.4
