"""The named time profiles, each with the source of its numbers; a number that no source gives is
marked as ours, with the reasoning.

A profile says how long one iteration takes: the only place where seconds come from. An iteration
computes a batch of tokens: one for every decoding sequence, a chunk for every sequence in prefill.
Its time is the weights read once (the floor), the tokens computed, and the attention over their
context. Every term is linear in the context, so the time of k decode iterations in a row has a
closed form (`agents.sim.engine`).
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Publishing(StrEnum):
    """When other requests find the full blocks of a prompt."""

    SCHEDULED = "scheduled"  # when the chunk is planned: vLLM V1
    COMPUTED = "computed"  # after the chunk; of waiting prompts duplicates go last: SGLang


@dataclass(frozen=True, slots=True)
class LongPrefill:
    """Attention of a long chunk, quadratic: paid when tokens × context exceed `threshold`."""

    threshold: int
    per_token_s: float
    per_context_token_s: float
    per_pair_s: float

    def seconds(self, tokens: int, context_tokens: int) -> float:
        """Seconds for one chunk of `tokens` that looks at `context_tokens`, its own included."""
        if tokens * context_tokens <= self.threshold:
            return 0.0
        return (
            self.per_token_s * tokens
            + self.per_context_token_s * context_tokens
            + self.per_pair_s * tokens * context_tokens
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU and model: times in seconds, sizes in tokens.

    `knots` give the seconds of the linear layers at numbers of batched tokens, joined by
    straight lines; below the first knot the time is flat, above the last it rises by
    `token_s` per token.
    """

    name: str
    knots: tuple[tuple[int, float], ...]
    token_s: float
    sequence_s: float  # added for each decoding sequence
    context_s: float  # added for each token of context attended to
    arrival_s: float  # from the request's arrival until the scheduler sees it; not GPU time
    batch_tokens: int  # token budget of one iteration: the prefill chunk
    kv_tokens: int  # memory for KV
    max_seqs: int  # sequences in the running batch
    long_prefill: LongPrefill | None = None
    model: str = ""  # the name that its engine serves; empty: the profile's own
    publishing: Publishing = Publishing.SCHEDULED
    arrival_token_s: float = 0.0  # added to `arrival_s` for each token of the prompt, cached or not

    def __post_init__(self) -> None:
        if not self.knots or self.token_s <= 0 or self.knots[0][1] <= 0:
            raise ValueError(f"profile {self.name}: give a knot and token_s, both above zero")
        if min(self.batch_tokens, self.kv_tokens, self.max_seqs) < 1:
            raise ValueError(f"profile {self.name}: sizes are 1 or more")

    def linear_s(self, tokens: int) -> float:
        """Seconds of the linear layers for a batch of `tokens`."""
        before_tokens, before_s = self.knots[0]
        if tokens <= before_tokens:
            return before_s
        for knot_tokens, knot_s in self.knots[1:]:
            if tokens <= knot_tokens:
                share = (tokens - before_tokens) / (knot_tokens - before_tokens)
                return before_s + share * (knot_s - before_s)
            before_tokens, before_s = knot_tokens, knot_s
        return before_s + self.token_s * (tokens - before_tokens)

    def arriving_s(self, tokens: int) -> float:
        """Seconds that pass before the scheduler sees a prompt, if no other one arrives."""
        return self.arrival_s + self.arrival_token_s * tokens

    def alone_s(self, tokens: int) -> float:
        """Seconds until the first token of a prompt that is alone, with nothing of it cached."""
        seconds, computed = self.arriving_s(tokens), 0
        while computed < tokens:
            chunk = min(self.batch_tokens, tokens - computed)
            computed += chunk
            seconds += self.iteration_s(((chunk, computed),), 0, 0)
        return seconds

    def decode_s(self, sequences: int, context_tokens: int) -> float:
        """Seconds of an iteration that only decodes; contexts are summed over the sequences."""
        return self.iteration_s((), sequences, context_tokens)

    def iteration_s(
        self, chunks: tuple[tuple[int, int], ...], sequences: int, context_tokens: int
    ) -> float:
        """Seconds of one iteration: `chunks` are (tokens, context) in prefill.

        A chunk's context counts its own tokens; `context_tokens` is that of the decoding
        `sequences` together.
        """
        seconds = self.sequence_s * sequences
        tokens = sequences
        for chunk_tokens, chunk_context in chunks:
            tokens += chunk_tokens
            context_tokens += chunk_context
            if self.long_prefill is not None:
                seconds += self.long_prefill.seconds(chunk_tokens, chunk_context)
        return seconds + self.linear_s(tokens) + self.context_s * context_tokens


