"""GORGO: least of round trip + residual prefill + queue wait, over replicas and peers together.

    cost = RTT + t_p · (L_p - L_hit) + q̂ · t_p · (tokens queued and running)      (GORGO 3.4)

Every candidate has all three terms. In the authors' code, unlike their paper, a peer has no queue
term, so a busy peer attracts the requests of all its neighbours, and peers without the prefix are
ignored when one has it. t_p is each target's own (section 8: fleets are mixed), the paper's
constant where it is not reported.

A peer reports how many requests wait, not how many tokens: held ones count as long as those that
this router has seen, running ones fill the reported part of a KV cache as large as the ones here. A
target of unknown round trip comes after all others: no constant fits a town and a continent.

`gorgo-proxy` is this policy at a router that serves all regions: its targets are all replicas, each
at its round trip; the code is the same. `gorgo-tuned` learns the weights (3.4 leaves t_p and q̂
"tunable at runtime", section 8 proposes to tune them by the observed TTFT) by a linear fit, TTFT =
rtt·w₁ + prefill·w₂ + queue·w₃ + base, with recursive least squares and forgetting; a gradient step
would be slow, because the terms differ in size by two orders and rise together. The base is the
same for all targets. Each error is clipped to a few times the usual one, as TTFT has a long tail;
each weight stays in its range; and forgetting stops where the terms have not varied for long.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from random import Random
from typing import ClassVar, NamedTuple, Protocol

from mesh.core.model.request import Request
from mesh.core.policies.base import (
    Choice,
    Destination,
    Layered,
    LazyScores,
    Policy,
    Score,
    Target,
    prefill_s_per_token,
)
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.ids import ModelId

# In §2.4's example 6,500 running tokens delay by 300 ms and 4,200 queued ones by 195.75 ms: both
# are half of what Table 1's 0.0938 ms a token makes of them.
QUEUE_WEIGHT = 0.5

FORGETTING = 0.999  # an observation counts half after 700 more
COVARIANCE_START = 10.0  # of an unknown weight, relative to errors of 1 s²
COVARIANCE_MAX = 10.0  # in sum; beyond it nothing is forgotten
ERROR_WEIGHT = 0.05  # of a new error in the running average of their sizes
ERRORS_MAX = 4.0  # an error counts as this many usual ones at most


class Terms(NamedTuple):
    """Of one placement, in seconds, unweighted; as weights, factors of them."""

    rtt_s: float
    prefill_s: float
    queue_s: float

    def sum(self, weights: "Terms") -> float:
        """Of the terms, each weighed."""
        return (
            self.rtt_s * weights.rtt_s
            + self.prefill_s * weights.prefill_s
            + self.queue_s * weights.queue_s
        )

    def times(self, weights: "Terms") -> "Terms":
        """Each term weighed."""
        return Terms(
            self.rtt_s * weights.rtt_s,
            self.prefill_s * weights.prefill_s,
            self.queue_s * weights.queue_s,
        )


AS_WRITTEN = Terms(1.0, 1.0, QUEUE_WEIGHT)


@dataclass(frozen=True, slots=True)
class GorgoOptions:
    """`queue_weight`: q̂; the authors' code has 1 (`pkg/config/constants.go`), older states 0.5."""

    queue_weight: float = QUEUE_WEIGHT

    def __post_init__(self) -> None:
        if not 0.0 <= self.queue_weight < math.inf:
            raise ValueError(f"queue_weight must be 0 or more, not {self.queue_weight}")

    def weights(self) -> "FixedWeights":
        """As factors of the terms."""
        return FixedWeights(AS_WRITTEN._replace(queue_s=self.queue_weight))


RANGES = ((0.5, 3.0), (0.2, 5.0), (0.0, 5.0), (0.0, 5.0))  # rtt, prefill, queue, base in seconds


class GorgoWeights(Protocol):
    """Factors of the terms."""

    @property
    def present(self) -> Terms:
        """The ones to weigh with now."""
        ...

    def learn(self, terms: Terms, ttft_s: float) -> None:
        """A placement with these terms, before weighing, had this TTFT."""
        ...


class FixedWeights:
    """As the paper sets them."""

    def __init__(self, weights: Terms = AS_WRITTEN) -> None:
        self.present = weights

    def learn(self, terms: Terms, ttft_s: float) -> None:
        """Nothing to learn."""


