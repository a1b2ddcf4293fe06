"""`mesh`: least expected time to first token over everyone at once, and over waiting.

For each candidate, in seconds:

    rtt_s       to a peer region, and back to us with the first token
  + line_s      those held in its region who go first
  + queue_s     prompts that are computed before ours: told by its heartbeat or digest, plus what
                was handed off since
  + prefill_s   prompt tokens it does not hold × its seconds per token
  + base_s      what every first token costs there, more where many are running
  + memory_s    until memory for the prompt, or a slot in the batch, is given back, where all are
                taken
  + others_s    what others pay: decodes that our prefill stalls, those in line behind us, a larger
                batch for all that run there, and the next turns of this conversation, which will
                follow it to the region it went to

It is GORGO's sum (section 4) with SkyWalker's counting of work on its way, made symmetric (the
region itself is a candidate like its peers) and charged with what it does to others, without
which batches decay: pure greed leaves replicas idle. Speeds are each candidate's own, fitted to
what its placements came to; before it has answered, its agent's word. A hot prefix replicates by
itself: its holder's queue grows until computing it elsewhere is quicker.

Everyone who serves the model is a candidate, busy or not, because the busy holder of a long
prefix may still be the quickest. A replica is *open* while the prompts queued there take less
than QUEUE_S; that is enough to keep it busy from one heartbeat to the next, and more would be
better placed later, by what is known then. If the cheapest is a replica that is not open, the
request is held. If it is a peer, it goes there, and waits there if it must: where a prefix is and
how long the lines are is known beforehand, which replica will be free is known there first.

A prompt counts as held from its placement on: while it is being computed it is in the queue that
is priced as well. A queue, a speed or a number of running requests that nobody tells is reckoned
from what is usual, never taken for zero; memory or a size of batch that nobody tells is not
priced. Near ties are broken at random. Of a large fleet it is shown some
(`mesh.core.region.roster`): the holders that it names, the deepest first, idle ones, and others at
random.

Rejected: ranking by scores from 0 to 1 (weights then depend on the fleet); local first and peers
only when full (the far idle replica is often nearer in seconds); charging how much one more in a
batch slows down every token of all (its slope over requests running can't be told from what
prefills do to them meanwhile, and a wrong one outweighs all else).
"""

from collections.abc import Sequence
from operator import itemgetter
from random import Random
from typing import ClassVar, NamedTuple, TypeVar

from mesh.core.gossip.news import News
from mesh.core.gossip.siblings import Siblings
from mesh.core.gossip.told import ToldPrefixes
from mesh.core.policies.base import Choice, Spot, Target
from mesh.core.policies.mesh_holdings import Belief, Holdings
from mesh.core.policies.mesh_lessons import Courses
from mesh.core.policies.mesh_prices import Price, Prices, score
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.requests.request import Request, Served
from mesh.core.settings import RouterSettings

SCORES_MAX = 8  # of the cheapest candidates, for the receipt
TIE_S, TIE_RATIO = 0.001, 0.01  # estimates are not better than that
QUEUE_S = 0.5
AWAITED_MAX = 65_536  # placements whose first token has not come


