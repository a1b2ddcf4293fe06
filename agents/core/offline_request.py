"""An offline request as `OfflineAdmission` knows it, and what may be decided about one."""

from collections.abc import Hashable
from typing import NamedTuple

from agents.core.latency_predictor import BatchLoad


class OfflineRequest(NamedTuple):
    """One request from the bus. `kv_tokens`: of its prompt, those that may be cached included.

    `answer_tokens_max`: 0 of one that generates nothing.
    """

    key: Hashable
    prompt_tokens: int  # to be computed
    answer_tokens_max: int
    kv_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of the memory, at its end."""
        return max(self.kv_tokens, self.prompt_tokens) + self.answer_tokens_max

    def beside(self, load: BatchLoad) -> BatchLoad:
        """That iteration, with the last token of its answer if it generates any."""
        return load.with_decode(self.tokens) if self.answer_tokens_max else load


class Admit(NamedTuple):
    """Send it to the engine now."""

    key: Hashable


class GiveBack(NamedTuple):
    """It has not been sent to the engine, and won't be."""

    key: Hashable


class Abort(NamedTuple):
    """Abort it at the engine; report `ended` when it has left."""

    key: Hashable


Decision = Admit | GiveBack | Abort
