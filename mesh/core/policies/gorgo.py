"""GORGO: least of round trip + residual prefill + queue wait, over replicas and peers together.

    cost = RTT + t_p · (L_p - L_hit) + q̂ · t_p · (tokens queued and running)      (GORGO 3.4)

Every candidate has all three terms, here and elsewhere. The authors' code differs from their
paper in that: a peer costs no wait there, so a busy peer draws the requests of all its
neighbours, and peers without the prefix are not looked at when one has it. t_p is each target's
own (section 8 asks for it: fleets are mixed), the paper's constant where a target says nothing.

A peer tells how much waits, not how many tokens: its held requests are taken to be as long as
those this router has seen, its running ones to fill the part of the KV cache it tells of caches
as large as the ones here. A target whose round trip is unknown comes after all others, because
no constant fits both the next town and the next continent.

`gorgo-proxy` is this policy at a router that serves all regions: its targets are all replicas,
each at its round trip. Nothing in the code differs. `gorgo-tuned` learns the weights.
"""

from collections.abc import Sequence
from random import Random
from typing import ClassVar, NamedTuple

from mesh.core.federation.peers import Peer
from mesh.core.policies.base import Choice, Layered, Score, Spot, Target
from mesh.core.policies.gorgo_weights import FixedWeights, Terms, Weights
from mesh.core.policies.speed import speed_of
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.region.replica import Replica
from mesh.core.requests.request import Request
from schemas.ids import ModelId

LENGTH_WEIGHT = 0.05  # of a new prompt in the running average of lengths
KV_USED_RATIO = 0.5  # of a peer that doesn't tell: neither idle nor full
SCORES_MAX = 16  # of the cheapest, for the receipt


class Cost(NamedTuple):
    """What one target costs: `terms` before they are weighed, `seconds` their weighed sum."""

    seconds: float
    target: Target
    terms: Terms
    matched_blocks: int


class Gorgo(Layered):
    """The cheapest of all by the paper's cost; never holds while somebody is available."""

    joint: ClassVar[bool] = True

    def __init__(self, dice: Random, *, blocks_max: int, weights: Weights | None = None) -> None:
        self._dice = dice
        self._weights: Weights = FixedWeights() if weights is None else weights
        self._index: PrefixIndex[Spot] = PrefixIndex(blocks_max)
        self._prompt_tokens: float | None = None  # of a usual request
        self._capacity_tokens: int | None = None  # of the KV cache of a replica like ours
        self._chosen: tuple[int, Spot, Terms] | None = None
        self._under_way: dict[int, tuple[Terms, float]] = {}  # by the request's key

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The target with the least cost; ties at random."""
        self._look(request, targets)
        known = [target for target in targets if target.rtt_s is not None] or targets
        spots = {Spot(target.kind, target.name): target for target in known}
        depths = self._index.depths(request.prompt.hashes, spots)
        costs = [
            self._cost(target, request, depths.get(spot, 0), now) for spot, target in spots.items()
        ]
        costs.sort(key=_by_seconds)
        ties = [cost for cost in costs if cost.seconds == costs[0].seconds]
        best = ties[0] if len(ties) == 1 else self._dice.choice(ties)
        self._chosen = request.key, Spot(best.target.kind, best.target.name), best.terms
        weights = self._weights.present
        scores = [_score(cost, weights) for cost in costs[:SCORES_MAX]]
        reason = _reason(best.target, best.terms.times(weights))
        return Choice(best.target, reason, best.matched_blocks, scores)

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that anyone has, free or not."""
        return self._index.hit_ratio(request.prompt.hashes)

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """Its prefill will leave the prompt's KV there."""
        self._index.insert(spot, request.prompt.hashes, now)
        chosen, self._chosen = self._chosen, None
        if chosen is not None and chosen[:2] == (request.key, spot) and not request.answer_inbox:
            self._under_way[request.key] = chosen[2], now

    def began(self, request: Request, spot: Spot, now: float) -> None:
        """The cost that was expected meets the one that was paid."""
        expected = self._under_way.pop(request.key, None)
        if expected is not None:
            terms, placed_at = expected
            self._weights.learn(terms, now - placed_at)

    def left(self, request: Request, spot: Spot, now: float) -> None:
        """One that never began teaches nothing."""
        self._under_way.pop(request.key, None)

    def forget(self, spot: Spot) -> None:
        """Its KV is gone with it."""
        self._index.forget(spot)

    def expire(self, now: float) -> None:
        """What was not used for long is believed no more."""
        self._index.expire(now)

    def _look(self, request: Request, targets: Sequence[Target]) -> None:
        """Learn how long requests are, and how large caches."""
        tokens, usual = request.prompt.tokens, self._prompt_tokens
        self._prompt_tokens = tokens if usual is None else usual + LENGTH_WEIGHT * (tokens - usual)
        for target in targets:
            if target.replica is not None and target.replica.heartbeat.kv_capacity_tokens:
                self._capacity_tokens = target.replica.heartbeat.kv_capacity_tokens
                break

    def _cost(self, target: Target, request: Request, matched_blocks: int, now: float) -> Cost:
        t_p = speed_of(target).prefill_s_per_token
        queue_s = 0.0
        if target.replica is not None:
            queue_s = self._replica_queue_s(target.replica, t_p, now)
        elif target.peer is not None:
            queue_s = self._peer_queue_s(target.peer, request.model, t_p)
        missing_tokens = request.prompt.uncached_tokens(matched_blocks)
        terms = Terms(target.rtt_s or 0.0, missing_tokens * t_p, queue_s)
        return Cost(terms.sum(self._weights.present), target, terms, matched_blocks)

    def _replica_queue_s(self, replica: Replica, t_p: float, now: float) -> float:
        beat = replica.heartbeat
        waiting = replica.prefill_queue_tokens(now, t_p)
        if waiting is None:  # then by what waits, each as long as usual
            waiting = (replica.pending or 0) * self._usual_tokens
        waiting_s = waiting * t_p
        if beat.kv_used_ratio is None or beat.kv_capacity_tokens is None:
            running = max(0, replica.load - (replica.pending or 0))
            return waiting_s + running * self._usual_tokens * t_p
        return waiting_s + beat.kv_used_ratio * beat.kv_capacity_tokens * t_p

    def _peer_queue_s(self, peer: Peer, model: ModelId, t_p: float) -> float:
        """Of its least busy replica, as far as it tells, and of those it holds or was sent."""
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


def _by_seconds(cost: Cost) -> float:
    return cost.seconds


def _score(cost: Cost, weights: Terms) -> Score:
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
