"""A region of the twin loses its router: a neighbour serves its replicas, and gives them back."""

from random import Random

import pytest

from mesh.sim.config import Cut, LeaseStreamDown, RouterCrash
from mesh.sim.network import BUS_S
from mesh.sim.world import World, report
from schemas.ids import ReplicaId
from tests.mesh.sim.build import AP, EU, US, config, leftovers, played, steady
from tests.mesh.sim.random_faults import random_faults

FLEET = {US: 2, EU: 2, AP: 2}
GONE = RouterCrash(region=US, at_s=3.0)


def owners(world, region):
    """Who wrote the lease, in turn."""
    found = []
    for write in world.leases.writes[region]:
        if not found or found[-1] != write.lease.owner:
            found.append(write.lease.owner)
    return found


def first_write(world, region, owner):
    return next(w.at for w in world.leases.writes[region] if w.lease.owner == owner)


def test_the_nearest_region_adopts_within_two_seconds_and_serves():
    world = played(steady(200, 0.1, EU, prompt=200), config(FLEET, faults=(GONE,)))
    assert owners(world, US) == [US, EU]  # 80 ms away; ap is 150
    lost_at = 2.5 + GONE.at_s
    assert 0.7 < first_write(world, US, EU) - lost_at < 1.5
    names = world.routers[EU].core.replicas.names_of(US)
    assert sorted(names) == ["us/us-1", "us/us-2"]
    assert report(world, steady(200, 0.1, EU, prompt=200))["ok"] == 200


def test_more_work_than_its_own_replicas_can_do_goes_to_adopted_ones():
    """16 batch slots in eu, and 4 s of work each 0.05 s: without us it would be shed."""
    asked = steady(400, 0.05, EU, prompt=100, answer=100)
    alone = {"faults": (GONE,), "policy": "skywalker", "hold_s_max": 4.0}
    with_us = played(asked, config({US: 4, EU: 1}, **alone))
    without = played(asked, config({US: 4, EU: 1}, **alone, lease_s=0.0))
    assert report(with_us, asked)["ok"] > report(without, asked)["ok"] + 50
    assert leftovers(with_us) == leftovers(without) == {}


def test_a_third_region_forwards_to_the_adopter():
    asked = steady(300, 0.05, AP, prompt=100, answer=100)
    fleet = {US: 4, EU: 0, AP: 1}
    world = played(asked, config(fleet, faults=(GONE,), policy="skywalker", hold_s_max=10.0))
    assert owners(world, US) == [US, EU]
    result = report(world, asked)
    assert result["ok"] == 300 and result["forwarded"] > 50


def test_its_own_router_takes_it_back_at_once_and_what_runs_is_finished():
    asked = steady(300, 0.05, EU, prompt=100, answer=200)
    back = RouterCrash(region=US, at_s=3.0, until_s=9.0)
    world = played(asked, config(FLEET, faults=(back,), policy="least-load"))
    assert owners(world, US) == [US, EU, US]
    again = [w.at for w in world.leases.writes[US] if w.lease.owner == US and w.at > 11.5]
    assert again[0] - 11.5 < 0.1 + 4 * BUS_S
    assert world.routers[EU].core.ownership.adopted == {}
    assert world.routers[EU].core.replicas.names_of(US) == []
    result = report(world, asked)
    assert (result["ok"], result["failures"]) == (300, {})
    assert leftovers(world) == {}


def test_several_regions_at_once_and_then_the_adopter_too():
    fleet = {US: 1, EU: 1, AP: 1}
    lost = (
        RouterCrash(region=US, at_s=3.0),
        RouterCrash(region=EU, at_s=6.0, until_s=20.0),
    )
    world = played(steady(150, 0.2, AP), config(fleet, faults=lost))
    assert owners(world, US) == [US, EU, AP]
    assert owners(world, EU) == [EU, AP, EU]
    assert set(world.routers[AP].core.ownership.adopted) == {US}
    both = [RouterCrash(region=region, at_s=3.0) for region in (US, EU)]
    world = played(steady(100, 0.2, AP), config(fleet, faults=tuple(both)))
    assert set(world.routers[AP].core.ownership.adopted) == {US, EU}


