"""Short shared prefixes: the case in which no router that looks at prefixes should claim a gain.

256 groups of 32 requests; a group's requests share a system prompt of 256 tokens, and nobody else
has it. What a hit saves is then less than what bad balance costs: Kthena's own benchmark of this
shape shows the best policy 1% above random in throughput, and random with the best time to first
token; with 4,096 tokens the same groups give it 2.7 times the throughput.

Source: Kthena's (volcano-sh) router benchmark. Ours: 128 tokens of question and 256 of answer,
because the published description gives no lengths but the prefix's; requests come in random order,
open loop.
"""

import random
from collections.abc import Iterator

from mesh.sim.workload import Node, Workload
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 1, RegionId("eu"): 1, RegionId("ap"): 1}
DURATION_S = 600.0
RATE_PER_S = 256 * 32 / DURATION_S  # all requests in the default duration
GROUPS = 256
GROUP_REQUESTS = 32


def short(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    prefix_tokens: int = 256,
    question_tokens: int = 128,
    answer_tokens: int = 256,
) -> Workload:
    """256 × 32 requests at most, or what `duration_s` at `rate_per_s` has room for. Open loop."""
    deck = _deck(seeded(seed, "short", "deck"))

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        for group, member in deck:
            request = segment_id(seed, "short", group, member)
            yield Node(
                prompt=(
                    segment(prefix_tokens, "short", "prefix", group, prefix_tokens),
                    segment(question_tokens, request, "question"),
                ),
                answer=segment(answer_tokens, request, "answer"),
                session=segment_id("short", "session", group),
            )

    pace = Pace(given(duration_s, DURATION_S), given(rate_per_s, RATE_PER_S))
    return workload(
        "short", given(clients, CLIENTS), trees, pace, seed=seed, prefix_tokens=prefix_tokens
    )


def _deck(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Every request once, in random order; all clients draw from this one deck."""
    cards = [(group, member) for group in range(GROUPS) for member in range(GROUP_REQUESTS)]
    rng.shuffle(cards)
    return iter(cards)
