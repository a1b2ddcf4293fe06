"""llm-d: the weighted sum of three scores, each from 0 to 1 (its default: queue 2, KV 2, prefix 3).

* queue: the shortest queue among the candidates is 1, the longest 0, linear between; 1 for all
  when they are equal;
* kv: the part of the KV cache that is not in use;
* prefix: the part of the prompt's blocks that is estimated to be held.

The highest sum is chosen, ties at random. A queue is what waits in a replica or on its way there,
or what a peer region holds and was sent.

As published, a metric that could not be read counts as 0, so an unknown replica looks like the
emptiest. Here targets that lack a signal are a tier behind those that lack fewer: they get work
when no better known target is available.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Score, Target
from mesh.core.policies.indexed import Indexed

SCORES_MAX = 8  # of the best, for the receipt


@dataclass(frozen=True, slots=True)
class LlmDOptions:
    """The weights."""

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0

    def __post_init__(self) -> None:
        weights = (self.queue, self.kv, self.prefix)
        if not all(0.0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(f"weights must be 0 or more and one of them more than 0, not {self}")


class Signals(NamedTuple):
    """The signals of all targets, a column each, None where not reported."""

    queue: list[float | None]
    kv: list[float | None]
    blocks: list[int]
    blocks_whole: int

    def terms(self, place: int) -> dict[str, float | None]:
        """The three scores of one target, by name."""
        prefix = self.blocks[place] / self.blocks_whole
        return {"queue": self.queue[place], "kv": self.kv[place], "prefix": prefix}


class LlmD(Indexed):
    """The highest weighted sum of what is known."""

    def __init__(self, dice: Random, blocks_max: int, options: LlmDOptions) -> None:
        super().__init__(dice, blocks_max)
        self._options = options

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The best of the best-known tier."""
        signals = self._signals(request, targets)
        ranks = self._ranks(signals)
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        first = ranks[order[0]]
        best = self._dice.choice([place for place in order if ranks[place] == first])
        terms = signals.terms(best).items()
        shown = ", ".join(f"{name} {_in_words(value)}" for name, value in terms)
        scores = [
            Score(targets[place], None, signals.terms(place), signals.blocks[place])
            for place in order[:SCORES_MAX]
        ]
        reason = f"score {-first[1]:.2f}: {shown}"
        return Choice(targets[best], reason, signals.blocks[best], scores)

    def _signals(self, request: Request, targets: Sequence[Target]) -> Signals:
        depths = self._depths(request, targets)
        return Signals(
            _queue_scores([_queue(target) for target in targets]),
            [_kv_score(target) for target in targets],
            [depths.get(target.name, 0) for target in targets],
            len(request.prompt.hashes) or 1,
        )

    def _ranks(self, signals: Signals) -> list[tuple[int, float]]:
        """Places in the order, the least first: signals that are missing, and the sum negated."""
        weights = self._options
        prefix_each = weights.prefix / signals.blocks_whole
        ranks = []
        for queue, kv, blocks in zip(signals.queue, signals.kv, signals.blocks, strict=True):
            missing, total = 0, prefix_each * blocks
            if queue is not None:
                total += weights.queue * queue
            elif weights.queue:
                missing += 1
            if kv is not None:
                total += weights.kv * kv
            elif weights.kv:
                missing += 1
            ranks.append((missing, -total))
        return ranks


def _queue(target: Target) -> int | None:
    """Requests that wait there; None if not reported."""
    if target.replica is not None:
        return target.replica.pending
    return target.load if target.peer is not None else None


def _queue_scores(queues: list[int | None]) -> list[float | None]:
    known = [queue for queue in queues if queue is not None]
    most, spread = (max(known), max(known) - min(known)) if known else (0, 0)
    if not spread:
        return [None if queue is None else 1.0 for queue in queues]
    return [None if queue is None else (most - queue) / spread for queue in queues]


def _kv_score(target: Target) -> float | None:
    """Part of its KV cache that is free; None if not reported. Of a region: by its digests."""
    if target.replica is not None:
        used = target.replica.heartbeat.kv_used_ratio
        return None if used is None else 1.0 - used
    if target.peer is None:
        return None
    ratios = [digest.kv_used_ratio for digest in target.peer.digests.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    return 1.0 - sum(known) / len(known) if known else None


def _in_words(score: float | None) -> str:
    return "unknown" if score is None else f"{score:.2f}"
