"""`mesh`: least expected time to first token over everyone at once, and over waiting.

For each candidate, in seconds:

    rtt_s       to a peer region, and back to us with the first token
  + queue_s     prompts that are computed before ours: told by its heartbeat or digest, plus what
                was handed off since
  + prefill_s   prompt tokens it does not hold × its seconds per token
  + base_s      what every first token costs there
  + memory_s    until memory for the prompt is given back, where it is full
  + others_s    what others pay: decodes that our prefill stalls

It is GORGO's sum (section 4) with SkyWalker's counting of work on its way, made symmetric (the
region itself is a candidate like its peers) and charged with what it does to others, without
which batches decay: pure greed leaves replicas idle. Speeds are each replica's own, learned by
its agent; what came of our estimates stretches them. A hot prefix replicates by itself: its
holder's queue grows until computing it elsewhere is quicker.

Everyone who serves the model is a candidate, busy or not, because the busy holder of a long
prefix may still be the quickest. A replica is *open* while the prompts queued there take less
than QUEUE_S; that is enough to keep it busy from one heartbeat to the next, and more would be
better placed later, by what is known then. If the cheapest is not open, the request is held.

A prompt is entered in the index when its first token has come: while it is being computed it is
nobody's to share. What is unknown is taken to be as bad as the worst that is known, never zero.
Near ties are broken at random.

Rejected: ranking by scores from 0 to 1 (weights then depend on the fleet); local first and peers
only when full (the far idle replica is often nearer in seconds).
"""

from collections.abc import Sequence
from random import Random
from typing import ClassVar, NamedTuple

from mesh.core.gossip.news import News
from mesh.core.gossip.told import ToldPrefixes
from mesh.core.policies.base import Choice, Spot, Target
from mesh.core.policies.mesh_holdings import Holdings
from mesh.core.policies.mesh_lessons import Lessons
from mesh.core.policies.mesh_prices import Price, Prices
from mesh.core.request import Request, Served
from mesh.core.settings import RouterSettings

SCORES_MAX = 8  # of the cheapest candidates, for the receipt
TIE_S, TIE_RATIO = 0.001, 0.01  # estimates are not better than that
import os

QUEUE_S = float(os.environ.get("M_Q", "0.5"))
AGE = float(os.environ.get("M_A", "1"))
AWAITED_MAX = 65_536  # placements whose first token has not come


class Expected(NamedTuple):
    """What was expected of one placement, until its answer ends."""

    placed_at: float
    rtt_s: float
    tokens: float  # to compute before the first token, those queued included
    running: float
    began_at: float | None = None


class Mesh:
    """Weighs replicas and peers against each other; learns from each first token."""

    joint: ClassVar[bool] = True
    judges_load: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings, dice: Random) -> None:
        self._dice = dice
        self._holdings = Holdings(settings.index_blocks_max)
        self._lessons = Lessons()
        self._prices = Prices(self._lessons)
        self._chosen: Price | None = None  # of the last choice, until it is placed
        self._expected: dict[int, Expected] = {}  # by key of the request

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The cheapest of the targets, all things counted; nobody if that one is not open."""
        prices = self._prices.of(request, targets, self._holdings.of(request, targets), now)
        best_s = min(prices).seconds
        good_s = best_s + max(TIE_S, TIE_RATIO * best_s)
        ties = [price for price in prices if price.seconds <= good_s]
        best = ties[0] if len(ties) == 1 else self._dice.choice(ties)
        scores = [price.score() for price in sorted(prices)[:SCORES_MAX]]
        waited_s = now - request.arrived_at
        if _is_open(best) or (AGE and waited_s > best.queue_s + best.memory_s):
            self._chosen = best
            reason = f"first token in {best.ttft_s:.3f} s: the least of {len(prices)}"
            return Choice(best.target, reason, best.held.blocks, scores, best.held.tokens)
        reason = f"{best.target.name} is worth waiting for: {best.ttft_s:.3f} s"
        return Choice(None, reason, 0, scores)

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that any replica here has."""
        return self._holdings.hit_ratio(request)

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """Remember what was expected; the prompt will be there once those before it are."""
        self._holdings.computed(request, spot, now)
        chosen, self._chosen = self._chosen, None
        if request.answer_inbox is not None or chosen is None:
            return  # a peer's request is not followed
        if chosen.target.name != spot.name or chosen.target.kind is not spot.kind:
            return  # somebody else's choice
        if chosen.target.replica is not None:
            self._fit(chosen.target, request)
        if len(self._expected) >= AWAITED_MAX:
            self._expected.pop(next(iter(self._expected)))
        self._expected[request.key] = Expected(now, chosen.rtt_s, chosen.tokens, chosen.running)
        if chosen.target.replica is not None:
            beat = chosen.target.replica.heartbeat
            if beat.running and beat.decode_tokens_per_s:
                self._lessons.batch(beat.running, 1.0 / beat.decode_tokens_per_s)
        self._lessons.prompt(request.prompt.tokens - chosen.held.tokens)

    def _fit(self, target: Target, request: Request) -> None:
        """An owner can't hold more than its memory."""
        assert target.replica is not None
        capacity = target.replica.heartbeat.kv_capacity_tokens
        if capacity:
            self._holdings.fit(target.name, int(capacity / request.prompt.block_tokens))

    def began(self, request: Request, spot: Spot, now: float) -> None:
        """How long its first token took is the lesson."""
        expected = self._expected.get(request.key)
        if expected is None or expected.began_at is not None:
            return
        ttft_s = now - expected.placed_at - expected.rtt_s
        self._lessons.began(spot, expected.tokens, expected.running, ttft_s)
        self._expected[request.key] = expected._replace(began_at=now)

    def served(self, request: Request, spot: Spot, served: Served, now: float) -> None:
        """What the answer cost."""
        expected = self._expected.get(request.key)
        if expected is not None and expected.began_at is not None:
            self._lessons.resided(spot, now - expected.began_at)
        if served.output_tokens is not None:
            self._lessons.answer(request.prompt.tokens, served.output_tokens)
            self._holdings.answered(request, spot, served.output_tokens)

    def left(self, request: Request, spot: Spot, now: float) -> None:
        """Nothing more comes of that attempt."""
        self._expected.pop(request.key, None)

    def forget(self, spot: Spot) -> None:
        """It is gone, or came back empty."""
        self._holdings.forget(spot)
        self._lessons.forget(spot)

    def tell(self, news: News) -> None:
        """What replicas here hold is said there."""
        self._holdings.tell(news)

    def hear(self, told: ToldPrefixes) -> None:
        """What peers hold stands there."""
        self._holdings.hear(told)


def _is_open(price: Price) -> bool:
    """Whether it should be given work now."""
    return price.queue_s <= QUEUE_S and price.memory_s <= 0.0
