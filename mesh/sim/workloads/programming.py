"""Program generation: examples that all prompts share, a problem, and several tries at once.

All requests begin with the same demonstration; then comes the problem's text. Several candidates
are asked for at the same moment with the very same prompt, and the best is kept. Answers are
long for Preble's workloads and vary most.

Source: Preble (ICLR 2025), Table 1, on APPS: prompts of 3,871 tokens (spread 1,656), answers of 190
(343), 97% shared, a key portion of 78%. The demonstration is the key portion wherever the problem
is shorter: 2,900 tokens, and problems of 971 with all the spread. APPS has 10,000 problems; their
popularity is Zipf's. Ours: eight candidates (Preble says "several").
"""

from collections.abc import Iterator

from mesh.sim.workload import Node, Workload
from mesh.sim.workloads.chances import Lengths, Zipf
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 40, RegionId("eu"): 30, RegionId("ap"): 30}
DURATION_S = 600.0
RATE_PER_S = 4.0
DEMONSTRATION_TOKENS = 2900
PROBLEMS = 10_000
PROBLEM = Lengths(971, 1656, least=60, most=20_000)
ANSWER = Lengths(190, 343, least=8, most=2048)
CANDIDATES = 8
ZIPF = 1.1


def programming(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    candidates: int = CANDIDATES,
    zipf: float = ZIPF,
) -> Workload:
    """Open loop: each arrival asks for all `candidates` of a problem at the same moment."""
    if candidates < 1:
        raise ValueError(f"candidates must be 1 or more, got {candidates}")
    popularity = Zipf(PROBLEMS, zipf)

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        return tries(popularity, candidates, seed, region, number)

    pace = Pace(
        given(duration_s, DURATION_S), given(rate_per_s, RATE_PER_S), trees_at_once=candidates
    )
    return workload(
        "programming",
        given(clients, CLIENTS),
        trees,
        pace,
        seed=seed,
        candidates=candidates,
        zipf=zipf,
    )


def tries(
    popularity: Zipf, candidates: int, seed: int, region: RegionId, client: int
) -> Iterator[Node]:
    """A client's requests, without end, `candidates` for a problem in a row."""
    rng = seeded(seed, "programming", region, client)
    demonstration = segment(DEMONSTRATION_TOKENS, "programming", "demonstration")
    number = 0
    while True:
        rank = popularity.draw(rng)
        tokens = PROBLEM.of_rank(rank)
        prompt = (demonstration, segment(tokens, "programming", "problem", rank, tokens))
        job = segment_id(seed, "programming", region, client, number)
        for candidate in range(candidates):
            answer = segment(ANSWER.draw(rng), job, "answer", candidate)
            yield Node(prompt=prompt, answer=answer, session=job)
        number += 1
