"""What goes into a simulated engine and what comes out of a step.

All times are in the engine's own seconds: the driver maps them to its clock, or is the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class NeverFits(ValueError):
    """The request can't run here even alone: prompt and answer exceed the KV memory."""


class QueueFull(Exception):
    """The waiting queue is at its limit: place the request elsewhere or later."""


class DuplicateId(ValueError):
    """A request with this id is still in the engine."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One generation. The engine has the answer's length beforehand and must not use it.

    `keys` are the chained hashes of the full blocks of prompt and answer, in order
    (`agents.sim.kv_cache`). They may end early: blocks without a key are never cached.
    `offline`: nobody waits for it. This engine runs it like any other.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int] = ()
    offline: bool = False
    generates: bool = True  # else its one output token only ends the computation of its prompt

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("prompt_tokens and output_tokens are 1 or more")

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """Prefill is over and one token is out; `cached_tokens` of the prompt were not computed."""

    at: float
    request_id: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """Each of `request_ids` got `tokens` more tokens, the last at `at`, `gap_s` apart."""

    at: float
    request_ids: tuple[int, ...]
    tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """Memory ran out: the request waits again and its prefill will be computed anew."""

    at: float
    request_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is out and the memory is given back. Comes after that token's event."""

    at: float
    request_id: int


SimEvent = PrefillFinished | Decoded | Preempted | Finished


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened since the last step, in order, and when to step next without a call before."""

    events: list[SimEvent]
    wake_at: float | None


class EngineStats(NamedTuple):
    """The engine as its metrics page shows it; counters run from the start."""

    running: int
    waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    queried_tokens: int  # prompt tokens looked up in the prefix cache
    hit_tokens: int
    finished: int
    aborted: int

    @property
    def kv_utilization(self) -> float:
        """Share of the KV memory held by running sequences, 0 to 1."""
        return self.kv_used_tokens / self.kv_capacity_tokens

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens found in the prefix cache, of those looked up."""
        return self.hit_tokens / max(self.queried_tokens, 1)