class TunedWeights:
    """Begins with the paper's, and follows observations."""

    def __init__(self, start: Terms = AS_WRITTEN) -> None:
        self._fit = [*start, 0.0]
        size = len(self._fit)
        self._covariance = [
            [COVARIANCE_START if row == column else 0.0 for column in range(size)]
            for row in range(size)
        ]
        self._usual_error_s: float | None = None

    @property
    def present(self) -> Terms:
        return Terms(*self._fit[:3])

    @property
    def base_s(self) -> float:
        """Of every request."""
        return self._fit[3]

    def learn(self, terms: Terms, ttft_s: float) -> None:
        inputs = (*terms, 1.0)
        spread = [_dot(row, inputs) for row in self._covariance]
        scale = FORGETTING + _dot(inputs, spread)
        error_s = self._clipped(ttft_s - _dot(self._fit, inputs))
        for place, (least, most) in enumerate(RANGES):
            moved = self._fit[place] + spread[place] / scale * error_s
            self._fit[place] = min(most, max(least, moved))
        self._narrow(spread, scale)

    def _clipped(self, error_s: float) -> float:
        usual_s = self._usual_error_s
        if usual_s is None:
            self._usual_error_s = abs(error_s)
            return error_s
        limit_s = ERRORS_MAX * usual_s
        clipped_s = min(limit_s, max(-limit_s, error_s))
        # The floor lets a fit that was perfect for a while learn again.
        self._usual_error_s = max(1e-3, usual_s + ERROR_WEIGHT * (abs(clipped_s) - usual_s))
        return clipped_s

    def _narrow(self, spread: list[float], scale: float) -> None:
        known = sum(self._covariance[place][place] for place in range(len(spread)))
        forgetting = FORGETTING if known < COVARIANCE_MAX else 1.0
        self._covariance = [
            [
                (value - spread[row] * spread[column] / scale) / forgetting
                for column, value in enumerate(values)
            ]
            for row, values in enumerate(self._covariance)
        ]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


LENGTH_WEIGHT = 0.05  # of a new prompt in the running average of lengths
KV_USED_RATIO = 0.5  # of a peer that doesn't report it
SCORES_MAX = 16  # of the cheapest, for the receipt


class GorgoCost(NamedTuple):
    """What one target costs: `terms` before they are weighed, `seconds` their weighed sum."""

    seconds: float
    target: Target
    terms: Terms
    matched_blocks: int