T = TypeVar("T")


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
        self._courses = Courses()
        # The last choice and whose it is: a choice needn't be followed.
        self._chosen: tuple[int, Price] | None = None
        self._expected: dict[int, Expected] = {}  # by key of the request
        self._relied: dict[int, Belief] = {}  # the same, whoever chose

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The cheapest of the targets, all things counted; nobody if that one is not open."""
        lessons = self._courses.of(request.model)
        rows = Prices(lessons, request, now).rows(targets, self._holdings.of(request, targets))
        cheapest = sorted(rows, key=itemgetter(0))[:SCORES_MAX]
        picked = cheapest[0]
        good_s = picked[0] + max(TIE_S, TIE_RATIO * picked[0])
        if len(cheapest) > 1 and cheapest[1][0] <= good_s:
            picked = self._dice.choice([row for row in rows if row[0] <= good_s])
            if all(row is not picked for row in cheapest):
                cheapest[-1] = picked  # its price is the one that must be told
        best = Price._make(picked)
        scores = [score(row) for row in cheapest]
        waited_s, is_guess = now - request.arrived_at, not lessons.knows(best.target)
        if best.target.peer is not None or _is_open(best) or _starves(best, waited_s):
            self._chosen = request.key, best
            reason = f"first token in {best.ttft_s:.3f} s: the least of {len(rows)}"
            held = best.held
            return Choice(best.target, reason, held.blocks, scores, held.tokens, is_guess)
        reason = f"nearest: {best.target.name}, first token in {best.ttft_s:.3f} s"
        return Choice(None, reason, 0, scores, is_guess=is_guess)

    @property
    def replica_index(self) -> PrefixIndex[str]:
        """What replicas are believed to hold of prompts."""
        return self._holdings.replica_index

    def holders(self, request: Request, most: int) -> list[str]:
        """Replicas that a large fleet's sample must not miss."""
        return self._holdings.deepest(request, most, self._dice)

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that any replica here has."""
        return self._holdings.hit_ratio(request)

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """Remember what was expected; the prompt will be there once those before it are."""
        belief = self._holdings.belief(request, spot, now)
        self._holdings.computed(request, spot, now)
        chosen, self._chosen = self._chosen, None
        if chosen is None or chosen[0] != request.key or chosen[1].target.name != spot.name:
            price = None  # somebody else's choice
        else:
            price = chosen[1]
        if price is not None and price.target.replica is not None:
            self._fit(price.target, request)
        if request.answer_inbox is not None:
            return  # a peer's request is not followed
        _keep(self._relied, request.key, belief)
        if price is not None:
            expected = Expected(now, price.rtt_s, price.tokens, price.running)
            _keep(self._expected, request.key, expected)
            lessons = self._courses.of(request.model)
            if price.target.replica is not None and price.target.replica.heartbeat.running:
                lessons.batch(price.target.replica.heartbeat.running)
            prefill_tokens = request.prompt.tokens - price.held.tokens
            lessons.prompt(prefill_tokens, goes_on=self._holdings.goes_on(request))

    def _fit(self, target: Target, request: Request) -> None:
        """An owner can't hold more than its memory."""
        assert target.replica is not None
        capacity = target.replica.heartbeat.kv_capacity_tokens
        if capacity:
            self._holdings.fit(target.name, int(capacity / request.prompt.block_tokens))

    def began(self, request: Request, spot: Spot, now: float) -> None:
        """How long its first token took is the lesson."""
        belief = self._relied.get(request.key)
        if belief is not None:
            self._relied[request.key] = belief._replace(is_computed=True)
        expected = self._expected.get(request.key)
        if expected is None or expected.began_at is not None:
            return
        ttft_s = now - expected.placed_at - expected.rtt_s
        lessons = self._courses.of(request.model)
        lessons.began(spot, expected.tokens, expected.running, ttft_s)
        self._expected[request.key] = expected._replace(began_at=now)

    def served(self, request: Request, spot: Spot, served: Served, now: float) -> None:
        """What the answer cost."""
        lessons, expected = self._courses.of(request.model), self._expected.get(request.key)
        if expected is not None and expected.began_at is not None:
            lessons.resided(spot, now - expected.began_at)
        if served.output_tokens is not None:
            lessons.answer(request.prompt.tokens, served.output_tokens)
        self._holdings.served(request, spot, served, self._relied.pop(request.key, None))

    def left(self, request: Request, spot: Spot, now: float) -> None:
        """Nothing more comes of that attempt; if nothing ever came, nothing is there."""
        self._expected.pop(request.key, None)
        belief = self._relied.pop(request.key, None)
        if belief is not None:
            self._holdings.left(request, spot, belief)

    def forget(self, spot: Spot) -> None:
        """It is gone, or came back empty."""
        self._holdings.forget(spot)
        self._courses.forget(spot)

    def expire(self, now: float) -> None:
        """What nobody asked for in a long time is believed no more."""
        self._holdings.expire(now)

    def tell(self, news: News) -> None:
        """What replicas here hold is said there."""
        self._holdings.tell(news)

    def hear(self, told: ToldPrefixes) -> None:
        """What peers hold stands there."""
        self._holdings.hear(told)

    def share(self, siblings: Siblings) -> None:
        """What replicas here hold is known in common."""
        self._holdings.share(siblings)


def _keep(table: dict[int, T], key: int, value: T) -> None:
    """Enter a value; the oldest makes room."""
    if len(table) >= AWAITED_MAX:
        del table[next(iter(table))]
    table[key] = value


def _is_open(price: Price) -> bool:
    """Whether it should be given work now."""
    return price.queue_s <= QUEUE_S and price.memory_s <= 0.0


def _starves(price: Price, waited_s: float) -> bool:
    """Whether it has waited for what should be over by now: then it waits in the engine's queue.

    There it is first come, first served: nobody smaller can go before it any more. One at a
    time, for whoever waits in an engine can't go elsewhere.
    """
    replica = price.target.replica
    return replica is not None and not replica.pending and waited_s > price.queue_s + price.memory_s
