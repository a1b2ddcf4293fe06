"""`mesh`: least expected time to first token over all candidates at once, and over waiting.

For each candidate, in seconds (`mesh_prices.py`):

    rtt_s       to a peer region, and back with the first token
  + line_s      requests held in its region that go first
  + queue_s     prompts that are computed before ours: by its heartbeat or digest, plus what was
                handed off since
  + prefill_s   prompt tokens it does not hold × its seconds per token
  + base_s      what every first token costs there, more where many requests run
  + memory_s    until memory for the prompt, or a slot in the batch, is released if all is used
  + others_s    what others pay: decodes that our prefill stalls, requests held behind ours, a
                larger batch for all that run there, and the next turns of this conversation, which
                will follow it to the region it went to

It is GORGO's sum (section 4) with SkyWalker's counting of work on its way, made symmetric (the
region itself is a candidate like its peers) and charged with its effect on others, without which
batches decay: pure greed leaves replicas idle. A hot prefix replicates by itself: its holder's
queue grows until computing it elsewhere is quicker.

All places that serve the model are candidates, busy or not, because the busy holder of a long
prefix may still be the quickest. A replica is *open* while the prompts queued there take less than
QUEUE_S: enough to keep it busy until its next heartbeat. If the cheapest is a replica that is not
open, the request is held, to be placed by later information. If it is a peer, it goes there, and
waits there if it must: which of its replicas becomes free is known there first. Near ties are
broken at random. Of a large fleet the candidates are a sample (`mesh.core.view.replica_sampling`).

What candidates hold of a prompt is an estimate (`CacheView`) from three sources: the prompts placed
there (held from placement on: until it is computed, a prompt is in the queue that is priced as
well); what peers announce; and answers, which engines keep too. The next turn of a chat begins with
the last prompt *and its answer*, whose text a router doesn't read; so a prompt that continues
exactly where a served one ended counts as held as far as that prompt and its answer were long.

Estimates are checked against what engines report, unless their KV events say more. Engines evict by
age: where one no longer had a block last used at time t, all last used before t is gone, and it
keeps less than estimated. So blocks and credited room are reduced; each hit gives back a little.

Rejected: ranking by scores from 0 to 1 (weights then depend on the fleet); local first, peers only
when full (a distant idle replica is often nearer in seconds); charging how much one more in a batch
slows every token of all (prefills hide it, and a wrong slope outweighs all else); after a miss,
removing the missed prompt alone (it was just computed anew; others of its age would miss too).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from random import Random
from typing import ClassVar, NamedTuple, TypeVar

from mesh.core.model.request import Request, Served
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Choice, Destination, LazyScores, Policy, Target
from mesh.core.policies.mesh_price import HELD_NOTHING, HeldPrefix, Price, first_token, own_s, score
from mesh.core.policies.mesh_prices import (
    BATCH_WEIGHT,
    STALL_WEIGHT,
    Prices,
    PromptHolders,
    SpeedModel,
)
from mesh.core.policies.tier_costs import with_loading
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.decision import CandidateKind
from schemas.ids import ModelId

SCORES_MAX = 8  # of the cheapest candidates, for the receipt
TIE_S, TIE_RATIO = 0.001, 0.01  # estimates are no better than that
QUEUE_S = 0.5
QUEUE_S_MAX, WEIGHT_MAX = 60.0, 10.0  # of options: beyond these are mistakes
EXPECTED_MAX = 65_536  # placements whose first token has not come
MODELS_MAX = 256  # with speeds of their own; the oldest out first
ENDS_MAX = 131_072  # of served prompts, the oldest out first
MISS_BELOW = 0.75  # of the tokens estimated to be held: the router's count of them is a guess
# A younger block may still be computed: two prompts computed side by side both pay, and that is no
# eviction.
SETTLED_S = 5.0
SCALE_MIN = 0.1  # of an owner's room
SCALE_LOST = 0.25  # how far one miss goes from the room credited to what is left
SCALE_GAINED = 1.01  # by each confirmed hit

T = TypeVar("T")


class CacheEstimate(NamedTuple):
    """What one placement relied on: blocks, and when the deepest of them was placed there."""

    blocks: int
    at: float
    placed_at: float
    is_computed: bool = False  # its first token has come


class LayerCache:
    """Of replicas, or of peers: the index, and where its served prompts ended."""

    def __init__(self, blocks_max: int) -> None:
        self.index: PrefixIndex[str] = PrefixIndex(blocks_max)
        # Tokens of prompt and answer by owner, by the prompt's last block.
        self.ends: dict[int, dict[str, int]] = {}

    def of(self, request: Request, among: Sequence[Target]) -> dict[str, HeldPrefix]:
        """What each of these holds of the prompt, and perhaps what others do."""
        prompt = request.prompt
        held: dict[str, HeldPrefix] = {}
        most = max(0, prompt.tokens - 1)  # the last token is always computed
        # Of many owners only these are looked up; of few, a filter costs more than it saves.
        few = len(among) < self.index.owner_count
        only = [target.name for target in among] if few else None
        for depth, names in self.index.holders(prompt.hashes, only):
            plain = HeldPrefix(depth, min(prompt.held_tokens(depth), most))
            held.update(dict.fromkeys(names, plain))
            ends = self.ends.get(prompt.hashes[depth - 1])
            if ends is None:
                continue
            for name in ends.keys() & held.keys():
                if held[name] is plain and ends[name] > plain.tokens:
                    held[name] = HeldPrefix(depth, min(ends[name], most))
        return with_loading(held, self.index, prompt)

    def has_ended(self, blocks: Sequence[int]) -> bool:
        return not self.ends.keys().isdisjoint(blocks)

    def ended(self, name: str, last_block: int, tokens: int) -> None:
        """A prompt and its answer are held together."""
        ends = self.ends.pop(last_block, {})
        ends[name] = tokens
        _keep(self.ends, last_block, ends, ENDS_MAX)


class CacheView:
    """What replicas and peers hold, and how much of their room replicas turned out to keep."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._replicas, self._peers = LayerCache(blocks_max), LayerCache(blocks_max)
        # Part of a replica's memory that keeps prompts; 1.0 where nothing is known.
        self.room_ratio: dict[str, float] = {}

    @property
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        return {CandidateKind.REPLICA: self._replicas.index, CandidateKind.PEER: self._peers.index}

    def of(self, request: Request, targets: Sequence[Target]) -> PromptHolders:
        """What each target holds of the prompt. `targets`: replicas before peers."""
        here = self._replicas.of(request, targets)
        if targets[-1].peer is None:
            return PromptHolders(here, {})
        there = self._peers.of(request, targets)
        self._deepen(there, request, [one.name for one in targets if one.peer is not None])
        return PromptHolders(here, there)

    def deepest(self, request: Request, most: int, dice: Random) -> list[str]:
        """Up to `most` replicas, those that hold the most first; of equals, any."""
        found: list[str] = []
        for names in self._replicas.index.deepest(request.prompt.hashes):
            room = most - len(found)
            found += names if len(names) <= room else dice.sample(names, room)
            if len(found) >= most:
                break
        return found

    def goes_on(self, request: Request) -> bool:
        """Whether it begins with an earlier prompt and continues from its answer."""
        earlier = request.prompt.hashes[:-1]
        return self._replicas.has_ended(earlier) or self._peers.has_ended(earlier)

    def _deepen(self, there: dict[str, HeldPrefix], request: Request, names: Sequence[str]) -> None:
        """Peers may announce more than was placed on them from here."""
        prompt = request.prompt
        known = {name: held.blocks for name, held in there.items()}
        for name, depth in self._peers.index.deepen(known, prompt.hashes, names).items():
            if depth > there.get(name, HELD_NOTHING).blocks:
                tokens = min(prompt.held_tokens(depth), max(0, prompt.tokens - 1))
                there[name] = HeldPrefix(depth, max(tokens, there.get(name, HELD_NOTHING).tokens))

    def hit_ratio(self, request: Request) -> float:
        return self._replicas.index.hit_ratio(request.prompt.hashes)

    def placed(self, request: Request, spot: Destination, now: float) -> CacheEstimate:
        """Its prompt is held there from now on. Returns what is relied on."""
        blocks, at = self._layer(spot).index.insert(spot.name, request.prompt.hashes, now)
        return CacheEstimate(blocks, at, now)

    def left(self, request: Request, spot: Destination, estimate: CacheEstimate) -> None:
        """It ended. If it was not computed, what it alone brought is not held."""
        if estimate.is_computed:
            return
        new = request.prompt.hashes[estimate.blocks :]
        self._layer(spot).index.retract(spot.name, new, estimate.placed_at)

    def served(
        self,
        request: Request,
        spot: Destination,
        served: Served,
        estimate: CacheEstimate | None = None,
    ) -> None:
        """Its answer is held too. Check the estimate against what was cached."""
        hashes = request.prompt.hashes
        if served.output_tokens is not None and hashes:
            tokens = request.prompt.tokens + served.output_tokens
            self._layer(spot).ended(spot.name, hashes[-1], tokens)
        # A region chooses among its replicas itself: a miss of one says nothing about the others.
        if estimate is not None and spot.kind is CandidateKind.REPLICA:
            self._check(request, spot.name, served, estimate)

    def _check(self, request: Request, name: str, served: Served, estimate: CacheEstimate) -> None:
        is_reported = name in self._replicas.index.reporting
        settled = not is_reported and estimate.placed_at - estimate.at >= SETTLED_S
        if served.cached_tokens is None or not estimate.blocks or not settled:
            return
        scale = self.room_ratio.get(name, 1.0)
        if _is_confirmed(request, served, estimate):
            self.room_ratio[name] = min(1.0, scale * SCALE_GAINED)
            return
        index = self._replicas.index
        index.forget_until(name, estimate.at)
        left = min(1.0, index.blocks(name) / index.bound_of(name))
        self.room_ratio[name] = max(SCALE_MIN, scale - SCALE_LOST * scale * (1.0 - left))

    def go_on_from(self, earlier: "CacheView") -> None:
        """Know the rest of what another one knows, whose indexes were taken over."""
        self.room_ratio = {**earlier.room_ratio}
        for layer, before in (self._replicas, earlier._replicas), (self._peers, earlier._peers):
            layer.ends = {block: {**tokens} for block, tokens in before.ends.items()}

    def fit(self, name: str, blocks: int) -> None:
        """A replica has memory for so many blocks, of which it keeps the part that misses left."""
        room = min(blocks, self._blocks_max)
        self._replicas.index.bound(name, int(room * self.room_ratio.get(name, 1.0)))

    def expire(self, now: float) -> None:
        self._replicas.index.expire(now)
        self._peers.index.expire(now)

    def forget(self, spot: Destination) -> None:
        # Where prompts ended counts only where their blocks are, so those stay.
        self._layer(spot).index.forget(spot.name)
        if spot.kind is CandidateKind.REPLICA:
            self.room_ratio.pop(spot.name, None)

    def _layer(self, spot: Destination) -> LayerCache:
        return self._replicas if spot.kind is CandidateKind.REPLICA else self._peers


