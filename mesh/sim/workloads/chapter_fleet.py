"""The fleet of Code 23.2.1: 300 requests a second, each with one of 50 prefixes.

Every request is one step of an engine: it brings its prefix, a few tokens of its own, and takes
one token. On the profile `chapter-23.2` (agents.sim.profiles) a step costs 40 ms whatever is in
it, up to eight requests, and 3 ms for each prefix that is not in the cache.

Source: "Batch-aware routing", Code 23.2.1. Its clock ticks in milliseconds with one arrival at
most in each; ours is a Poisson process of the same mean.
"""

from collections.abc import Iterator

from mesh.sim.workload import Node, Workload
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 1}
DURATION_S = 60.0
RATE_PER_S = 300.0
PREFIXES = 50
PREFIX_TOKENS = 4096  # what `chapter-23.2` computes in 3 ms
OWN_TOKENS = 16


def chapter(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    prefixes: int = PREFIXES,
) -> Workload:
    """One-step requests over `prefixes` sessions, all as popular. Open loop."""

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        rng = seeded(seed, "chapter", region, number)
        asked = 0
        while True:
            prefix = rng.randrange(prefixes)
            request = segment_id(seed, "chapter", region, number, asked)
            yield Node(
                prompt=(
                    segment(PREFIX_TOKENS, "chapter", "prefix", prefix),
                    segment(OWN_TOKENS, request, "own"),
                ),
                answer=segment(1, request, "answer"),
                session=segment_id("chapter", "session", prefix),
            )
            asked += 1

    pace = Pace(given(duration_s, DURATION_S), given(rate_per_s, RATE_PER_S))
    return workload("chapter", given(clients, CLIENTS), trees, pace, seed=seed, prefixes=prefixes)