_MS = 1e-3

# SkyWalker (Xia et al., EuroSys 2026). §2.1: "processing a 512-token prompt" with Llama-3.1-8B
# on an L4 takes "around 300 ms" to the first token. §3.3: 20 to 50 requests are outstanding at
# most, bound by memory. The split is ours: an iteration costs 45 ms whatever is in it
# (the GPU reads 300 GB/s, so 16 GB of weights alone say about 50), a decoding sequence 0.7 ms
# more (66 ms with 30 of them), and 512 tokens fill what is left of 300 ms at 0.5 ms each.
# KV: 24 GB, less the weights and room for activations, at 128 KiB a token is about 38,000
# tokens: 20 requests of 1,900 tokens or 50 of 760, which is the range the paper saw.
L4_LLAMA = Profile(
    name="l4-llama3.1-8b",
    model="meta-llama/Llama-3.1-8B-Instruct",
    knots=((0, 45.0 * _MS),),
    token_s=0.5 * _MS,
    sequence_s=0.2 * _MS,
    context_s=0.0,
    arrival_s=0.0,
    batch_tokens=512,
    kv_tokens=38_000,
    max_seqs=256,
)

# GORGO, table 1: TTFT = 150.72 ms + 0.0938 ms per token (SGLang, Mistral-7B-Instruct-v0.3, a
# node of A100s, 87 WildChat prompts, R² 0.9863). An intercept of 150 ms can't be GPU time: a
# decode iteration of this model on this GPU takes about 11 ms. Preble's published time model
# (benchmarks/exp_configs/model_equations.py) has it: 8.96 ms below 64 tokens in the batch,
# attention 1.86e-4 ms per token of context + 0.159 ms, all over 0.85. So the rest of the
# intercept is paid once per request, before the scheduler sees it, and the slope that GORGO
# measured is split between computing a token and attending to it; from 64 tokens on the sum is
# GORGO's line. Ours: an iteration of up to 8,192 tokens, so that the line holds over the range
# it was fitted in; KV for 400,000 tokens (80 GB, 88% used, 14.5 GB of weights, 128 KiB a token).
_A100_FLOOR_S = (8.96 + 0.159) / 0.85 * _MS
_A100_FLAT_TOKENS = 64
_A100_CONTEXT_S = 1.86e-4 / 0.85 * _MS
_A100_TOKEN_S = 0.0938 * _MS - _A100_CONTEXT_S
A100_MISTRAL = Profile(
    name="a100-mistral-7b",
    model="mistralai/Mistral-7B-Instruct-v0.3",
    knots=((_A100_FLAT_TOKENS, _A100_FLOOR_S),),
    token_s=_A100_TOKEN_S,
    sequence_s=0.0,
    context_s=_A100_CONTEXT_S,
    arrival_s=150.72 * _MS - _A100_FLOOR_S + _A100_FLAT_TOKENS * _A100_TOKEN_S,
    batch_tokens=8192,
    kv_tokens=400_000,
    max_seqs=256,
)

# Preble (Srivatsa et al., ICLR 2025), appendix B profiles Mistral 7B on an A6000 and finds both
# prefill and decode linear; the regression itself is in its published code (same file as
# above), in ms: linear layers 0.10842571·tokens + 4.2098 from 384 tokens, 22 below 192;
# attention 1.86e-4·context + 0.159 (we drop its plateau of 0.32 below 1,024 tokens, which
# differs by less than 0.2 ms); a long chunk of e tokens at context s, when e·s > 1 Mi, adds
# 1.13e-3·e + 1.75e-3·s + 2.19e-6·e·s; the sum over 0.9. Between 192 and 384 tokens the code
# has a parabola that falls below zero before it reaches 384, so we join the ends by a line.
# Chunks of 512 and 198,516 tokens of KV are Preble's own settings.
_A6000 = _MS / 0.9
A6000_MISTRAL = Profile(
    name="a6000-mistral-7b",
    model="mistralai/Mistral-7B-Instruct-v0.3",
    knots=(
        (192, (22.0 + 0.159) * _A6000),
        (384, (0.10842571 * 384 + 4.209777 + 0.159) * _A6000),
    ),
    token_s=0.10842571 * _A6000,
    sequence_s=0.0,
    context_s=1.86e-4 * _A6000,
    arrival_s=0.0,
    batch_tokens=512,
    kv_tokens=198_516,
    max_seqs=256,
    long_prefill=LongPrefill(
        threshold=1024 * 1024,
        per_token_s=1.13e-3 * _A6000,
        per_context_token_s=1.75e-3 * _A6000,
        per_pair_s=2.19e-6 * _A6000,
    ),
)

