"""Traces become the arrivals that a replay would send, and share what was recorded."""

import random
from pathlib import Path

import pytest

from mesh.replay.schedule import departures
from mesh.replay.trace import TraceError
from mesh.replay.trace_formats import load_trace
from mesh.sim.workloads.capacity import demand
from mesh.sim.workloads.traces import TRACE_FORMATS, from_trace
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import common_tokens, digest, shared_ratio

US, EU = RegionId("us"), RegionId("eu")
REGIONS = {US: 2.0, EU: 1.0}
DATA = Path("tests/data")
PATHS = {
    "mooncake": DATA / "mooncake" / "conversation_first60.jsonl",
    "azure": DATA / "azure" / "conv_first60.csv",
    "lmcache": DATA / "lmcache" / "taubench",
    "kv-cache-tester": DATA / "kv-cache-tester" / "four_sessions.jsonl",
}
FLAT = [name for name in TRACE_FORMATS if name != "kv-cache-tester"]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_arrivals_are_the_departures_of_a_replay(name, scale):
    workload = from_trace(PATHS[name], name, regions=REGIONS, seed=4, speed=2.0, scale=scale)
    trace = load_trace(PATHS[name], name).scaled(scale)
    weights = {"us": 2.0, "eu": 1.0}
    plan = departures(trace, weights, assign="hash", speed=2.0, limit=None, rng=random.Random(4))
    assert [(a.at_s, a.region) for a in workload.arrivals] == [(d.due_s, d.region) for d in plan]
    for arrival, departure in zip(workload.arrivals, plan, strict=True):
        assert arrival.node.prompt_tokens == departure.request.input_tokens
        assert arrival.node.answer.tokens == max(1, departure.request.output_tokens)


@pytest.mark.parametrize("name", ["mooncake", "lmcache"])
def test_prompts_share_the_recorded_blocks_and_no_more(name):
    workload = from_trace(PATHS[name], name, regions=REGIONS)
    trace = load_trace(PATHS[name], name)
    plan = departures(
        trace, {"us": 2.0, "eu": 1.0}, assign="hash", speed=1.0, limit=None, rng=random.Random(0)
    )
    rows = list(zip(workload.arrivals, plan, strict=True))
    for (one, left), (other, right) in zip(rows, rows[7:], strict=False):
        same = 0
        for this, that in zip(left.request.blocks, right.request.blocks, strict=False):
            if this != that:
                break
            same += 1
        tokens = common_tokens(one.node.prompt, other.node.prompt)
        least = min(left.request.input_tokens, right.request.input_tokens)
        # a last block that isn't full is shared only by those who fill it alike
        assert min(same * trace.block_tokens, least) - trace.block_tokens < tokens or same == 0
        assert tokens <= same * trace.block_tokens


def test_azure_prompts_share_nothing():
    assert shared_ratio(demand(from_trace(PATHS["azure"], "azure", regions=REGIONS))) < 0.001


def test_lmcache_sessions_run_beside_each_other():
    workload = from_trace(PATHS["lmcache"], "lmcache", regions=REGIONS, seed=1)
    assert len({arrival.node.session for arrival in workload.arrivals}) == 3
    assert workload.arrivals[-1].at_s < 600
    regions = {arrival.node.session: arrival.region for arrival in workload.arrivals}
    assert all(regions[a.node.session] == a.region for a in workload.arrivals)


@pytest.mark.parametrize("name", TRACE_FORMATS)
def test_the_seed_decides_and_a_limit_is_the_beginning(name):
    whole = from_trace(PATHS[name], name, regions=REGIONS, seed=3)
    assert digest(whole) == digest(from_trace(PATHS[name], name, regions=REGIONS, seed=3))
    first = from_trace(PATHS[name], name, regions=REGIONS, seed=3, limit=5)
    assert demand(first).requests == 5
    for one, other in zip(first.arrivals, whole.arrivals, strict=False):
        assert (one.at_s, one.region) == (other.at_s, other.region)
        assert (one.node.prompt, one.node.session) == (other.node.prompt, other.node.session)


def test_an_unknown_format_is_an_error_that_names_the_known_ones():
    with pytest.raises(TraceError, match="'weka': use one of mooncake, "):
        from_trace(PATHS["azure"], "weka", regions=REGIONS)
    with pytest.raises(TraceError, match=r"conv_first60\.csv: line 1: not a JSON object"):
        from_trace(PATHS["azure"], "kv-cache-tester", regions=REGIONS)
