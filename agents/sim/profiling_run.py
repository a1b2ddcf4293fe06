"""A profiling run of a simulated engine: the times of batches of many compositions.

HyGen trains its predictor "by systematically profiling target hardware across diverse batch
compositions" (Sun et al., 2025, §4.2). This is that grid: numbers of decoding sequences, their
contexts, tokens of prefill, the requests they belong to, and how far those are. Tokens rise in even
steps: doublings put most of the grid below a hundred tokens, where an iteration waits for memory,
and what is fitted there is 5 % off where engines work (with even steps 1 to 2 %). Compositions that
exceed an iteration's tokens, or the memory, are left out.
"""

from collections.abc import Iterator
from typing import NamedTuple

from agents.core.latency_predictor import BatchLoad, Sample
from agents.sim.profiles import Profile

DECODES = (0, 1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)  # of a decoding sequence
STEPS = 16  # of the tokens of prefill, up to what the iteration may have
PREFILLS = (1, 2)
COMPUTED = (0, 1024, 4096, 16_384)  # of the first prompt, before its chunk


class Composition(NamedTuple):
    """What one iteration computes; `chunks` are (tokens, context with them)."""

    chunks: tuple[tuple[int, int], ...]
    decodes: int
    context_tokens: int  # of the decoding sequences together

    @property
    def load(self) -> BatchLoad:
        """As the latency predictor sees it."""
        return BatchLoad(
            sum(tokens for tokens, _ in self.chunks),
            self.context_tokens + sum(context for _, context in self.chunks),
            len(self.chunks),
            self.decodes,
            sum(tokens * context for tokens, context in self.chunks),
        )


def compositions(profile: Profile) -> Iterator[Composition]:
    """The grid within this profile's limits."""
    for decodes in DECODES:
        if decodes > min(profile.max_seqs, profile.batch_tokens - 1):
            continue
        for context in CONTEXTS if decodes else (0,):
            if decodes * context > profile.kv_tokens:
                continue
            if decodes:
                yield Composition((), decodes, decodes * context)
            for chunks in _chunkings(profile.batch_tokens - decodes):
                yield Composition(chunks, decodes, decodes * context)


def profiling_run(profile: Profile) -> list[Sample]:
    """The grid, timed by the profile's model of time."""
    return [Sample(each.load, profile.iteration_s(*each)) for each in compositions(profile)]


def _chunkings(tokens_max: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for step in range(1, STEPS + 1):
        for prefills in PREFILLS:
            each = tokens_max * step // STEPS // prefills
            if each < 1:
                continue
            for computed in COMPUTED:
                # One prompt is that far and the other begins, as where a chunk ended a prefill.
                yield ((each, computed + each), *[(each, each)] * (prefills - 1))
