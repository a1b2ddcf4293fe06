"""Recorded traces as workloads: arrivals in regions, with the recorded sharing of prefixes.

Flat formats (Mooncake, Azure, LMCache) become one arrival for each request, at the times and in
the regions that `mesh replay` would use (`mesh.replay.schedule`). A block is a segment; a last
block that the prompt doesn't fill, and what no block covers, are segments of their own.

Agent sessions (kv-cache-tester) become trees, one arrival a session, each in one region. A request
follows the one before it in its thread after the recorded think time, so a slow mesh slows the
session down; a sub-agent's first request follows the main agent's last one before it. Block ids are
valid inside a session only, so sessions share nothing. A segment is a longest run of blocks that
every prompt of the session has whole or not at all: the same sharing as block by block, in a
fiftieth of the segments (prompts of 120,000 tokens have 1,900 blocks).

`speed` makes recorded time run faster, think times included. `scale` shrinks prompts and answers
for small engines, each segment by itself, so the sharing stays as recorded. No trace names which of
the next prompt's tokens were this answer's, so answers are content of their own.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from mesh.replay.schedule import RegionWeights, departures, pick_region, session_starts_s
from mesh.replay.trace import Trace, TraceRequest
from mesh.replay.trace_formats import (
    FORMATS,
    AgentSession,
    Turn,
    load_trace,
    parse_kv_cache_tester,
    read_lines,
)
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload
from mesh.sim.workloads.arrivals import at_speed
from mesh.sim.workloads.content import segment, segment_id
from schemas.ids import RegionId

AGENT_SESSIONS = "kv-cache-tester"
TRACE_FORMATS = (*FORMATS, AGENT_SESSIONS)
THINK_MAX_S = 60.0  # most recorded pauses are shorter (median 10 s); some last a night


def from_trace(
    path: Path,
    format_name: str,
    *,
    regions: Mapping[RegionId, float],
    seed: int = 0,
    limit: int | None = None,
    speed: float = 1.0,
    scale: float = 1.0,
    assign: str = "hash",
) -> Workload:
    """A trace file's workload. `regions`: each one's share; `limit`: requests at most.

    Raises TraceError, whose message names the file and line.
    """
    facts: dict[str, object] = {
        "trace": path.name,
        "format": format_name,
        "regions": dict(regions),
        "seed": seed,
        "limit": limit,
        "speed": speed,
        "scale": scale,
    }
    rng = random.Random(seed)
    weights = {str(region): share for region, share in regions.items()}
    if format_name == AGENT_SESSIONS:
        sessions = read_lines(path, parse_kv_cache_tester)
        arrivals = session_arrivals(sessions, weights, rng, limit, scale)
        facts["think_max_s"] = THINK_MAX_S
        return at_speed(Workload(name=path.stem, arrivals=arrivals, facts=facts), speed)
    trace = load_trace(path, format_name).scaled(scale)
    arrivals = _flat_arrivals(trace, weights, rng, limit, speed, assign)
    return Workload(name=path.stem, arrivals=arrivals, facts=facts | {"assign": assign})


def _flat_arrivals(
    trace: Trace,
    weights: RegionWeights,
    rng: random.Random,
    limit: int | None,
    speed: float,
    assign: str,
) -> tuple[Arrival, ...]:
    whole: dict[int, Segment] = {}
    plan = departures(trace, weights, assign=assign, speed=speed, limit=limit, rng=rng)
    return tuple(
        Arrival(
            leaving.due_s,
            RegionId(leaving.region),
            RequestNode(
                prompt=_flat_prompt(leaving.request, leaving.number, trace.block_tokens, whole),
                answer=segment(leaving.request.output_tokens, "answer", leaving.number),
                session=segment_id("session", leaving.session),
            ),
        )
        for leaving in plan
    )


def _flat_prompt(
    request: TraceRequest, number: int, block_tokens: int, whole: dict[int, Segment]
) -> tuple[Segment, ...]:
    left = request.input_tokens
    prompt: list[Segment] = []
    for block in request.blocks:
        if left <= 0:
            break
        if left >= block_tokens:
            if block not in whole:
                whole[block] = segment(block_tokens, "block", block)
            prompt.append(whole[block])
        else:
            prompt.append(segment(left, "block", block, left))
        left -= prompt[-1].tokens
    if left > 0:
        prompt.append(segment(left, "own", number))
    return tuple(prompt)


def session_arrivals(
    sessions: tuple[AgentSession, ...],
    weights: RegionWeights,
    rng: random.Random,
    limit: int | None,
    scale: float,
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
        node = _session_tree(replace(session, turns=turns), name, scale)
        region = RegionId(pick_region(f"session {name}", weights))
        arrivals.append(Arrival(start_s, region, node))
    return tuple(arrivals)


def _session_tree(session: AgentSession, name: str, scale: float) -> RequestNode:
    prompt_of = _session_prompts(session, name, scale)
    parents = _parents(session.turns)
    children: list[list[RequestNode]] = [[] for _ in session.turns]
    number = segment_id("session", name)
    for place in reversed(range(len(session.turns))):
        turn, parent = session.turns[place], parents[place]
        node = RequestNode(
            prompt=prompt_of(place),
            answer=segment(round(turn.output_tokens * scale), name, "answer", place),
            pause_s=0.0 if parent is None else min(turn.think_s, THINK_MAX_S),
            children=tuple(reversed(children[place])),
            session=number,
        )
        if parent is not None:
            children[parent].append(node)
    return node


def _parents(turns: tuple[Turn, ...]) -> list[int | None]:
    """Whose answer each turn follows: its thread's last turn, or else the main agent's."""
    last_of: dict[int, int] = {}
    parents: list[int | None] = []
    main = turns[0].thread
    for place, turn in enumerate(turns):
        parents.append(last_of.get(turn.thread, last_of.get(main)))
        last_of[turn.thread] = place
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
