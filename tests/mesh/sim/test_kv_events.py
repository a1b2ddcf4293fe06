"""KV events in the twin: a router's index is what the engines hold."""

from pathlib import Path

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.sim.config import EngineCrash, WorldConfig
from mesh.sim.workloads.traces import AGENT_SESSIONS, from_trace
from mesh.sim.world import World

TRACE = Path(__file__).parents[2] / "data" / "kv-cache-tester" / "four_sessions.jsonl"
SMALL = 6_000  # tokens of KV: less than one session has


def played(*faults, exact):
    config = WorldConfig(
        regions={"us": ["l4-llama3.1-8b"] * 2},
        settings=RouterSettings(policy="mesh"),
        kv_tokens=SMALL,
        kv_events=exact,
        faults=faults,
    )
    scale = {"limit": 40, "scale": 0.02}
    world = World(from_trace(TRACE, AGENT_SESSIONS, regions={"us": 1.0}, **scale), config)
    world.watched = []
    world.watch_cached = lambda *tokens: world.watched.append(tokens)
    world.run()
    return world


def stale(world):
    """Blocks that the router takes for held and the engine has not."""
    [router] = world.all_routers()
    [index] = router.core.state.placer.replica_indexes
    return {
        (name, block)
        for name, replica in world.replicas.items()
        for block, _ in index.held(name)
        if replica.engine.sim.cache.matched([block]) == 0
    }


@pytest.mark.parametrize("faults", [(), (EngineCrash(replica="us-1", at_s=60.0, until_s=61.0),)])
def test_the_index_holds_nothing_that_the_engines_have_not(faults):
    world = played(*faults, exact=True)
    assert len(world.watched) > 20
    assert sum(replica.kv_events.published for replica in world.replicas.values()) > 0
    assert stale(world) == set()


def test_estimates_go_wrong_there():
    assert stale(played(exact=False)) != set()