def _is_confirmed(request: Request, served: Served, estimate: CacheEstimate) -> bool:
    """Whether about as much was cached as estimated; engines round down to their blocks."""
    assert served.cached_tokens is not None
    prompt, cached = request.prompt, float(served.cached_tokens)
    if served.prompt_tokens:
        cached *= prompt.tokens / served.prompt_tokens  # in the router's count of tokens
    return cached >= MISS_BELOW * prompt.held_tokens(estimate.blocks - 1)


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """What an operator may weigh otherwise; the defaults are what was measured best.

    `queue_s`: how long a queue an open replica may have, in seconds. `stall_weight`: of the decodes
    that a prefill stalls. `batch_weight`: of each request that runs beside one more.
    """

    queue_s: float = QUEUE_S
    stall_weight: float = STALL_WEIGHT
    batch_weight: float = BATCH_WEIGHT

    def __post_init__(self) -> None:
        for name, value, most in (
            ("queue_s", self.queue_s, QUEUE_S_MAX),
            ("stall_weight", self.stall_weight, WEIGHT_MAX),
            ("batch_weight", self.batch_weight, WEIGHT_MAX),
        ):
            if not 0.0 <= value <= most:
                raise ValueError(f"{name} must be from 0 to {most:g}, not {value}")


AS_MEASURED = MeshOptions()


