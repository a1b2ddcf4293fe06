"""Prefix gossip in the twin: what eu served is known in us, at a price that is counted."""

from dataclasses import replace

import pytest

from mesh.core.gossip.remote_prefixes import Origin
from mesh.sim.faults import Cut
from mesh.sim.world import World, report
from tests.mesh.sim.build import EU, US, arrivals, config, leftovers, node, played, steady

FLEET = {US: 1, EU: 1}


def told(world, listener, speaker):
    """What one router has of another's set, and that set."""
    sets = world.routers[listener].core.gossip.remote.blocks(Origin(speaker, "r1"))
    return set(sets), set(world.routers[speaker].core.gossip.outgoing.published)


def test_each_region_knows_what_the_other_served():
    world = played(steady(20, 0.2, US, EU, prompt=640), config(FLEET, policy="mesh"))
    for pair in ((US, EU), (EU, US)):
        known, said = told(world, *pair)
        assert len(known) > 20 and known <= said  # the last delta may be on its way


@pytest.mark.parametrize(("gossip_s", "has_told_all"), [(0.0, True), (3600.0, False)])
def test_prefixes_are_told_at_the_pace_of_gossip(gossip_s, has_told_all):
    pace = config(FLEET, policy="mesh", gossip_s=gossip_s)
    world = played(steady(20, 0.2, EU, prompt=640), pace)
    known, said = told(world, US, EU)
    assert known and known <= said
    assert world.routers[EU].core.gossip.outgoing.is_empty == has_told_all


@pytest.mark.parametrize(
    "trouble", [{"loss": 0.2}, {"faults": (Cut(one=US, other=EU, at_s=1.0, until_s=3.0),)}]
)
def test_losses_and_cuts_are_mended(trouble):
    world = played(steady(60, 0.1, US, EU, prompt=640), config(FLEET, policy="mesh", **trouble))
    known, said = told(world, US, EU)
    holes = world.routers[US].core.gossip.counts.holes
    assert len(said & known) > 0.8 * len(said) and holes > 0


def test_bytes_are_counted_for_each_direction_and_lie_within_the_budget():
    workload = steady(40, 0.05, US, EU, prompt=6400)
    world = played(workload, config(FLEET, policy="mesh", trie_bytes_per_s=2000))
    sent = world.trie_links.sent_bytes
    assert sent.keys() == {(US, EU), (EU, US)}
    burst = 4 * 2000
    assert all(0 < size < 2000 * world.queue.now + burst for size in sent.values())
    rates = report(world, workload)["trie_bytes_per_s"]
    assert rates["us>eu"] == pytest.approx(sent[US, EU] / world.queue.now)


def test_without_a_budget_nothing_is_said_and_regions_alone_have_nobody_to_tell():
    workload = steady(10, 0.2, US, EU)
    silent = played(workload, config(FLEET, policy="mesh", trie_bytes_per_s=0))
    alone = played(workload, config(FLEET, policy="mesh", topology="region-local"))
    assert silent.trie_links.sent_bytes == alone.trie_links.sent_bytes == {}


def test_routers_of_one_region_know_what_the_others_placed():
    """Ten prompts asked for again and again through either of two routers, on two replicas."""
    rows = [(0.4 * n, US, node(prompt=640, answer=5, name=1 + n % 10)) for n in range(60)]
    cached = {}
    for bytes_per_s in (0, 4_000_000):
        known = config({US: 2}, policy="prefix-tree", routers=2, siblings_bytes_per_s=bytes_per_s)
        world = played(arrivals(*rows), known)
        assert all(router.core.replicas for router in world.region_routers[US])
        cached[bytes_per_s] = report(world, arrivals(*rows))["cached_token_ratio"]
        assert leftovers(world) == {}
    assert cached[4_000_000] > cached[0] + 0.05
    assert world.trie_links.sent_bytes == {}


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
    """One second of prefill against 80 ms: us never asked for it before, eu holds it."""
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
