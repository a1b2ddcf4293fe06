"""Batch-aware: fill batches instead of spreading requests ("Batch-aware routing", 23.2, 2-4).

A GPU step costs the same however full its batch is. So:

* *affinity*: the holder of most of the prompt gets it at once, unless its backlog is more than
  `backlog_max` batches;
* *two choices*: otherwise the less occupied of two targets taken at random, occupancy being the
  requests in it and on their way against the most that its batch takes, or its KV cache's use if
  that is nearer to full. A target of unknown occupancy comes after the other;
* *bounded fill wait*: a request whose pick is idle waits for others, until it is `fill_wait_s` old;
  when it goes, requests held behind it go along, as far as they fit into one batch.

In the chapter the replica waits. Engines with continuous batching start at once, so the router
waits: it holds the oldest and decides again at the next heartbeat, arrival or tick; a pick that
runs by then takes it without waiting. Requests behind the oldest are held up for as long.

Replicas come before peers, as everywhere; nothing waits to fill a peer's batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Score, Target
from mesh.core.policies.indexed import Indexed, part
from mesh.core.policies.power_of_two import sample_two
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.ids import ModelId


@dataclass(frozen=True, slots=True)
class BatchAwareOptions:
    """`fill_wait_s` from arrival; `backlog_max` in batches; `affinity`: part of the prompt held
    from which on the holder is preferred."""

    fill_wait_s: float = 0.025  # as in the chapter's simulation (Code 23.2.1)
    backlog_max: float = 1.0
    affinity: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.fill_wait_s < math.inf:
            raise ValueError(f"fill_wait_s must be 0 or more, not {self.fill_wait_s}")
        if not self.backlog_max > 0.0:
            raise ValueError(f"backlog_max must be more than 0, not {self.backlog_max}")
        if not 0.0 < self.affinity <= 1.0:
            raise ValueError(f"affinity is a part of one, more than 0, not {self.affinity}")


class BatchAware(Indexed):
    """Affinity, two choices on occupancy, and a short wait before an idle replica is started."""

    joint: ClassVar[bool] = True

    def __init__(self, dice: Random, blocks_max: int, options: BatchAwareOptions) -> None:
        super().__init__(dice, blocks_max)
        self._options = options
        self._started: tuple[str, float] | None = None  # the last batch: where, and when

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The holder, the batch that is being filled, one of two, or wait."""
        local = [target for target in targets if target.kind is CandidateKind.REPLICA]
        pool = local or targets
        choice = self._by_affinity(request, pool) or self._along(request, pool, now)
        return choice or self._of_two(request, pool, now)

    def forget(self, spot: Destination) -> None:
        super().forget(spot)
        if self._started is not None and self._started[0] == spot.name:
            self._started = None

    def _by_affinity(self, request: Request, pool: Sequence[Target]) -> Choice | None:
        holders, blocks = self._holders(request, pool)
        ratio = part(blocks, request)
        if ratio < self._options.affinity:
            return None
        free = [target for target in holders if not self._is_behind(target, request.model)]
        if not free:
            return None
        target = min(self._dice.sample(free, len(free)), key=lambda one: _rank(one, request.model))
        return Choice(target, f"holds {ratio:.0%} of the prompt", blocks)

    def _is_behind(self, target: Target, model: ModelId) -> bool:
        """Whether its backlog is too long to wait for what it holds."""
        filled = occupancy(target, model)
        if filled is not None:
            return filled > self._options.backlog_max
        return target.replica is not None and bool(target.replica.pending)

    def _along(self, request: Request, pool: Sequence[Target], now: float) -> Choice | None:
        """The rest of a batch whose first request went at this very moment."""
        if self._started is None or self._started[1] != now:
            return None
        for target in pool:
            if target.name == self._started[0] and target.kind is CandidateKind.REPLICA:
                filled = occupancy(target, request.model)
                if filled is not None and filled < 1.0:
                    reason = f"goes along: {filled:.0%} of a batch"
                    return Choice(target, reason, self._held_by(request, target))
        return None

    def _of_two(self, request: Request, pool: Sequence[Target], now: float) -> Choice:
        two = sample_two(pool, self._dice)
        target = min(two, key=lambda one: _rank(one, request.model))
        filled = [occupancy(one, request.model) for one in two]
        scores = [Score(one, terms={"occupancy": it}) for one, it in zip(two, filled, strict=True)]
        if target.load == 0 and target.kind is CandidateKind.REPLICA:
            waited_s = now - request.arrived_at
            if not request.hops and waited_s < self._options.fill_wait_s:
                return Choice(None, "waits for others: its pick is idle", scores=scores)
            self._started = target.name, now
        shown = " and ".join("unknown" if it is None else f"{it:.0%}" for it in filled)
        reason = f"less occupied of two: {shown} of a batch"
        return Choice(target, reason, self._held_by(request, target), scores)


def occupancy(target: Target, model: ModelId) -> float | None:
    """How full it is: 1.0 when its batch or KV cache is full, more with a queue.

    Of a region: the part of its replicas that is busy. None if unknown.
    """
    if target.replica is not None:
        return _of_replica(target.replica)
    if target.peer is None or not (ready := target.peer.ready(model)):
        return None
    return (ready - target.peer.free(model) + len(target.peer.forwarded_at)) / ready


def _of_replica(replica: Replica) -> float | None:
    beat = replica.heartbeat
    parts = []
    if beat.batch_max:
        parts.append(replica.load / beat.batch_max)
    if beat.kv_used_ratio is not None and beat.kv_capacity_tokens:
        parts.append(beat.kv_used_ratio + replica.on_the_way.tokens / beat.kv_capacity_tokens)
    return max(parts, default=None)


def _rank(target: Target, model: ModelId) -> tuple[bool, float, int]:
    filled = occupancy(target, model)
    return filled is None, filled or 0.0, target.load
