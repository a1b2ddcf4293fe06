"""Departures: when each recorded request is sent, and to which region.

Sessions. Some recorders write sessions of different days one after the other, or each from its own
zero. Named sessions therefore keep their times from their first request on and begin as a seeded
Poisson process, in recorded order. Its mean gap is a convention: it fixes what speed 1 means.

Time. Recorders round their clocks: Mooncake's traces come in steps of three seconds and would play
as bursts of ten. Where most requests share their timestamp with another, each group is spread
uniformly (seeded) over its step, in its order. A trace with a fine clock is left alone.

Region. No public trace names a request's region. `hash` keeps a conversation in one region: its
key is the recorded session or else the first block that is not *common*, and a hash of the key
picks the region by weight. A block is common when every request has it, or more than
`COMMON_SHARE` of them and more than `COMMON_LEAST` do: system prompts and tool instructions.
`round-robin` assigns requests by weight one by one and splits conversations: the worst case for
caches. Both are computed over the whole trace, so a limited run plays the beginning of the full
one.
"""

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from statistics import median

from mesh.replay.trace import Trace, TraceRequest

SESSION_GAP_S = 10.0
COMMON_SHARE = 0.05  # a tool family's prompt is in 15% or more, the hottest session below 1%
COMMON_LEAST = 8  # in a short trace a session of eight turns is still a session

RegionWeights = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Departure:
    """One request to send `due_s` after the start, to `region`. `number`: its place, from 0.

    `session`: its conversation's key, as far as the trace names it.
    """

    number: int
    due_s: float
    region: str
    request: TraceRequest
    session: str = ""


def departures(
    trace: Trace,
    weights: RegionWeights,
    *,
    assign: str,
    speed: float,
    limit: int | None,
    rng: random.Random,
) -> tuple[Departure, ...]:
    """The plan of a run: the first at 0, `speed` times as fast as recorded, at most `limit`."""
    trace = with_sessions_beside(trace, rng)
    times = spread([request.at_s for request in trace.requests], rng)
    regions = ASSIGNMENTS[assign](trace, weights)
    rows = zip(times, regions, trace.requests, session_keys(trace), strict=True)
    return tuple(
        Departure(number, (at_s - times[0]) / speed, region, request, session)
        for number, (at_s, region, request, session) in enumerate(rows)
        if limit is None or number < limit
    )


def session_starts_s(
    sessions: int, rng: random.Random, gap_s: float = SESSION_GAP_S
) -> list[float]:
    """When each session begins: the first at 0, the others `gap_s` apart in the mean."""
    gaps_s = (rng.expovariate(1 / gap_s) for _ in range(sessions - 1))
    return list(accumulate(gaps_s, initial=0.0))[:sessions]


def with_sessions_beside(trace: Trace, rng: random.Random) -> Trace:
    """The trace with its named sessions running side by side; without names, as it is."""
    first_s: dict[str, float] = {}
    for request in trace.requests:
        if request.session:
            first_s.setdefault(request.session, request.at_s)
    if len(first_s) < 2:
        return trace
    starts = session_starts_s(len(first_s), rng)
    moved_s = {
        session: start - first
        for (session, first), start in zip(first_s.items(), starts, strict=True)
    }
    requests = [
        replace(request, at_s=request.at_s + moved_s.get(request.session, 0.0))
        for request in trace.requests
    ]
    requests.sort(key=lambda request: request.at_s)
    return replace(trace, requests=tuple(requests))


def clock_step_s(times: Sequence[float]) -> float:
    """How coarse the recorder's clock was, in seconds; 0 for a clock fine enough to play as is."""
    groups = Counter(times)
    sharing = sum(size for size in groups.values() if size > 1)
    if len(groups) < 2 or sharing * 2 <= len(times):
        return 0.0
    return median(later - sooner for sooner, later in pairwise(sorted(groups)))


def spread(times: Sequence[float], rng: random.Random) -> list[float]:
    """Sorted `times` with each coarse step's requests spread uniformly inside it, order kept."""
    step_s = clock_step_s(times)
    if not step_s:
        return list(times)
    groups = [(at_s, sum(1 for _ in group)) for at_s, group in groupby(times)]
    nexts = [at_s for at_s, _ in groups[1:]] + [groups[-1][0] + step_s]
    result: list[float] = []
    for (at_s, size), next_s in zip(groups, nexts, strict=True):
        room_s = min(step_s, next_s - at_s)
        result += sorted(at_s + room_s * rng.random() for _ in range(size))
    return result


def by_hash(trace: Trace, weights: RegionWeights) -> list[str]:
    return [pick_region(key, weights) for key in session_keys(trace)]


def session_keys(trace: Trace) -> list[str]:
    """Each request's conversation: the same key for its requests, and another for others'."""
    common = common_blocks(trace.requests)
    return [session_key(request, common, number) for number, request in enumerate(trace.requests)]


def common_blocks(requests: Sequence[TraceRequest]) -> frozenset[int]:
    """Blocks that belong to an application rather than to a conversation."""
    holders = Counter(block for request in requests for block in set(request.blocks))
    most = min(max(COMMON_SHARE * len(requests), COMMON_LEAST), len(requests) - 1)
    return frozenset(block for block, count in holders.items() if count > most)


def session_key(request: TraceRequest, common: frozenset[int], number: int) -> str:
    """What a conversation's requests have in common and others have not."""
    if request.session:
        return f"session {request.session}"
    if not request.blocks:
        return f"request {number}"
    own = (block for block in request.blocks if block not in common)
    return f"block {next(own, request.blocks[-1])}"


def pick_region(key: str, weights: RegionWeights) -> str:
    """The region of a conversation: always the same, and each region by its weight."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    regions, bounds = list(weights), list(accumulate(weights.values()))
    point = int.from_bytes(digest, "big") / 2**64 * bounds[-1]
    return regions[min(bisect_right(bounds, point), len(regions) - 1)]


def in_turn(trace: Trace, weights: RegionWeights) -> list[str]:
    """Requests assigned one by one, each region getting its weight's share as evenly as can be."""
    total = sum(weights.values())
    credit = dict.fromkeys(weights, 0.0)
    result: list[str] = []
    for _ in trace.requests:
        for region, weight in weights.items():
            credit[region] += weight
        richest = max(credit, key=credit.__getitem__)
        credit[richest] -= total
        result.append(richest)
    return result


ASSIGNMENTS: Mapping[str, Callable[[Trace, RegionWeights], list[str]]] = {
    "hash": by_hash,
    "round-robin": in_turn,
}
