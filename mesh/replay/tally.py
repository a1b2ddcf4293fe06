"""Every request's end, counted exactly once, for the whole run and per region.

Times are taken over complete answers only: a request that was shed in a millisecond would make
the mesh look quick. Token counts are the engines' own, from `usage`.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mesh.replay.stats import Samples


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"  # 200, and the stream complete
    SHED = "shed"  # refused with 429 or 503: the mesh said no, as it may
    FAILED = "failed"  # everything else


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine says an answer cost; `cached_tokens` None where it didn't say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's end. `reason` says why, where it is not OK; times are seconds."""

    outcome: Outcome
    reason: str = ""
    late_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    gaps_s: Sequence[float] = ()
    usage: Usage | None = None


@dataclass(slots=True)
class Tokens:
    """Sums over answers that reported usage, beside what was asked of those same requests."""

    answers: int = 0
    prompt_asked: int = 0
    prompt: int = 0
    output: int = 0
    cached: int = 0
    cached_named: int = 0  # answers that named cached tokens at all


class Tally:
    """Counts and samples of one group of requests."""

    def __init__(self, rng: random.Random) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.failures: Counter[str] = Counter()
        self.tokens = Tokens()
        self.late_s = Samples(rng)
        self.ttft_s = Samples(rng)
        self.e2e_s = Samples(rng)
        self.itl_s = Samples(rng)

    @property
    def requests(self) -> int:
        """All requests that came to an end, whatever end."""
        return self.outcomes.total()

    def add(self, answer: Answer, prompt_tokens_asked: int) -> None:
        """Count one request's end."""
        self.outcomes[answer.outcome] += 1
        if answer.late_s is not None:
            self.late_s.add(answer.late_s)
        if answer.outcome is Outcome.FAILED:
            self.failures[answer.reason] += 1
        if answer.outcome is Outcome.OK:
            self._add_times(answer)
        if answer.usage:
            self._add_tokens(answer.usage, prompt_tokens_asked)

    def _add_times(self, answer: Answer) -> None:
        if answer.ttft_s is not None:
            self.ttft_s.add(answer.ttft_s)
        if answer.e2e_s is not None:
            self.e2e_s.add(answer.e2e_s)
        self.itl_s.extend(answer.gaps_s)

    def _add_tokens(self, usage: Usage, prompt_tokens_asked: int) -> None:
        self.tokens.answers += 1
        self.tokens.prompt_asked += prompt_tokens_asked
        self.tokens.prompt += usage.prompt_tokens
        self.tokens.output += usage.output_tokens
        if usage.cached_tokens is not None:
            self.tokens.cached += usage.cached_tokens
            self.tokens.cached_named += 1


class Ledger:
    """The whole run's tally and each region's."""

    def __init__(self, regions: Iterable[str], rng: random.Random) -> None:
        self.total = Tally(rng)
        self.regions = {region: Tally(rng) for region in regions}

    def add(self, region: str, answer: Answer, prompt_tokens_asked: int) -> None:
        """Count one request's end, in its region and in the whole."""
        self.regions[region].add(answer, prompt_tokens_asked)
        self.total.add(answer, prompt_tokens_asked)
