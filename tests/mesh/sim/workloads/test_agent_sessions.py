"""A recorded session becomes a tree whose prompts share what its block ranges share."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.replay.trace_formats import AgentSession, Turn, parse_kv_cache_tester, read_lines
from mesh.sim.workload import RequestNode
from mesh.sim.workloads.capacity import demand
from mesh.sim.workloads.content import seeded
from mesh.sim.workloads.traces import from_trace, session_arrivals
from schemas.ids import RegionId
from tests.mesh.sim.workloads.forest import common_tokens, nodes_of, shared_ratio

US = RegionId("us")
RECORDED = Path("tests/data/kv-cache-tester/four_sessions.jsonl")


def tree(*turns: Turn, scale: float = 1.0) -> RequestNode:
    sessions = (AgentSession("a", 64, turns),)
    (arrival,) = session_arrivals(sessions, {"us": 1.0}, seeded(1), None, scale)
    return arrival.node


def turn(
    *ranges: tuple[int, int], at_s: float = 0.0, think_s: float = 0.0, thread: int = 0
) -> Turn:
    tokens = 64 * sum(count for _, count in ranges) + 10
    return Turn(at_s, think_s, thread, tokens, 20, ranges)


RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=3)


@given(first=RANGES, second=RANGES)
def test_two_prompts_share_the_blocks_they_begin_with_alike(first, second):
    root = tree(turn(*first), turn(*second))
    one, other = nodes_of(root)
    expanded = [
        [block for start, count in ranges for block in range(start, start + count)]
        for ranges in (first, second)
    ]
    same = 0
    for left, right in zip(*expanded, strict=False):
        if left != right:
            break
        same += 1
    assert common_tokens(one.prompt, other.prompt) == 64 * same
    assert one.prompt_tokens == 64 * len(expanded[0]) + 10


def test_a_talk_is_a_chain_and_a_sub_agent_hangs_on_what_came_before_it():
    root = tree(
        turn((0, 1)),
        turn((0, 2), at_s=5.0, think_s=3.0),
        turn((9, 1), at_s=6.0, think_s=0.5, thread=1),
        turn((0, 3), at_s=9.0, think_s=500.0),
        turn((9, 2), at_s=9.5, think_s=2.0, thread=1),
    )
    (second,) = root.children
    assert [child.pause_s for child in second.children] == [0.5, 60.0]
    sub, main = second.children
    assert main.children == ()
    assert [(child.pause_s, child.children) for child in sub.children] == [(2.0, ())]
    assert len({node.session for node in nodes_of(root)}) == 1


def test_the_recorded_sessions_keep_their_requests_sharing_and_think_times():
    sessions = read_lines(RECORDED, parse_kv_cache_tester)
    workload = from_trace(RECORDED, "kv-cache-tester", regions={US: 1.0}, seed=1)
    assert [sum(1 for _ in nodes_of(a.node)) for a in workload.arrivals] == [3, 3, 4, 32]
    assert all(one.at_s < two.at_s for one, two in pairwise(workload.arrivals))
    wanted = demand(workload)
    assert wanted.prompt_tokens == sum(t.input_tokens for s in sessions for t in s.turns)
    assert wanted.output_tokens == sum(t.output_tokens for s in sessions for t in s.turns)
    pauses = [n.pause_s for a in workload.arrivals for n in nodes_of(a.node) if n is not a.node]
    recorded = [min(t.think_s, 60.0) for s in sessions for t in s.turns[1:]]
    assert sorted(pauses) == pytest.approx(sorted(recorded))


def test_scaling_keeps_the_sharing_and_speed_the_shape():
    full = demand(from_trace(RECORDED, "kv-cache-tester", regions={US: 1.0}))
    small = demand(from_trace(RECORDED, "kv-cache-tester", regions={US: 1.0}, scale=0.05))
    fast = demand(from_trace(RECORDED, "kv-cache-tester", regions={US: 1.0}, speed=8.0))
    assert shared_ratio(small) == pytest.approx(shared_ratio(full), abs=0.01)
    assert small.prompt_tokens / full.prompt_tokens == pytest.approx(0.05, rel=0.02)
    assert full.duration_s / fast.duration_s == pytest.approx(8.0)


def test_a_session_of_a_thousand_turns_is_made_without_recursion():
    turns = tuple(turn((0, at + 1), at_s=float(at)) for at in range(3000))
    assert sum(1 for _ in nodes_of(tree(*turns))) == 3000
