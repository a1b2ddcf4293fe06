"""Warming in the twin: it leaves nothing behind, a seed still has one digest, and off is off."""

from mesh.core.model.settings import RouterSettings
from mesh.sim.config import WorldConfig
from mesh.sim.router import cut
from mesh.sim.workload import Segment
from mesh.sim.workloads.daily_load import world_product
from mesh.sim.world import report
from tests.mesh.sim.build import AP, EU, US, leftovers, played

ON = {"warm_idle_share": 0.5, "warm_trend_s": 15.0}


def day(duration_s=40.0):
    return world_product(duration_s=duration_s, rate_per_s=4.0)


def world(asked, **settings):
    fleet = dict.fromkeys((US, EU, AP), ("h100-llama3.1-8b",) * 2)
    return played(asked, WorldConfig(regions=fleet, settings=RouterSettings(**settings)))


def test_hot_prefixes_are_computed_and_nothing_is_left_of_it():
    warmed = world(day(), **ON)
    result = report(warmed, day())
    assert result["ok"] == result["requests"] == len(day().arrivals)
    counts = result["warm_ups"]
    assert counts["ended"] and counts["peer_requests"] and counts["tokens"]
    assert counts["spent_s"] <= 0.5 * counts["idle_s"]
    assert not any(leftovers(warmed).values()), leftovers(warmed)
    assert report(world(day(), **ON), day())["digest"] == result["digest"]


def test_off_nothing_of_it_changes_a_run():
    short = day(15.0)
    as_it_is = report(world(short), short)
    other = world(short, warm_bytes_max=1, warm_kv_used_max=1.0, warm_trend_s=5.0)
    assert report(other, short)["digest"] == as_it_is["digest"]
    assert not any(as_it_is["warm_ups"].values())


def test_a_cut_prompt_is_its_beginning():
    prompt = (Segment(1, 10), Segment(2, 20), Segment(3, 5))
    assert cut(prompt, 10) == prompt[:1]
    assert cut(prompt, 15) == (Segment(1, 10), Segment(2, 5))
    assert cut(prompt, 99) == prompt
