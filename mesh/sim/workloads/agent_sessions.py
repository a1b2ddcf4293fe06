"""Recorded agent sessions as trees of requests: a closed loop inside each.

Each request follows the one before it in its talk, after the recorded think time, so a slow mesh
slows the session as it would slow the agent. A sub-agent's first request follows what the main
agent last asked before it. Sessions begin by the rule of `mesh.replay.sessions`, and a session
stays in one region.

Block ids mean something inside a session only, so sessions share nothing. A segment is a longest
run of blocks that every prompt of the session has whole or not at all: the same sharing as block
by block, in a fiftieth of the segments (prompts of 120,000 tokens have 1,900 blocks).
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from mesh.replay.formats.kv_cache_tester import AgentSession, Turn
from mesh.replay.schedule import Weights, pick_region
from mesh.replay.sessions import session_starts_s
from mesh.sim.workload import Arrival, Node, Segment
from mesh.sim.workloads.names import segment, segment_id
from schemas.ids import RegionId

THINK_MAX_S = 60.0  # most recorded pauses are shorter (median 10 s); some last a night


def session_arrivals(
    sessions: tuple[AgentSession, ...],
    weights: Weights,
    rng: random.Random,
    limit: int | None,
    scale: float,
    think_max_s: float,
) -> tuple[Arrival, ...]:
    """One arrival a session, the first sessions with `limit` requests in all."""
    starts = session_starts_s(len(sessions), rng)
    arrivals: list[Arrival] = []
    left = limit
    for place, (session, start_s) in enumerate(zip(sessions, starts, strict=True)):
        turns = session.turns[:left]
        if not turns:
            break
        left = None if left is None else left - len(turns)
        name = f"{place}/{session.name}"
        cut = replace(session, turns=turns)
        node = _session_tree(cut, name, scale, think_max_s)
        region = RegionId(pick_region(f"session {name}", weights))
        arrivals.append(Arrival(start_s, region, node))
    return tuple(arrivals)


def _session_tree(session: AgentSession, name: str, scale: float, think_max_s: float) -> Node:
    prompt_of = _session_prompts(session, name, scale)
    parents = _parents(session.turns)
    children: list[list[Node]] = [[] for _ in session.turns]
    number = segment_id("session", name)
    for place in reversed(range(len(session.turns))):
        turn, parent = session.turns[place], parents[place]
        node = Node(
            prompt=prompt_of(place),
            answer=segment(round(turn.output_tokens * scale), name, "answer", place),
            pause_s=0.0 if parent is None else min(turn.think_s, think_max_s),
            children=tuple(reversed(children[place])),
            session=number,
        )
        if parent is not None:
            children[parent].append(node)
    return node


def _parents(turns: tuple[Turn, ...]) -> list[int | None]:
    """Whose answer each turn follows: its talk's turn before, or what began before its talk."""
    last_of: dict[int, int] = {}
    parents: list[int | None] = []
    main = turns[0].talk
    for place, turn in enumerate(turns):
        parents.append(last_of.get(turn.talk, last_of.get(main)))
        last_of[turn.talk] = place
    return parents


def _session_prompts(
    session: AgentSession, name: str, scale: float
) -> Callable[[int], tuple[Segment, ...]]:
    """Each turn's prompt, in segments between the block ids where any range begins or ends."""
    ends = {end for turn in session.turns for first, n in turn.ranges for end in (first, first + n)}
    cuts = sorted(ends)
    runs = [
        segment(round((end - first) * session.block_tokens * scale), name, "blocks", first, end)
        for first, end in pairwise(cuts)
    ]

    def prompt(place: int) -> tuple[Segment, ...]:
        turn = session.turns[place]
        own = turn.input_tokens
        parts: list[Segment] = []
        for first, count in turn.ranges:
            parts += runs[bisect_left(cuts, first) : bisect_left(cuts, first + count)]
            own -= count * session.block_tokens
        if round(own * scale) > 0 or not parts:
            parts.append(segment(round(own * scale), name, "own", place))
        return tuple(parts)

    return prompt
