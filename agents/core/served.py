"""What the answers of late say about this replica: decode rate, prefix hits, size.

A median for the rate, because one answer cut short says little and must move little; decayed
sums for the ratio, so that a replica whose working set changed is seen as it is now.
"""

from collections import deque
from statistics import median

from agents.core.reading import Usage

RATES_MAX = 32
RATE_TOKENS_MIN = 8  # the tokens of a shorter answer may arrive in one burst
FORGETTING = 0.99  # a memory of about a hundred answers


class Served:
    """Fed with every finished answer."""

    __slots__ = ("_cached", "_counted", "_prompt", "_rate", "_rates", "_tokens")

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=RATES_MAX)
        self._rate: float | None = None
        self._prompt = self._cached = 0.0
        self._tokens = self._counted = 0.0

    def add(self, usage: Usage, decode_s: float | None) -> None:
        """`decode_s`: first to last token of a streamed answer, None when not observable."""
        if usage.prompt_tokens >= 0 and usage.cached_tokens >= 0:
            self._prompt = FORGETTING * self._prompt + usage.prompt_tokens
            self._cached = FORGETTING * self._cached + min(usage.cached_tokens, usage.prompt_tokens)
        if usage.prompt_tokens >= 0 and usage.completion_tokens >= 0:
            size = usage.prompt_tokens + usage.completion_tokens
            self._tokens = FORGETTING * self._tokens + size
            self._counted = FORGETTING * self._counted + 1.0
        if decode_s is not None and decode_s > 0.0 and usage.completion_tokens >= RATE_TOKENS_MIN:
            self._rates.append((usage.completion_tokens - 1) / decode_s)
            self._rate = median(self._rates)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of one running request."""
        return self._rate

    @property
    def prefix_hit_ratio(self) -> float | None:
        return self._cached / self._prompt if self._prompt > 0.0 else None

    @property
    def tokens_per_answer(self) -> float | None:
        """Prompt and completion tokens of a typical answer: what it may hold of the KV cache."""
        return self._tokens / self._counted if self._counted > 0.0 else None
