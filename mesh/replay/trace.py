"""Recorded traces: when requests came, how long they were, what they shared.

A trace is reduced to what every published kind has: arrival time, prompt and answer length in
tokens, and the ids of the prompt's leading blocks, where two prompts that begin with the same
ids begin with the same tokens. Each published format is one module in `mesh.replay.formats`.
Times stay as they were recorded; `schedule` makes departures of them, a simulator may do
otherwise.

Not done: a general column mapping by configuration. Formats differ in meaning (block size,
clock, session-local ids), not in column names, so a function says it better.
"""

from dataclasses import dataclass, replace


class TraceError(ValueError):
    """The trace can't be used; the message names the line and says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `blocks` may cover less than the prompt: the rest is its own.

    `session`: the recorder's name for the conversation; empty where it gave none.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests in order of arrival."""

    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def scaled(self, factor: float) -> "Trace":
        """The same trace with prompts and answers `factor` times as long, for small engines.

        Blocks shrink with the prompts, so who shares how many leading blocks with whom stays
        exactly as recorded.
        """
        if factor == 1:
            return self
        block_tokens = max(1, round(self.block_tokens * factor))
        shrink = _Scale(self.block_tokens, block_tokens, factor)
        return Trace(block_tokens, tuple(shrink(request) for request in self.requests))


@dataclass(frozen=True, slots=True)
class _Scale:
    block_from: int
    block_to: int
    factor: float

    def __call__(self, request: TraceRequest) -> TraceRequest:
        whole = min(len(request.blocks), request.input_tokens // self.block_from)
        tail = request.input_tokens - whole * self.block_from
        return replace(
            request,
            input_tokens=max(1, whole * self.block_to + round(tail * self.factor)),
            output_tokens=max(1, round(request.output_tokens * self.factor)),
        )
