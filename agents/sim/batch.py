"""The running batch: who is in it, and the KV memory they hold.

Rules, as in vLLM's scheduler: sequences that run go before those that wait; prefill is cut
into chunks so that decoding goes on beside it; a sequence is admitted only when its whole
prompt fits and everyone running can still grow by a block; when memory runs out all the same,
the newest sequence is preempted and computed again later (what it published may
still be cached then). Time is not known here: `agents.sim.engine` has it.

Full blocks of a chunk are published when the iteration is planned, as vLLM V1 does
(`KVCacheManager.allocate_slots`: the blocks of a step are in the prefix cache before it runs, so a
prompt admitted to the same step finds them), or after it, as SGLang's radix cache does. Blocks of
answers are published when they are full. A chunk that is aborted while it runs leaves its blocks in
the cache: the engine computes the iteration to its end. Source: Orca (OSDI 2022) for
iteration-level batching, Sarathi-Serve (OSDI 2024) for chunks; the code of vLLM V1 (main, 2026) and
SGLang (`srt/managers/schedule_policy`, main, 2026).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.sim.events import SimRequest
from agents.sim.kv_cache import KvCache
from agents.sim.profiles import Publishing


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request on its way through the engine."""

    request: SimRequest
    ready_at: float
    length: int = 0  # tokens known: prompt and answer so far
    target: int = 0  # tokens to compute before the next one comes out
    computed: int = 0  # tokens whose KV is in memory
    blocks: int = 0  # blocks owned, shared ones included
    filled: int = 0  # full blocks published, or found as copies; of a planned chunk too
    held: list[int] = field(default_factory=list)  # keys of the shared ones
    cached_tokens: int | None = None  # hits at its first admission

    def __post_init__(self) -> None:
        self.length = self.request.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens still to come out."""
        return self.request.total_tokens - self.length


Chunk = tuple[SequenceState, int]


class EngineInternals(NamedTuple):
    """An engine's inner state at one moment; nobody may change the sequences.

    `rounds_ahead`: decode iterations that are over and not counted in the sequences yet.
    `prefilling`: with the tokens that are left to compute after the running iteration.
    """

    iteration_left_s: float
    rounds_ahead: int
    prefilling: Sequence[Chunk]
    decoding: Sequence[SequenceState]
    queued: Sequence[SequenceState]  # in the order in which they will be admitted
    available_blocks: int


class Batch:
    """Sequences in prefill and in decode, oldest first, over one KV cache."""

    def __init__(
        self,
        cache: KvCache,
        block_tokens: int,
        max_seqs: int,
        publishing: Publishing = Publishing.SCHEDULED,
    ) -> None:
        self.cache = cache
        self.decoding: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self._block_tokens = block_tokens
        self._max_seqs = max_seqs
        self._publishing = publishing

    @property
    def size(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def context_tokens(self) -> int:
        """What the next decode iteration attends to, over all decoding sequences."""
        return sum(seq.length for seq in self.decoding)

    def admit(self, seq: SequenceState) -> bool:
        """Take a waiting sequence in, with what is cached of it. False if it must wait."""
        if self.size >= self._max_seqs:
            return False
        # At least one token is computed: the last one's output is the next token.
        cacheable = (seq.length - 1) // self._block_tokens
        spare = self.size + 1 if self.size else 0
        blocks = self._blocks_of(seq.length)
        held = self.cache.reserve(seq.request.keys[:cacheable], blocks, spare=spare)
        if held is None:
            return False
        seq.held, seq.blocks, seq.filled = held, blocks, len(held)
        seq.computed = len(held) * self._block_tokens
        seq.target = seq.length
        if seq.cached_tokens is None:
            seq.cached_tokens = seq.computed
        self.prefilling.append(seq)
        return True

    def chunk(self, seq: SequenceState, budget: int) -> Chunk:
        """Plan the next chunk of a sequence in prefill, within `budget` tokens."""
        tokens = min(budget, seq.target - seq.computed)
        if self._publishing is Publishing.SCHEDULED:
            self._publish(seq, seq.computed + tokens)
        return seq, tokens

    def prefill(self, seq: SequenceState, tokens: int) -> bool:
        """Account for a computed chunk. True when that ended the prefill: one token is out."""
        seq.computed += tokens
        self._publish(seq, seq.computed)
        if seq.computed < seq.target:
            return False
        seq.length += 1
        self.prefilling.remove(seq)
        self.decoding.append(seq)
        return True

    def decode(self, rounds: int) -> None:
        """Account for `rounds` iterations of every decoding sequence: a token each."""
        # Blocks fill and are taken in the order of iterations, not of sequences: which of two
        # equal blocks is shared and what is evicted must not depend on how far one call goes.
        for after, position in self._block_turns(rounds):
            seq = self.decoding[position]
            computed = seq.computed + after
            blocks = self._blocks_of(computed)
            self.cache.take(blocks - seq.blocks)
            seq.blocks = blocks
            self._publish(seq, computed)
        for seq in self.decoding:
            seq.length += rounds
            seq.computed += rounds

    def _block_turns(self, rounds: int) -> list[tuple[int, int]]:
        block_tokens = self._block_tokens
        turns: list[tuple[int, int]] = []
        for position, seq in enumerate(self.decoding):
            used = seq.computed % block_tokens
            if used == 0:
                turns.append((1, position))
            for filled in range(block_tokens - used, rounds + 1, block_tokens):
                turns.append((filled, position))
                if filled < rounds:
                    turns.append((filled + 1, position))
        turns.sort()
        return turns

    def rounds_that_fit(self, most: int) -> int:
        """For how many decode iterations, up to `most`, the memory is enough. May be 0."""
        available = self.cache.available
        if self.growth(most) <= available:
            return most
        return bisect_right(range(1, most), available, key=self.growth)

    def growth(self, rounds: int) -> int:
        """Blocks that so many decode iterations take."""
        block_tokens = self._block_tokens
        # Computed at every scrape, for the whole batch: a list is summed faster than a generator.
        return sum(
            [-(-(seq.computed + rounds) // block_tokens) - seq.blocks for seq in self.decoding]
        )

    def newest(self) -> SequenceState:
        """The one to preempt when memory runs out."""
        return self.prefilling[-1] if self.prefilling else self.decoding[-1]

    def remove(self, seq: SequenceState) -> None:
        """Take a sequence out and give its memory back; what it published stays cached."""
        (self.decoding if seq.computed >= seq.target else self.prefilling).remove(seq)
        self.cache.release(seq.held, seq.blocks - len(seq.held))
        seq.held, seq.blocks, seq.filled, seq.computed, seq.target = [], 0, 0, 0, 0

    def _publish(self, seq: SequenceState, computed: int) -> None:
        full = computed // self._block_tokens
        if full > seq.filled:
            seq.held += self.cache.publish(seq.request.keys[seq.filled : full])
            seq.filled = full

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)