# An H100 (SXM: 80 GB, 3.35 TB/s, 989 dense bf16 TFLOP/s by its data sheet) with Llama-3.1-8B in
# bf16: 8.03e9 parameters, 16.06 GB, 2 · 8.03e9 FLOP and 128 KiB of KV a token. The arithmetic is
# a roofline and ours, and so are its efficiencies: four fifths of the bandwidth (weights read in
# 6 ms, and one more for launches and the scheduler), 55% of the FLOP/s (29.5 µs a token, 34,000
# tokens/s of prefill). Below 237 tokens an iteration waits for memory, above for arithmetic.
# Attention in long chunks: 4 · 32 layers · 4,096 FLOP a pair at 600 TFLOP/s; it counts a chunk's
# own triangle as a square, 29 ms too much in 270 for a first chunk of 8,192. KV: 90% of the
# memory less weights and 3 GB for activations. It decodes 32 sequences of 1,000 tokens in 8.6 ms.
_H100_BYTES_S = 3.35e12 * 0.8
_H100_FLOAT_S = 989e12 * 0.55
_H100_FLOOR_S = 16.06e9 / _H100_BYTES_S + 1.0 * _MS
_H100_TOKEN_S = 2 * 8.03e9 / _H100_FLOAT_S
H100_LLAMA = Profile(
    name="h100-llama3.1-8b",
    model="meta-llama/Llama-3.1-8B-Instruct",
    knots=((round(_H100_FLOOR_S / _H100_TOKEN_S), _H100_FLOOR_S),),
    token_s=_H100_TOKEN_S,
    sequence_s=0.0,
    context_s=128 * 1024 / _H100_BYTES_S,
    arrival_s=0.0,
    batch_tokens=8192,
    kv_tokens=400_000,
    max_seqs=256,
    long_prefill=LongPrefill(
        threshold=1024 * 1024,
        per_token_s=0.0,
        per_context_token_s=0.0,
        per_pair_s=4 * 32 * 4096 / 600e12,
    ),
)

# "Batch-aware routing", Code 23.2.1: a step takes 40 ms whatever its fill, up to 8 requests, and
# 3 ms more for each prefix that the replica doesn't hold; it holds 12. In our terms a prefix has
# 4,096 tokens (its length says nothing, only 3 ms over it does), a request 16 of its own that are
# free, and the memory has room for 12 prefixes and what eight requests add to them.
_CHAPTER_PREFIX = 4096
_CHAPTER_OWN = 16
_CHAPTER_BATCH = 8
CHAPTER = Profile(
    name="chapter-23.2",
    knots=((_CHAPTER_BATCH * _CHAPTER_OWN, 40.0 * _MS),),
    token_s=3.0 * _MS / _CHAPTER_PREFIX,
    sequence_s=0.0,
    context_s=0.0,
    arrival_s=0.0,
    batch_tokens=_CHAPTER_BATCH * (_CHAPTER_PREFIX + _CHAPTER_OWN),
    kv_tokens=12 * _CHAPTER_PREFIX + _CHAPTER_BATCH * 3 * _CHAPTER_OWN,
    max_seqs=_CHAPTER_BATCH,
)


def on_sglang(profile: Profile) -> Profile:
    """The same GPU and model under SGLang."""
    return replace(profile, name=f"{profile.name}-sglang", publishing=Publishing.COMPUTED)


_OF_GPUS = (L4_LLAMA, A100_MISTRAL, A6000_MISTRAL, H100_LLAMA)
PROFILES: dict[str, Profile] = {
    profile.name: profile for profile in (*_OF_GPUS, CHAPTER, *map(on_sglang, _OF_GPUS))
}
