"""When and where requests leave: order, speed, spreading, and conversations kept together."""

import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.schedule import (
    ASSIGNMENTS,
    by_hash,
    clock_step_s,
    common_blocks,
    departures,
    in_turn,
    spread,
)
from mesh.replay.trace import Trace, TraceRequest
from mesh.replay.trace_formats import load_trace

RECORDED = Path("tests/data/mooncake/conversation_first60.jsonl")
REGIONS = {"us": 1.0, "eu": 1.0, "ap": 1.0}

coarse_times = st.lists(st.integers(0, 50), min_size=1, max_size=60).map(
    lambda steps: [3.0 * step for step in sorted(steps)]
)


def trace_of(*blocks: tuple[int, ...]) -> Trace:
    return Trace(
        512, tuple(TraceRequest(float(at), 4096, 10, ids) for at, ids in enumerate(blocks))
    )


@given(times=coarse_times, seed=st.integers(0, 2**32))
def test_spreading_keeps_order_and_stays_in_the_step(times: list[float], seed: int) -> None:
    moved = spread(times, random.Random(seed))
    step_s = clock_step_s(times)
    assert len(moved) == len(times)
    assert moved == sorted(moved)
    for before, after in zip(times, moved, strict=True):
        assert before <= after <= before + step_s
    for (before, after), (next_before, _) in pairwise(zip(times, moved, strict=True)):
        assert next_before == before or after <= next_before


@given(times=coarse_times, seed=st.integers(0, 2**32))
def test_the_same_seed_spreads_the_same_way(times: list[float], seed: int) -> None:
    assert spread(times, random.Random(seed)) == spread(times, random.Random(seed))


def test_a_coarse_clock_is_seen_and_a_fine_one_left_alone() -> None:
    recorded = [request.at_s for request in load_trace(RECORDED, "mooncake").requests]
    assert clock_step_s(recorded) == pytest.approx(3.0, abs=0.01)
    assert len(set(spread(recorded, random.Random(1)))) == len(recorded)
    fine = [0.0, 0.1, 0.1, 0.4, 0.9]
    assert spread(fine, random.Random(1)) == fine


@given(
    times=coarse_times,
    speed=st.floats(0.01, 100),
    limit=st.none() | st.integers(1, 80),
    assign=st.sampled_from(sorted(ASSIGNMENTS)),
)
def test_a_plan_starts_at_zero_in_order_and_is_a_beginning_of_the_whole(
    times: list[float], speed: float, limit: int | None, assign: str
) -> None:
    trace = Trace(512, tuple(TraceRequest(at_s, 10, 1) for at_s in times))
    whole = departures(trace, REGIONS, assign=assign, speed=1, limit=None, rng=random.Random(3))
    plan = departures(trace, REGIONS, assign=assign, speed=speed, limit=limit, rng=random.Random(3))
    assert plan[0].due_s == 0
    assert len(plan) == min(len(times), limit or len(times))
    for played, recorded in zip(plan, whole, strict=False):
        assert played.due_s * speed == pytest.approx(recorded.due_s)
        assert (played.number, played.region) == (recorded.number, recorded.region)


def test_conversations_stay_in_one_region_though_all_share_a_system_prompt() -> None:
    # 200 conversations of three turns; block 0 is common, a turn's last block is its own.
    turns = [
        (0, *(1000 * session + n for n in range(1, 2 + turn)), 1000 * session + 900 + turn)
        for turn in range(3)
        for session in range(1, 201)
    ]
    trace = trace_of(*turns)
    homes = defaultdict(set)
    for request, region in zip(trace.requests, by_hash(trace, REGIONS), strict=True):
        homes[request.blocks[1]].add(region)
    assert len(homes) == 200
    assert all(len(regions) == 1 for regions in homes.values())
    shares = Counter(region for regions in homes.values() for region in regions)
    assert min(shares[region] for region in REGIONS) > 40


def test_a_tool_prompt_of_many_does_not_pull_them_into_one_region() -> None:
    chat = [(0, 10 + n) for n in range(60)]
    tool = [(1, 2, 3, 1000 + n) for n in range(40)]
    trace = trace_of(*chat, *tool)
    assert common_blocks(trace.requests) == {0, 1, 2, 3}
    assert set(by_hash(trace, REGIONS)[60:]) == set(REGIONS)


def test_what_every_request_has_is_common_even_in_a_short_trace() -> None:
    assert common_blocks(trace_of((0, 1), (0, 1, 2), (0, 5)).requests) == {0}


def test_requests_without_blocks_are_spread_one_by_one() -> None:
    trace = trace_of(*[()] * 90)
    assert min(Counter(by_hash(trace, REGIONS)).values()) > 15


def test_weights_shape_the_shares() -> None:
    trace = trace_of(*[(0, n) for n in range(1, 1001)])
    weights = {"us": 3.0, "eu": 1.0}
    assert Counter(by_hash(trace, weights))["us"] == pytest.approx(750, abs=50)
    assert Counter(in_turn(trace, weights)) == {"us": 750, "eu": 250}
    assert in_turn(trace_of(*[()] * 6), REGIONS) == ["us", "eu", "ap"] * 2