@pytest.mark.parametrize(
    "half",
    [
        (Cut(one=US, other=EU, at_s=3.0), Cut(one=US, other=AP, at_s=3.0)),
        (LeaseStreamDown(region=US, at_s=3.0),),
        (LeaseStreamDown(region=US, at_s=2.0), GONE),
    ],
    ids=["links cut", "no JetStream", "no JetStream, and then no router"],
)
def test_what_cannot_be_written_cannot_be_taken(half):
    world = played(steady(100, 0.1, US, EU), config(FLEET, faults=half))
    assert owners(world, US) == [US]
    assert world.routers[EU].core.ownership.adopted == {}


def test_a_cut_adopter_lets_go_and_another_one_follows():
    cut = Cut(one=US, other=EU, at_s=8.0)
    world = played(steady(200, 0.1, EU), config(FLEET, faults=(GONE, cut)))
    assert owners(world, US) == [US, EU, AP]
    assert world.routers[EU].core.ownership.adopted == {}
    assert first_write(world, US, AP) - (2.5 + cut.at_s) < 2.0


@pytest.mark.parametrize("topology", ["region-local", "central:us"])
def test_regions_without_peers_have_no_leases(topology):
    assert played(steady(10, 0.1, US), config(FLEET, topology=topology)).leases.writes == {}


@pytest.mark.parametrize("seed", range(2))
def test_no_two_write_one_term_and_terms_rise(seed):
    names = [ReplicaId(f"{region}-{n}") for region, count in FLEET.items() for n in (1, count)]
    drawn = random_faults(
        Random(seed), replicas=names, regions=list(FLEET), count=14, within_s=25.0
    )
    stops = (LeaseStreamDown(region=EU, at_s=5.0, until_s=8.0),)
    asked = steady(250, 0.1, US, EU, AP, prompt=200, answer=40)
    settings = config(
        FLEET, faults=(*drawn, *stops), seed=seed, jitter_s=0.02, loss=0.1, hold_s_max=10.0
    )
    world = played(asked, settings)
    for region in FLEET:
        writes = world.leases.writes[region]
        assert [w.seq for w in writes] == list(range(1, len(writes) + 1))
        assert [w.lease.term for w in writes] == sorted(w.lease.term for w in writes)
        holders = {(w.lease.term, w.lease.owner) for w in writes}
        assert len(holders) == len({term for term, _ in holders}), "one owner a term"
    assert leftovers(world) == {}


def test_all_routers_of_the_adopter_own_and_know_what_the_others_placed():
    asked = steady(200, 0.1, EU, prompt=640, answer=20)
    world = World(asked, config(FLEET, faults=(GONE,), policy="mesh", routers=2))
    world.queue.at(2.5 + 12.0, world.queue.stop)
    world.run()
    assert owners(world, US) == [US, EU]
    assert {write.lease.router for write in world.leases.writes[US][-10:]} == {"r1", "r2"}
    for router in world.region_routers[EU]:
        assert set(router.core.ownership.adopted) == {US}
        assert sorted(router.core.replicas.names_of(US)) == ["us/us-1", "us/us-2"]
    [[one], [other]] = [router.core.gossip.siblings.indexes for router in world.region_routers[EU]]
    for name in ("us/us-1", "us/us-2"):
        assert one.blocks(name) == other.blocks(name) > 0


def test_all_routers_of_a_region_take_it_back_and_nothing_is_left():
    asked = steady(300, 0.05, EU, prompt=100, answer=100)
    back = RouterCrash(region=US, at_s=3.0, until_s=9.0)
    world = played(asked, config(FLEET, faults=(back,), routers=2))
    assert owners(world, US) == [US, EU, US]
    for router in world.region_routers[EU]:
        assert router.core.ownership.adopted == {}
        assert router.core.replicas.names_of(US) == []
        [index] = router.core.gossip.siblings.indexes
        assert not [name for name in index.owners if name.startswith("us/")]
    assert all(set(router.core.ownership.owned) == {US} for router in world.region_routers[US])
    result = report(world, asked)
    assert (result["ok"], result["failures"]) == (300, {})
    assert leftovers(world) == {}
