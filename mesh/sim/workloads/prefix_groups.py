"""Requests in groups that share one prefix: Kthena's short prefixes, and Code 23.2.1.

`short`: 256 groups of 32 requests; a group's requests share a system prompt of 256 tokens, and no
other request has it. A hit saves less than bad balance costs, so no prefix-aware router should
claim a gain: in Kthena's own benchmark the best policy has 1% more throughput than random, and
random the best time to first token; with 4,096 tokens the same groups give 2.7 times the
throughput. Source: Kthena's (volcano-sh) router benchmark. Ours: 128 tokens of question and 256 of
answer, because the published description gives no lengths but the prefix's; requests come in random
order, open loop.

`chapter`: 300 requests a second, each one step of an engine with one of 50 prefixes. On the profile
`chapter-23.2` (agents.sim.profiles) a step costs 40 ms whatever is in it, up to eight requests,
and 3 ms for each prefix that is not in the cache. Source: "Batch-aware routing", Code 23.2.1. Its
clock ticks in milliseconds with one arrival at most in each; ours is a Poisson process of the same
mean.
"""

from collections.abc import Iterator
from random import Random

from mesh.sim.workload import RequestNode, Workload
from mesh.sim.workloads.arrivals import DURATION_S, LoadOptions, endless, workload, workload_maker
from mesh.sim.workloads.content import seeded, segment, segment_id
from schemas.ids import RegionId

GROUPS = 256
GROUP_REQUESTS = 32
QUESTION_TOKENS, ANSWER_TOKENS = 128, 256
PREFIXES = 50
PREFIX_TOKENS = 4096  # computed in 3 ms on `chapter-23.2`
OWN_TOKENS = 16


@workload_maker(
    "short", {"us": 1, "eu": 1, "ap": 1}, rate_per_s=GROUPS * GROUP_REQUESTS / DURATION_S
)
def short(load: LoadOptions, prefix_tokens: int = 256) -> Workload:
    """256 × 32 requests at most, or what `duration_s` at `rate_per_s` has room for. Open loop."""
    cards = [(group, member) for group in range(GROUPS) for member in range(GROUP_REQUESTS)]
    seeded(load.seed, "short", "deck").shuffle(cards)
    deck = iter(cards)  # all clients draw from it, so each request comes once

    def trees(region: RegionId, client: int) -> Iterator[RequestNode]:
        for group, member in deck:
            request = segment_id(load.seed, "short", group, member)
            yield RequestNode(
                prompt=(
                    segment(prefix_tokens, "short", "prefix", group, prefix_tokens),
                    segment(QUESTION_TOKENS, request, "question"),
                ),
                answer=segment(ANSWER_TOKENS, request, "answer"),
                session=segment_id("short", "session", group),
            )

    return workload(load, trees, prefix_tokens=prefix_tokens)


@workload_maker("chapter", {"us": 1}, rate_per_s=300.0, duration_s=60.0)
def chapter(load: LoadOptions) -> Workload:
    """One-step requests over PREFIXES sessions, all as popular. Open loop."""

    def node(rng: Random, request: int) -> Iterator[RequestNode]:
        prefix = rng.randrange(PREFIXES)
        yield RequestNode(
            prompt=(
                segment(PREFIX_TOKENS, "chapter", "prefix", prefix),
                segment(OWN_TOKENS, request, "own"),
            ),
            answer=segment(1, request, "answer"),
            session=segment_id("chapter", "session", prefix),
        )

    return workload(load, endless(load, node), prefixes=PREFIXES)
