from mesh.sim.twin_policies import TwinPolicies
from mesh.sim.world import World
from tests.mesh.sim.build import EU, US, arrivals, config, node, steady


def everywhere(regions, **fields):
    return config(regions, policy="mesh-everywhere", **fields)


def ends(workload, world_config):
    world = World(workload, world_config, makers=TwinPolicies())
    found = []
    world.requests.watch = lambda ask, answered, now: found.append(answered)
    world.run()
    return world, found


def test_the_named_replica_of_a_far_region_serves():
    rows = [(n * 0.01, US, node(900, 40, name=10 + n)) for n in range(8)]
    world, found = ends(arrivals(*rows), everywhere({US: 1, EU: 2}))
    assert world.requests.ended == 8
    assert {answered.outcome.value for answered in found} == {"ok"}
    far = [answered.replica for answered in found if answered.hops]
    assert set(far) == {"eu-1", "eu-2"}  # each got its share: what was on its way was counted


def test_what_one_router_placed_all_know():
    first = node(900, 2, name=1)
    rows = [(0.0, EU, first), (5.0, US, node(900, 2, name=1))]
    _, found = ends(arrivals(*rows), everywhere({US: 1, EU: 1}))
    assert [answered.replica for answered in found] == ["eu-1", "eu-1"]
    assert found[1].cached_tokens >= 880


def test_equal_seeds_give_equal_digests():
    runs = [ends(steady(40, 0.05, US, EU), everywhere({US: 1, EU: 1}))[0] for _ in range(2)]
    assert runs[0].requests.digest() == runs[1].requests.digest()


def test_nothing_is_remembered_of_requests_that_are_over():
    policies = TwinPolicies()
    world = World(steady(20, 0.05, US, EU), everywhere({US: 1, EU: 1}), makers=policies)
    world.run()
    (shared,) = policies._shared.values()
    assert shared._decisions == {}
