"""Recorded traces as workloads: arrivals in regions, with what prompts share as recorded.

Flat formats (Mooncake, Azure, LMCache) become one arrival for each request, at the times and in
the regions that `mesh replay` would use: the plan is `mesh.replay.schedule`'s own. A block is a
segment; a last block that the prompt doesn't fill, and what no block covers, are segments of
their own.

Agent sessions (kv-cache-tester) become trees: see `mesh.sim.workloads.agent_sessions`.

`speed` makes recorded time run faster, think times included. `scale` shrinks prompts and answers
for small engines: each segment by itself, so who shares what stays as recorded.

Answers: no trace says which of the next prompt's tokens were this answer's, so answers are content
of their own and the next prompt is as cached as its recorded blocks are.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from mesh.replay.formats import FORMATS, load_trace, read_lines
from mesh.replay.formats.kv_cache_tester import parse_kv_cache_tester
from mesh.replay.schedule import Weights, departures
from mesh.replay.trace import Trace, TraceRequest
from mesh.sim.workload import Arrival, Node, Segment, Workload
from mesh.sim.workloads.agent_sessions import THINK_MAX_S, session_arrivals
from mesh.sim.workloads.names import segment, segment_id
from mesh.sim.workloads.pace import at_speed
from schemas.ids import RegionId

AGENT_SESSIONS = "kv-cache-tester"
TRACE_FORMATS = (*FORMATS, AGENT_SESSIONS)


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
    think_max_s: float = THINK_MAX_S,
) -> Workload:
    """A trace file's workload. `regions`: each one's share; `limit`: requests at most.

    Raises TraceError, whose message names the file and line, or ValueError for an argument.
    """
    _check(format_name, regions, limit, speed, scale)
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
        arrivals = session_arrivals(sessions, weights, rng, limit, scale, think_max_s)
        facts["think_max_s"] = think_max_s
        return at_speed(Workload(name=path.stem, arrivals=arrivals, facts=facts), speed)
    trace = load_trace(path, format_name).scaled(scale)
    arrivals = _flat_arrivals(trace, weights, rng, limit, speed, assign)
    return Workload(name=path.stem, arrivals=arrivals, facts=facts | {"assign": assign})


def _check(
    format_name: str,
    regions: Mapping[RegionId, float],
    limit: int | None,
    speed: float,
    scale: float,
) -> None:
    if format_name not in TRACE_FORMATS:
        known = ", ".join(TRACE_FORMATS)
        raise ValueError(f"unknown trace format {format_name!r}: use one of {known}")
    if not regions or min(regions.values()) <= 0:
        raise ValueError("regions: name at least one, each with a share above 0")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    if not 0 < scale <= 1:
        raise ValueError(f"scale must be above 0 and at most 1, got {scale}")


def _flat_arrivals(
    trace: Trace,
    weights: Weights,
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
            Node(
                prompt=_prompt(leaving.request, leaving.number, trace.block_tokens, whole),
                answer=segment(leaving.request.output_tokens, "answer", leaving.number),
                session=segment_id("session", leaving.session),
            ),
        )
        for leaving in plan
    )


def _prompt(
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