class Expected(NamedTuple):
    """What was expected of one placement, until its answer ends."""

    placed_at: float
    rtt_s: float
    tokens: float  # to compute before the first token, those queued included
    running: float
    began_at: float | None = None


class MeshPolicy:
    """Prices replicas and peers against each other; learns from each first token."""

    joint: ClassVar[bool] = True
    judges_load: ClassVar[bool] = True

    def __init__(
        self, settings: RouterSettings, dice: Random, options: MeshOptions = AS_MEASURED
    ) -> None:
        self._dice = dice
        self._options = options
        self._caches = CacheView(settings.index_blocks_max)
        self._models: dict[ModelId, SpeedModel] = {}
        # The last choice and its request's key; it need not be followed.
        self._chosen: tuple[int, Price] | None = None
        self._expected: dict[int, Expected] = {}  # by key of the request
        self._estimates: dict[int, CacheEstimate] = {}  # the same, whichever policy chose

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The cheapest of the targets; none if that one is not open."""
        speeds, holders = self._speeds(request), self._caches.of(request, targets)
        rows = Prices(speeds, request, now).rows(targets, holders)
        cheapest = sorted(rows, key=itemgetter(0))[:SCORES_MAX]
        picked = cheapest[0]
        good_s = picked[0] + max(TIE_S, TIE_RATIO * picked[0])
        if len(cheapest) > 1 and cheapest[1][0] <= good_s:
            picked = self._dice.choice([row for row in rows if row[0] <= good_s])
            if all(row is not picked for row in cheapest):
                cheapest[-1] = picked  # the receipt needs its price
        best = Price._make(picked)
        scores = LazyScores(cheapest, score)
        ttft_s, is_guess = best.seconds - best.others_s, not speeds.is_known(best.target)
        waited_s = now - request.arrived_at
        busy = best.target.peer is None and self._busy_because(best)
        if not busy or _starves(best, waited_s):
            self._chosen = request.key, best
            others = f", {best.others_s:.3f} s for others" if best.others_s >= TIE_S else ""
            reason = f"first token in {ttft_s:.3f} s{others}: cheapest of {len(rows)}"
            held = best.held
            expected = first_token(best)
            return Choice(best.target, reason, held.blocks, scores, held.tokens, is_guess, expected)
        reason = f"cheapest is {best.target.name}, first token in {ttft_s:.3f} s, but: {busy}"
        expected = first_token(min(cheapest, key=own_s))
        return Choice(None, reason, 0, scores, is_guess=is_guess, expected=expected)

    @property
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        return self._caches.indexes

    def holders(self, request: Request, most: int) -> list[str]:
        """Replicas that a large fleet's sample must contain."""
        return self._caches.deepest(request, most, self._dice)

    def hit_ratio(self, request: Request) -> float:
        return self._caches.hit_ratio(request)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        estimate = self._caches.placed(request, spot, now)
        chosen, self._chosen = self._chosen, None
        if chosen is None or chosen[0] != request.key or chosen[1].target.name != spot.name:
            price, replica = None, None  # another policy's choice
        else:
            price = chosen[1]
            replica = price.target.replica
        if replica is not None and (capacity := replica.heartbeat.kv_capacity_tokens):
            self._caches.fit(spot.name, int(capacity / request.prompt.block_tokens))
        if request.answer_inbox is not None:
            return  # a peer's request is not followed
        _keep(self._estimates, request.key, estimate, EXPECTED_MAX)
        if price is not None:
            expected = Expected(now, price.rtt_s, price.tokens, price.running)
            _keep(self._expected, request.key, expected, EXPECTED_MAX)
            goes_on, speeds = self._caches.goes_on(request), self._speeds(request)
            if replica is not None and replica.heartbeat.running:
                speeds.batch(replica.heartbeat.running)
            speeds.prompt(request.prompt.tokens - price.held.tokens, goes_on=goes_on)

    def began(self, request: Request, spot: Destination, now: float) -> None:
        estimate = self._estimates.get(request.key)
        if estimate is not None:
            self._estimates[request.key] = estimate._replace(is_computed=True)
        expected = self._expected.get(request.key)
        if expected is None or expected.began_at is not None:
            return
        ttft_s = now - expected.placed_at - expected.rtt_s
        self._speeds(request).began(spot, expected.tokens, expected.running, ttft_s)
        self._expected[request.key] = expected._replace(began_at=now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        speeds, expected = self._speeds(request), self._expected.get(request.key)
        if expected is not None and expected.began_at is not None:
            speeds.resided(spot, now - expected.began_at)
        if served.output_tokens is not None:
            speeds.answer(request.prompt.tokens, served.output_tokens)
        self._caches.served(request, spot, served, self._estimates.pop(request.key, None))

    def left(self, request: Request, spot: Destination, now: float) -> None:
        self._expected.pop(request.key, None)
        estimate = self._estimates.pop(request.key, None)
        if estimate is not None:
            self._caches.left(request, spot, estimate)

    def forget(self, spot: Destination) -> None:
        self._caches.forget(spot)
        for speeds in self._models.values():
            speeds.forget(spot)

    def expire(self, now: float) -> None:
        self._caches.expire(now)

    def go_on_from(self, earlier: Policy, *, copied: bool) -> None:
        """Know the same speeds, and expect the same of what is under way."""
        if not isinstance(earlier, MeshPolicy):
            return
        for speeds in earlier._models.values():
            speeds.kept.clear()  # whole heartbeats, which are soon computed anew
        self._models = deepcopy(earlier._models) if copied else earlier._models
        for speeds in self._models.values():
            self._weigh(speeds)
        self._caches.go_on_from(earlier._caches)
        self._expected, self._estimates = {**earlier._expected}, {**earlier._estimates}

    def _speeds(self, request: Request) -> SpeedModel:
        """Of its model: a fleet of large and small ones has no speed in common."""
        speeds = self._models.get(request.model)
        if speeds is None:
            speeds = SpeedModel(generates=request.answer_tokens != 0)
            self._weigh(speeds)
            _keep(self._models, request.model, speeds, MODELS_MAX)
        return speeds

    def _busy_because(self, price: Price) -> str:
        """Why it may not be given work now; empty if it may."""
        if price.queue_s > self._options.queue_s:
            return f"{price.queue_s:.3f} s of prefill queue there, over {self._options.queue_s:g} s"
        return f"its KV cache has room in {price.memory_s:.3f} s" if price.memory_s > 0.0 else ""

    def _weigh(self, speeds: SpeedModel) -> None:
        speeds.stall_weight = self._options.stall_weight
        speeds.batch_weight = self._options.batch_weight if speeds.generates else 0.0


K = TypeVar("K")


def _keep(table: dict[K, T], key: K, value: T, most: int) -> None:
    """Enter a value; the oldest makes room."""
    if len(table) >= most:
        del table[next(iter(table))]
    table[key] = value


def _starves(price: Price, waited_s: float) -> bool:
    """Whether it has waited for what should be over by now: then it goes into the engine's queue.

    That is first come, first served, so that no smaller request overtakes it any more. One at a
    time, because a request in an engine's queue can't go elsewhere.
    """
    replica = price.target.replica
    return replica is not None and not replica.pending and waited_s > price.queue_s + price.memory_s
