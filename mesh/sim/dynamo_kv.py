"""`dynamo`: NVIDIA Dynamo's KV router with exact caches. Twin only.

Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector/default.rs` (`worker_logit`,
`softmax_sample_index`) at 07a6c9c, and "Routing concepts" of its documentation, v1.5. The worker
with the least

    prefill_scale · max(0, (active_prefill_tokens + prompt_tokens) / B - credit · overlap_blocks)
        + active_blocks + new_blocks

in blocks of B tokens:

* `active_prefill_tokens`: uncached prompt tokens of requests that this router sent there and that
  have no first token yet;
* `overlap_blocks`: leading blocks of the prompt that the worker holds, by its KV events;
* `active_blocks`: different prompt blocks of requests that this router sent there and that have
  not ended; `new_blocks`: those that this prompt would add. Output blocks are not counted
  (`router_track_output_blocks` is off by default), nor a prompt's last, unfilled block;
* `credit` = 1 / (1 + decay · x), x being the active prefill beyond the least loaded worker's, in
  prompts of this length (`overlap_score_credit_decay`).

Temperature 0 takes the least, ties at random. Otherwise costs are scaled to their range and a
worker is drawn with weight exp(-cost / temperature). Earlier versions call the scale
`overlap_score_weight`. As published, the router knows no round trips, pushes blindly and sheds
nothing.

Its queue (`scheduling/queue.rs`, `router_queue_threshold`: off by default, 4 or 16 in earlier
versions) holds requests, first come first served, while every worker has more active prefill than
`queue_batches` times its `max_num_batched_tokens`. A first token or an end lets the next one go to
the worker with the least cost of all, busy ones included. Not here: cache tiers below the GPU, the
queue's other orders.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from agents.sim.kv_cache import BLOCK_TOKENS
from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Layered, Score, Target
from mesh.sim.cache_copies import CacheCopies
from schemas.ids import ReplicaId

if TYPE_CHECKING:
    from mesh.sim.world import World


@dataclass(frozen=True, slots=True)
class DynamoOptions:
    """Its defaults. `temperature` is relative to the range of costs.

    `predicted_s`: seconds for which a prompt that was sent to a worker counts as cached there.
    `queue_batches`: see above; infinite, nothing is held.
    """

    prefill_scale: float = 1.0
    temperature: float = 0.0
    decay: float = 0.0
    predicted_s: float = 0.0
    queue_batches: float = math.inf

    def __post_init__(self) -> None:
        *finite, queue_batches = astuple(self)
        if not (all(0.0 <= value < math.inf for value in finite) and queue_batches >= 0.0):
            raise ValueError(f"each must be 0 or more: {self}")


class WorkerLoad(NamedTuple):
    """One worker as the router counts it. Blocks include the request that is being placed."""

    active_prefill_tokens: int
    overlap_blocks: int
    decode_blocks: int


def costs_in_blocks(
    options: DynamoOptions, prompt_tokens: int, workers: Sequence[WorkerLoad]
) -> list[float]:
    """Each worker's cost."""
    least_tokens = min((one.active_prefill_tokens for one in workers), default=0)
    prompt_blocks = max(1, -(-prompt_tokens // BLOCK_TOKENS))
    costs = []
    for one in workers:
        excess = (one.active_prefill_tokens - least_tokens) / BLOCK_TOKENS / prompt_blocks
        credit = 1.0 / (1.0 + options.decay * excess)
        raw_blocks = (one.active_prefill_tokens + prompt_tokens) / BLOCK_TOKENS
        prefill_blocks = max(0.0, raw_blocks - credit * one.overlap_blocks)
        costs.append(options.prefill_scale * prefill_blocks + one.decode_blocks)
    return costs


def chances(costs: Sequence[float], temperature: float) -> list[float]:
    """The probability of each cost. `temperature` more than 0."""
    least, spread = min(costs), max(costs) - min(costs)
    if not spread:
        return [1.0 / len(costs)] * len(costs)
    weights = [math.exp((least - cost) / spread / temperature) for cost in costs]
    total = sum(weights)
    return [weight / total for weight in weights]


class Sent(NamedTuple):
    """A request under way to a worker or in it."""

    name: str
    keys: Sequence[int]
    uncached_tokens: int


class ActiveRequests:
    """What this router sent to each worker and has not ended."""

    def __init__(self) -> None:
        self._sent: dict[int, Sent] = {}  # by the request's key
        self._prefilling: set[int] = set()
        self._prefill_tokens: dict[str, int] = {}
        self._holders: dict[str, dict[int, int]] = {}  # requests by block, by worker

    def prefill_tokens(self, name: str) -> int:
        """Uncached prompt tokens of its requests without a first token."""
        return self._prefill_tokens.get(name, 0)

    def blocks_with(self, name: str, keys: Sequence[int]) -> int:
        """Different blocks of its requests and of `keys` together."""
        holders = self._holders.get(name, {})
        low, high = 0, len(keys)  # keys are chained: those that are shared come first
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keys[middle - 1] in holders else (low, middle - 1)
        return len(holders) + len(keys) - low

    def add(self, key: int, sent: Sent) -> None:
        """A request goes to a worker; it is in no other."""
        self.end(key)
        self._sent[key] = sent
        self._prefilling.add(key)
        self._prefill_tokens[sent.name] = self.prefill_tokens(sent.name) + sent.uncached_tokens
        holders = self._holders.setdefault(sent.name, {})
        for block in sent.keys:
            holders[block] = holders.get(block, 0) + 1

    def began(self, key: int) -> None:
        """Its prefill is over."""
        if key in self._prefilling:
            self._prefilling.remove(key)
            sent = self._sent[key]
            self._prefill_tokens[sent.name] -= sent.uncached_tokens

    def end(self, key: int) -> None:
        """It has ended, or its attempt has."""
        self.began(key)
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        holders = self._holders[sent.name]
        for block in sent.keys:
            holders[block] -= 1
            if not holders[block]:
                del holders[block]


class DynamoKv(Layered):
    """The least cost in blocks, or a draw by it; with a queue, nobody while all are busy."""

    joint: ClassVar[bool] = True  # it may hold, and has no peers

    def __init__(self, world: "World", dice: Random, options: DynamoOptions) -> None:
        self._world = world
        self._dice = dice
        self._options = options
        self._caches = CacheCopies(world, options.predicted_s)
        self._active = ActiveRequests()
        self._overlaps: tuple[int, dict[str, int]] = 0, {}  # of the last choice, by worker

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """One worker, by its cost."""
        if all(map(self._is_busy, targets)):
            return Choice(None, "every worker has its fill of prompts to compute")
        tokens, keys = self._caches.prompt(request)
        workers = [
            WorkerLoad(
                self._active.prefill_tokens(target.name),
                self._caches.matched(target, keys, now),
                self._active.blocks_with(target.name, keys),
            )
            for target in targets
        ]
        costs = costs_in_blocks(self._options, tokens, workers)
        best = self._pick(costs)
        self._overlaps = (
            request.key,
            {one.name: load.overlap_blocks for one, load in zip(targets, workers, strict=True)},
        )
        held_tokens = workers[best].overlap_blocks * BLOCK_TOKENS
        reason = f"cost {costs[best]:.1f} blocks, {held_tokens} tokens cached"
        scores = [
            Score(target, terms={"blocks": cost})
            for target, cost in zip(targets, costs, strict=True)
        ]
        return Choice(
            targets[best],
            reason,
            int(held_tokens / request.prompt.block_tokens),
            scores,
            held_tokens=min(held_tokens, request.prompt.tokens - 1),
        )

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        if request.answer_inbox is not None:
            return
        tokens, keys = self._caches.prompt(request)
        key, overlaps = self._overlaps
        overlap = overlaps.get(spot.name, 0) if key == request.key else 0
        self._caches.sent(spot.name, keys, now)
        uncached = max(0, tokens - overlap * BLOCK_TOKENS)
        self._active.add(request.key, Sent(spot.name, keys, uncached))

    def began(self, request: Request, spot: Destination, now: float) -> None:
        self._active.began(request.key)

    def left(self, request: Request, spot: Destination, now: float) -> None:
        self._active.end(request.key)

    def _is_busy(self, target: Target) -> bool:
        if self._options.queue_batches == math.inf:
            return False
        batch_tokens = self._world.replicas[ReplicaId(target.name)].engine.profile.batch_tokens
        most = self._options.queue_batches * batch_tokens
        return self._active.prefill_tokens(target.name) > most

    def _pick(self, costs: Sequence[float]) -> int:
        """The place of one of the costs."""
        if self._options.temperature:
            weights = chances(costs, self._options.temperature)
            return self._dice.choices(range(len(costs)), weights)[0]
        least = min(costs)
        return self._dice.choice([place for place, cost in enumerate(costs) if cost == least])