class Gorgo(Layered):
    """The cheapest of all by the paper's cost; never holds while a target is available."""

    joint: ClassVar[bool] = True

    def __init__(
        self, dice: Random, *, blocks_max: int, weights: GorgoWeights | None = None
    ) -> None:
        self._dice = dice
        self._weights: GorgoWeights = FixedWeights() if weights is None else weights
        self._index: PrefixIndex[Destination] = PrefixIndex(blocks_max)
        self._prompt_tokens: float | None = None  # of a usual request
        self._capacity_tokens: int | None = None  # of the KV cache of a replica like ours
        self._chosen: tuple[int, Destination, Terms] | None = None
        self._under_way: dict[int, tuple[Terms, float]] = {}  # by the request's key

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The target with the least cost; ties at random."""
        self._look(request, targets)
        known = [target for target in targets if target.rtt_s is not None] or targets
        spots = {Destination(target.kind, target.name): target for target in known}
        depths = self._index.depths(request.prompt.hashes, spots)
        costs = self._costs(request, spots, depths, now)
        costs.sort(key=itemgetter(0))  # by `seconds`
        ties = [cost for cost in costs if cost.seconds == costs[0].seconds]
        best = ties[0] if len(ties) == 1 else self._dice.choice(ties)
        self._chosen = request.key, Destination(best.target.kind, best.target.name), best.terms
        weights = self._weights.present
        scores = LazyScores(costs[:SCORES_MAX], partial(_score, weights))
        reason = _reason(best.target, best.terms.times(weights))
        return Choice(best.target, reason, best.matched_blocks, scores)

    def hit_ratio(self, request: Request) -> float:
        return self._index.hit_ratio(request.prompt.hashes)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        self._index.insert(spot, request.prompt.hashes, now)
        chosen, self._chosen = self._chosen, None
        if chosen is not None and chosen[:2] == (request.key, spot) and not request.answer_inbox:
            self._under_way[request.key] = chosen[2], now

    def began(self, request: Request, spot: Destination, now: float) -> None:
        expected = self._under_way.pop(request.key, None)
        if expected is not None:
            terms, placed_at = expected
            self._weights.learn(terms, now - placed_at)

    def left(self, request: Request, spot: Destination, now: float) -> None:
        self._under_way.pop(request.key, None)

    def forget(self, spot: Destination) -> None:
        self._index.forget(spot)

    def expire(self, now: float) -> None:
        self._index.expire(now)

    def go_on_from(self, earlier: Policy, *, copied: bool) -> None:
        """Hold the same prefixes. Weights are not taken over: the others' may be fixed."""
        if isinstance(earlier, Gorgo):
            self._index.go_on_from(earlier._index, copied=copied)
            self._prompt_tokens = earlier._prompt_tokens
            self._capacity_tokens = earlier._capacity_tokens

    def _look(self, request: Request, targets: Sequence[Target]) -> None:
        """Learn the usual length of prompts, and the size of caches."""
        tokens, usual = request.prompt.tokens, self._prompt_tokens
        self._prompt_tokens = tokens if usual is None else usual + LENGTH_WEIGHT * (tokens - usual)
        for target in targets:
            if target.replica is not None and target.replica.heartbeat.kv_capacity_tokens:
                self._capacity_tokens = target.replica.heartbeat.kv_capacity_tokens
                break

    def _costs(
        self,
        request: Request,
        spots: Mapping[Destination, Target],
        depths: Mapping[Destination, int],
        now: float,
    ) -> list[GorgoCost]:
        """Of each of the spots; `depths`: leading blocks that it holds, where it holds any."""
        prompt, weights = request.prompt, self._weights.present
        missing_tokens = {depth: prompt.uncached_tokens(depth) for depth in (0, *depths.values())}
        costs = []
        for spot, target in spots.items():
            depth, t_p, queue_s = depths.get(spot, 0), prefill_s_per_token(target), 0.0
            if target.replica is not None:
                queue_s = self._replica_queue_s(target.replica, t_p, now)
            elif target.peer is not None:
                queue_s = self._peer_queue_s(target.peer, request.model, t_p)
            terms = Terms(target.rtt_s or 0.0, missing_tokens[depth] * t_p, queue_s)
            costs.append(GorgoCost(terms.sum(weights), target, terms, depth))
        return costs

    def _replica_queue_s(self, replica: Replica, t_p: float, now: float) -> float:
        beat = replica.heartbeat
        waiting = replica.prefill_queue_tokens(now, t_p)
        if waiting is None:  # by the requests that wait, each as long as usual
            waiting = (replica.pending or 0) * self._usual_tokens
        waiting_s = waiting * t_p
        if beat.kv_used_ratio is None or beat.kv_capacity_tokens is None:
            running = max(0, replica.load - (replica.pending or 0))
            return waiting_s + running * self._usual_tokens * t_p
        return waiting_s + beat.kv_used_ratio * beat.kv_capacity_tokens * t_p

    def _peer_queue_s(self, peer: Peer, model: ModelId, t_p: float) -> float:
        """Of its least busy replica, as far as reported, and of requests held or sent there."""
        wait_s, ready, ratios = 0.0, 0, []
        for digest in peer.digests.values():
            has = digest.models.get(model)
            if has is not None:
                wait_s, ready = max(wait_s, has.wait_s or 0.0), max(ready, has.ready)
            if digest.kv_used_ratio is not None:
                ratios.append(digest.kv_used_ratio)
        held_tokens = (peer.queue + len(peer.forwarded_at)) * self._usual_tokens / max(1, ready)
        ratio = sum(ratios) / len(ratios) if ratios else KV_USED_RATIO
        running_tokens = ratio * (self._capacity_tokens or 0)
        return wait_s + (held_tokens + running_tokens) * t_p

    @property
    def _usual_tokens(self) -> float:
        return self._prompt_tokens or 0.0


def _score(weights: Terms, cost: GorgoCost) -> Score:
    weighed = cost.terms.times(weights)._asdict()
    if cost.target.rtt_s is None:
        return Score(cost.target, None, weighed | {"rtt_s": None}, cost.matched_blocks)
    return Score(cost.target, cost.seconds, weighed, cost.matched_blocks)


def _reason(target: Target, weighed: Terms) -> str:
    if target.rtt_s is None:
        return "no round trip is known; least of prefill and queue"
    rtt_ms, prefill_ms, queue_ms = (round(1e3 * term) for term in weighed)
    return (
        f"least cost: {1e3 * sum(weighed):.0f} ms = "
        f"round trip {rtt_ms} + prefill {prefill_ms} + queue {queue_ms}"
    )
