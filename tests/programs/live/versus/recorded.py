"""The requests of a run: a recorded trace, or a generated one written in a trace's form.

Both the live systems and the twin read the same Mooncake file, give each conversation the same
region and send each request at the same time. Without a recording, conversations of `mesh.sim` are
written down as such a file: users in turn ask, read the answer and ask again, and every prompt
holds the whole conversation before it, as in Mooncake's own (12,035 tokens of prompt and 343 of
answer in the mean: Qin et al., FAST 2025).
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from agents.sim.kv_cache import BLOCK_TOKENS
from agents.sim.profiles import Profile
from mesh.replay.client import request_body
from mesh.replay.prompt_text import Prompts
from mesh.replay.schedule import Departure, departures
from mesh.replay.trace_formats import MOONCAKE_BLOCK_TOKENS, load_trace
from mesh.sim.workload import RequestNode, Workload, block_keys
from mesh.sim.workloads.arrivals import LoadOptions
from mesh.sim.workloads.content import Lengths
from mesh.sim.workloads.skywalker import ChatHabits, conversations
from mesh.sim.workloads.traces import from_trace
from schemas.ids import RegionId
from tests.programs.studies.tables.client_view import PATIENCE_S, SLO_FIXED_S, SLO_PREFILLS

FORMAT = "mooncake"
WEIGHTS: Mapping[str, float] = {"us": 2.0, "eu": 1.0, "ap": 1.0}
SEED = 0
HABITS = ChatHabits(
    turns=3.0,
    conversations=2.0,
    question=Lengths(5_500, 8_000, least=32, most=40_000),
    answer=Lengths(343, 300, least=16, most=1_024),
    opening=Lengths(1_500, 1_000, least=200, most=4_000),
    world_share=0.3,
    region_share=0.2,
    own_share=0.3,
)
RATE_PER_S = 3.2  # of Mooncake's conversations
READS_S, READS_TOKEN_S = (
    8.0,
    0.02,
)  # from a question to the next: fixed, and per token of the answer


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is played: `requests` of a file, in Mooncake's form, `speed` times as fast."""

    path: Path
    requests: int
    speed: float = 1.0

    def plan(self) -> tuple[Departure, ...]:
        """When each request leaves, and from which region."""
        return departures(
            load_trace(self.path, FORMAT),
            WEIGHTS,
            assign="hash",
            speed=self.speed,
            limit=self.requests,
            rng=random.Random(SEED),
        )

    def bodies(self, model: str) -> list[bytes]:
        """Each request's body, in the order of the plan."""
        prompts = Prompts(MOONCAKE_BLOCK_TOKENS)
        return [
            request_body(model, prompts.text(one.request, one.number), one.request.output_tokens)
            for one in self.plan()
        ]

    def workload(self) -> Workload:
        """The same for the twin, in the same order."""
        return from_trace(
            self.path,
            FORMAT,
            regions={RegionId(region): weight for region, weight in WEIGHTS.items()},
            seed=SEED,
            limit=self.requests,
            speed=self.speed,
        )


def in_time_s(profile: Profile, prompt_tokens: int) -> float:
    """Until when a first token is in time, as the studies judge it."""
    return min(PATIENCE_S, SLO_FIXED_S + SLO_PREFILLS * profile.alone_s(prompt_tokens))


def write_conversations(path: Path, requests: int, seed: int = SEED) -> Path:
    """Write so many generated requests to a file in Mooncake's form."""
    rows = sorted(_rows(requests, seed), key=lambda row: row[0])[:requests]
    numbers: dict[object, int] = {}
    with path.open("wb") as file:
        for at_s, node in rows:
            file.write(orjson.dumps(_line(at_s, node, numbers)) + b"\n")
    return path


def _rows(requests: int, seed: int) -> Iterator[tuple[float, RequestNode]]:
    """Each request of conversations that begin in a time long enough for so many."""
    load = LoadOptions(
        name="conversations",
        clients={RegionId(region): round(10 * weight) for region, weight in WEIGHTS.items()},
        seed=seed,
        duration_s=2.0 * requests / RATE_PER_S,
        rate_per_s=RATE_PER_S,
    )
    for arrival in conversations(load, HABITS).arrivals:
        at_s, node = arrival.at_s, arrival.node
        yield at_s, node
        while node.children:
            at_s += READS_S + READS_TOKEN_S * node.answer.tokens
            [node] = node.children
            yield at_s, node


def _line(at_s: float, node: RequestNode, numbers: dict[object, int]) -> dict[str, object]:
    """`numbers`: of the blocks so far, by their content; extended."""
    return {
        "timestamp": round(1000 * at_s),
        "input_length": node.prompt_tokens,
        "output_length": node.answer.tokens,
        "hash_ids": [numbers.setdefault(block, len(numbers)) for block in _blocks(node)],
    }


def _blocks(node: RequestNode) -> Iterator[object]:
    """What each block of the prompt holds and what precedes it; the last may be shorter."""
    keys = block_keys(node.prompt)
    per_block = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
    yield from keys[per_block - 1 :: per_block]
    if rest := node.prompt_tokens % MOONCAKE_BLOCK_TOKENS:
        yield node.session, node.prompt_tokens, rest
