"""`mesh`: least expected time to first token over all candidates at once, and over waiting.

For each candidate, in seconds (`mesh_prices.py`; what it holds of the prompt: `mesh_caches.py`):

    rtt_s       to a peer region, and back with the first token
  + line_s      requests held in its region that go first
  + queue_s     prompts that are computed before ours: by its heartbeat or digest, plus what was
                handed off since; and how long the first has waited for a slot in a batch whose
                size the engine does not tell
  + prefill_s   prompt tokens it does not hold × its seconds per token
  + base_s      what every first token costs there, more where many requests run
  + memory_s    until memory for the rest of the prompt, or a slot in the batch, is released
  + transfer_s  on a pair: until the decode replica has the KV cache and its first token
  + load_s      until its engine has loaded the adapter that is asked for
  + others_s    what others pay: decodes that our prefill stalls, requests held behind ours, those
                that come while replicas are busy with our prefill, the next turns of this
                conversation, which will follow it to the region it went to, and the load of an
                adapter that makes room for ours

It is GORGO's sum (section 4) with SkyWalker's counting of work on its way, made symmetric (the
region itself is a candidate like its peers) and charged with its effect on others, without which
batches decay: pure greed leaves replicas idle. A hot prefix replicates by itself: its holder's
queue grows until computing it elsewhere is quicker.

All places that serve the model are candidates, busy or not, because the busy holder of a long
prefix may still be the quickest. A replica is *open* while the prompts queued there take less than
QUEUE_S: enough to keep it busy until its next heartbeat. If the cheapest is a replica that is not
open, the request is held, to be placed by later information. If it is a peer, it goes there, and
waits there if it must: which of its replicas becomes free is known there first. If another region
becomes cheaper meanwhile, it is handed back. Near ties are broken at random. Of a large fleet the
candidates are a sample (`mesh.core.view.replica_sampling`).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from random import Random
from typing import ClassVar, NamedTuple

from mesh.core.model.request import Request, Served
from mesh.core.model.served_names import is_kept_call, work_name
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import CacheEstimate, Choice, Destination, LazyScores, Policy, Target
from mesh.core.policies.mesh_caches import CacheView, keep
from mesh.core.policies.mesh_peers import Forward, Forwards, PeerDelays
from mesh.core.policies.mesh_price import Price, PriceRow, first_token, own_s, score
from mesh.core.policies.mesh_prices import TIE_S, Prices, near_s, with_prefills
from mesh.core.policies.mesh_speeds import STALL_WEIGHT, SpeedModel
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.decision import CandidateKind
from schemas.ids import ModelId

SCORES_MAX = 8  # of the cheapest candidates, for the receipt
QUEUE_S = 0.5
QUEUE_S_MAX, WEIGHT_MAX = 60.0, 10.0  # of options: beyond these are mistakes
# A peer's held request is handed back once it costs over so many times as much here as in another
# region: prices of far replicas are by older news. Mean time to first token with 1.5, 2, 3, to that
# of requests that stay (simulated, four seeds): video questions on L4s at load 0.6: 0.52, 0.64,
# 0.66; long documents on H100s at load 1.0: 0.71, 0.70, 0.75. With 1 some are placed 25 times.
HAND_BACK_RATIO = 1.5
EXPECTED_MAX = 65_536  # placements whose first token has not come
MODELS_MAX = 256  # with speeds of their own; the oldest out first


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """What an operator may weigh otherwise; the defaults are what was measured best.

    `queue_s`: how long a queue an open replica may have, in seconds. `stall_weight`: of the decodes
    that a prefill stalls.
    """

    queue_s: float = QUEUE_S
    stall_weight: float = STALL_WEIGHT

    def __post_init__(self) -> None:
        for name, value, most in (
            ("queue_s", self.queue_s, QUEUE_S_MAX),
            ("stall_weight", self.stall_weight, WEIGHT_MAX),
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
    loads: bool  # an adapter first: its first token says nothing of speed
    began_at: float | None = None
    is_decode: bool = False  # the second stage on a pair: `tokens` are transferred


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
        self._forwards, self._delays = Forwards(), PeerDelays()
        # The last choice and its request's key; it need not be followed.
        self._chosen: tuple[int, Price] | None = None
        self._expected: dict[int, Expected] = {}  # by key of the request
        self._prefills: dict[int, Expected] = {}  # of those whose prefill stage is under way
        self._estimates: dict[int, CacheEstimate] = {}  # the same, whichever policy chose

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The cheapest of the targets; none if that one is not open."""
        speeds = self._speeds(request)
        prices = self._prices(speeds, request, now)
        if targets[0].prefill is None:
            rows = prices.rows(targets, self._caches.of(request, targets), SCORES_MAX)
        else:  # pairs come first
            holders = self._caches.of(request, with_prefills(targets))
            rows = prices.with_pairs(targets, holders)
        if request.answer_inbox is not None:
            rows = _here_unless_cheaper_elsewhere(rows)
        cheapest = sorted(rows, key=itemgetter(0))[:SCORES_MAX]
        picked = cheapest[0]
        good_s = near_s(picked[0])
        if len(cheapest) > 1 and cheapest[1][0] <= good_s:
            picked = self._dice.choice([row for row in rows if row[0] <= good_s])
            if all(row is not picked for row in cheapest):
                cheapest[-1] = picked  # the receipt needs its price
        best = Price._make(picked)
        scores = LazyScores(cheapest, score)
        ttft_s, is_guess = best.seconds - best.others_s, not speeds.is_known(best.target)
        waited_s = now - request.arrived_at
        busy = self._busy_because(best)
        if busy and is_kept_call(request.model):
            busy = ""
        if not busy or _starves(best, waited_s):
            self._chosen = request.key, best
            others = f", {best.others_s:.3f} s for others" if best.others_s >= TIE_S else ""
            reason = f"first token in {ttft_s:.3f} s{others}: cheapest of {len(targets)}"
            if busy:
                reason += f"; {busy}, but it has waited {waited_s:.3f} s, longer than expected"
            held = best.held
            expected = first_token(best)
            return Choice(best.target, reason, held.blocks, scores, held.tokens, is_guess, expected)
        reason = f"cheapest is {best.target.name}, but: {busy}"
        expected = first_token(min(cheapest, key=own_s))
        return Choice(
            None, reason, 0, scores, is_guess=is_guess, expected=expected, waits_for=best.target
        )

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
        keep(self._estimates, request.key, estimate, EXPECTED_MAX)
        if price is not None:
            loads = price.load_s > 0.0
            self._expect(request, price, now)
            goes_on, speeds = self._caches.goes_on(request), self._speeds(request)
            if loads:
                speeds.load_sent(spot.name)
            if replica is not None and replica.heartbeat.running:
                speeds.batch(replica.heartbeat.running)
            speeds.prompt(request.prompt.tokens - price.held.tokens, goes_on=goes_on)
            speeds.demand.add(price.prefill_s, now)
            if price.target.peer is not None:
                tokens = request.prompt.tokens
                prefill_tokens = tokens - price.held.tokens
                forward = Forward(now, price.held.replica, prefill_tokens, tokens)
                self._forwards.add(spot.name, forward)
                if request.streams:
                    expected_s = price.seconds - price.others_s
                    self._delays.forwarded(spot.name, request.key, expected_s, now)

    def _expect(self, request: Request, price: Price, now: float) -> None:
        tokens, prefill = price.tokens, price.target.prefill
        if prefill is not None:
            first, tokens = prefill.among[0], prefill.transfer_tokens
            assert first.replica is not None, "prefill replicas are local"
            beat = first.replica.heartbeat
            if beat.kv_capacity_tokens:
                blocks = int(beat.kv_capacity_tokens / request.prompt.block_tokens)
                self._caches.fit(first.name, blocks)
            stage = Expected(now, 0.0, price.tokens, beat.running or 0.0, loads=False)
            keep(self._prefills, request.key, stage, EXPECTED_MAX)
        loads, is_decode = price.load_s > 0.0, prefill is not None
        expected = Expected(now, price.rtt_s, tokens, price.running, loads, is_decode=is_decode)
        keep(self._expected, request.key, expected, EXPECTED_MAX)

    def prefilled(
        self, request: Request, spot: Destination, held: CacheEstimate, served: Served, now: float
    ) -> None:
        """Learn the prefill replica's speed and cache; the decode stage begins now."""
        self._caches.check(request, spot.name, served, held)
        stage = self._prefills.pop(request.key, None)
        if stage is None:
            return
        speeds, seconds = self._speeds(request), now - stage.placed_at
        speeds.began(spot, stage.tokens, stage.running, seconds, now=now)
        expected = self._expected.get(request.key)
        if expected is not None:
            self._expected[request.key] = expected._replace(placed_at=now)

    def began(self, request: Request, spot: Destination, now: float) -> None:
        estimate = self._estimates.get(request.key)
        if estimate is not None:
            self._estimates[request.key] = estimate._replace(is_computed=True)
        if spot.kind is CandidateKind.PEER:
            self._delays.began(spot.name, request.key, now)
        expected = self._expected.get(request.key)
        if expected is None or expected.began_at is not None:
            return
        ttft_s = now - expected.placed_at - expected.rtt_s
        speeds, tokens = self._speeds(request), expected.tokens
        if expected.loads:
            speeds.load_over(spot.name)
        elif not expected.is_decode:
            speeds.began(spot, tokens, expected.running, ttft_s, now=now)
        elif request.key not in self._prefills:  # else both stages run, and share the time
            speeds.transfer.began(tokens, expected.running, ttft_s)
        self._expected[request.key] = expected._replace(began_at=now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        speeds, expected = self._speeds(request), self._expected.get(request.key)
        if expected is not None and expected.began_at is not None and now > expected.began_at:
            speeds.resided(spot, now - expected.began_at)  # one that came at once shows none
        if served.output_tokens is not None:
            speeds.answer(spot, request.prompt.tokens, served.output_tokens)
        self._caches.served(request, spot, served, self._estimates.pop(request.key, None))

    def left(self, request: Request, spot: Destination, now: float) -> None:
        self._prefills.pop(request.key, None)
        expected = self._expected.pop(request.key, None)
        if expected is not None and expected.loads:
            self._speeds(request).load_over(spot.name)
        if spot.kind is CandidateKind.PEER:
            self._delays.left(spot.name, request.key, now)
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
            speeds.kept_peers.clear()
        self._models = deepcopy(earlier._models) if copied else earlier._models
        for speeds in self._models.values():
            self._weigh(speeds)
        self._caches.go_on_from(earlier._caches)
        self._expected, self._estimates = {**earlier._expected}, {**earlier._estimates}
        self._prefills = {**earlier._prefills}

    def _prices(self, speeds: SpeedModel, request: Request, now: float) -> Prices:
        return Prices(speeds, request, now, self._forwards, self._delays)

    def _speeds(self, request: Request) -> SpeedModel:
        """Of its model: a fleet of large and small ones has no speed in common."""
        work = work_name(request.model)
        if (speeds := self._models.get(work)) is None:
            speeds = SpeedModel(work, generates=request.answer_tokens != 0)
            self._weigh(speeds)
            keep(self._models, work, speeds, MODELS_MAX)
        return speeds

    def _busy_because(self, price: Price) -> str:
        """Why it may not be given work now; empty if it may, as a peer always."""
        if price.target.peer is not None:
            return ""
        if price.queue_s > self._options.queue_s:
            return f"{price.queue_s:.3f} s of prefill queue there, over {self._options.queue_s:g} s"
        return f"its KV cache has room in {price.memory_s:.3f} s" if price.memory_s > 0.0 else ""

    def _weigh(self, speeds: SpeedModel) -> None:
        speeds.stall_weight = self._options.stall_weight


def _here_unless_cheaper_elsewhere(rows: list[PriceRow]) -> list[PriceRow]:
    """Of a peer's request that waits here: without other regions, if none is clearly cheaper."""
    here = [row for row in rows if row[1].peer is None]
    least_s = min([row[0] for row in rows])
    return here if here and least_s * HAND_BACK_RATIO > min([row[0] for row in here]) else rows


def _starves(price: Price, waited_s: float) -> bool:
    """Whether it has waited for what should be over by now: then it goes into the engine's queue.

    That is first come, first served, so that no smaller request overtakes it any more. One at a
    time, because a request in an engine's queue can't go elsewhere.
    """
    prefill = price.target.prefill
    replica = (price.target if prefill is None else prefill.among[0]).replica
    if replica is None:
        return False
    pending = replica.pending  # where the engine reports none, what is on its way is known
    is_busy = replica.on_the_way.waiting if pending is None else pending
    return not is_busy and waited_s > price.queue_s + price.memory_s
