"""How long one iteration of an engine takes: the only place where seconds come from.

An engine runs iteration after iteration; each computes a batch of tokens (one for every
decoding sequence, a chunk for every sequence still in prefill). Its time is the weights read
once (the floor), the tokens computed, and the attention over the context they look at. Every
term is linear in the context, so the time of k decode iterations in a row has a closed form
(`agents.sim.stretch`).

Rejected: a table of measured batch times per GPU. Published numbers are sparse, and an
interpolated table hides which of them is a measurement and which is a guess.
"""

from dataclasses import dataclass


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
