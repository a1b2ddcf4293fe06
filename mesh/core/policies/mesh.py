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
(`mesh.core.view.replica_sampling`): the holders that it names, the deepest first, idle ones, and
others at random.

Rejected: ranking by scores from 0 to 1 (weights then depend on the fleet); local first and peers
only when full (the far idle replica is often nearer in seconds); charging how much one more in a
batch slows down every token of all (its slope over requests running can't be told from what
prefills do to them meanwhile, and a wrong one outweighs all else).

What a first token costs at each candidate, in seconds: the arithmetic of the `mesh` policy.

Everything here is read from heartbeats, digests and hand-offs, at the speeds that were learned
from earlier answers (`mesh_lessons`). What nobody told is reckoned from what is known otherwise
(a queue from the requests in it), never taken for zero.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import ClassVar, NamedTuple, TypeVar

from mesh.core.model.request import Request, Served
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Choice, Destination, Score, Target
from mesh.core.policies.mesh_holdings import (
    HELD_NOTHING,
    CacheEstimate,
    CacheView,
    HeldPrefix,
    PromptHolders,
)
from mesh.core.policies.mesh_lessons import ReplicaSpeeds, SpeedModel, SpeedModels
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind

STALL_WEIGHT = 0.15  # of the decodes that our prefill stalls: they wait for one token in hundreds
# Of a first token's least time, for each that runs there: a larger batch makes every iteration a
# little longer, for as long as our answer lasts. How much can't be fitted (prefills hide it), but
# an idle replica beside a busy one must be worth something even to a prompt that is held there.
BATCH_WEIGHT = 0.02
SLOT_START_S = 0.1  # before an answer ended there: held for it, but nobody is shed for a guess
RTT_START_S = 0.5  # a peer that no ping has come back from


class Price(NamedTuple):
    """One candidate's. All in seconds; `seconds` is the sum, others' cost included."""

    seconds: float
    target: Target
    held: HeldPrefix
    tokens: float  # to compute there before the first one comes, those queued included
    running: float
    rtt_s: float
    line_s: float
    queue_s: float
    prefill_s: float
    base_s: float
    memory_s: float
    others_s: float

    @property
    def ttft_s(self) -> float:
        """What our own client waits."""
        return self.seconds - self.others_s

    def score(self) -> Score:
        """For the receipt."""
        return score(self)


PriceRow = tuple[
    float, Target, HeldPrefix, float, float, float, float, float, float, float, float, float
]


def score(row: PriceRow) -> Score:
    """For the receipt: what `Price.seconds` adds up from."""
    seconds, target, held, _, _, rtt_s, line_s, queue_s, prefill_s, base_s, memory_s, others_s = row
    terms = {
        "rtt_s": rtt_s,
        "line_s": line_s,
        "queue_s": queue_s,
        "prefill_s": prefill_s,
        "base_s": base_s,
        "memory_s": memory_s,
        "others_s": others_s,
    }
    return Score(target, seconds, terms, held.blocks)


class Prices:
    """Prices of one request, at one moment.

    They are made as plain tuples, of which `Price` are the names: naming a thousand of them to
    choose one would take longer than reckoning them.
    """

    def __init__(self, lessons: SpeedModel, request: Request, now: float) -> None:
        self._lessons = lessons
        self._request = request
        self._now = now
        self._prompt_tokens = request.prompt.tokens
        self._needed_tokens = request.prompt.tokens + lessons.output_tokens

    def rows(self, targets: Sequence[Target], known: PromptHolders) -> list[PriceRow]:
        """The price of each target; `known`: what they hold of the prompt."""
        # Half of what a decision takes, times the fleet: nothing is asked twice, or by a call.
        rows: list[PriceRow] = []
        lessons, standings, now, ready = self._lessons, self._lessons.standings, self._now, 0
        prompt_tokens, needed_tokens = self._prompt_tokens, self._needed_tokens
        here, there = known
        for target in targets:
            name, _, _, rtt_s, replica, peer, ahead = target
            if replica is None:
                if peer is not None:
                    rows.append(self._remote(target, peer, there.get(name, HELD_NOTHING)))
                continue
            has = here.get(name, HELD_NOTHING)
            stands, way = standings.get(name), replica.on_the_way
            if stands is None or stands.heartbeat is not replica.heartbeat:
                stands = self._stand(replica)
            s_per_token, base_s = stands.s_per_token, stands.base_s
            queued_tokens = stands.queued_tokens
            if queued_tokens is None:  # its agent doesn't say: count requests instead
                waiting = replica.load if replica.pending is None else replica.pending
                queued = waiting * lessons.prefill_tokens
            else:  # `Replica.prefill_queue_tokens`, without the call
                done = (now - replica.seen_at) / s_per_token if s_per_token else 0.0
                left = queued_tokens - done
                queued = (left if left > 0.0 else 0.0) + way.prefill_tokens
            stalled, line_s, memory_s = stands.stalled, 0.0, 0.0
            if ahead:
                ready = ready or _replicas_among(targets)
                line_s = ahead * lessons.prefill_tokens * s_per_token / ready
                stalled += ahead / ready
            free_tokens = stands.kv_reported_tokens - way.tokens
            if free_tokens < needed_tokens and replica.load:
                memory_s = self._memory_s(target, free_tokens, stands.running)
            if (over := replica.inside + way.count + 1 - stands.batch_max) > 0.0:
                memory_s = max(memory_s, self._slot_s(target, over, stands.running))
            if rtt_s is None:
                rtt_s = RTT_START_S
            tokens = prompt_tokens - has.tokens
            queue_s, prefill_s = queued * s_per_token, tokens * s_per_token
            others_s = stalled * prefill_s + stands.batch_s
            seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + others_s
            rows.append((
                seconds, target, has, tokens + queued, stands.running, rtt_s, line_s, queue_s,
                prefill_s, base_s, memory_s, others_s,
            ))  # fmt: skip
        return rows

    def _stand(self, replica: Replica) -> ReplicaSpeeds:
        """What its last word comes to; kept, but where it doesn't tell how many run there."""
        beat, kv_reported_tokens = replica.heartbeat, replica.kv_reported_tokens
        running = replica.load if beat.running is None else beat.running
        base_s, s_per_token, s_per_decode = self._lessons.speed_to_stand(beat)
        standing = ReplicaSpeeds(
            beat,
            s_per_token,
            running,
            base_s + s_per_decode * running,
            BATCH_WEIGHT * running * base_s,
            running * STALL_WEIGHT,
            math.inf if kv_reported_tokens is None else kv_reported_tokens,
            beat.prefill_queued_tokens,
            beat.batch_max or math.inf,
        )
        if beat.running is not None:
            self._lessons.standings[beat.replica] = standing
        return standing

    def _memory_s(self, target: Target, free_tokens: float | None, running: float) -> float:
        """Until answers that run there have given back the memory that this request lacks."""
        if free_tokens is None or free_tokens >= self._needed_tokens:
            return 0.0
        lessons = self._lessons
        given_back_per_s = max(1.0, running) * lessons.kv_tokens / lessons.of(target).residence_s
        return (self._needed_tokens - free_tokens) / given_back_per_s

    def _slot_s(self, target: Target, slots: float, running: float) -> float:
        """Until so many of the answers that run there have ended, each of which frees a slot."""
        answer_s = self._lessons.of(target).slot_s
        return slots * (SLOT_START_S if answer_s is None else answer_s / max(1.0, running))

    def _remote(self, target: Target, peer: Peer, held: HeldPrefix) -> PriceRow:
        lessons, model = self._lessons, self._request.model
        base_s, s_per_token, s_per_decode = lessons.speed(target)
        prefill_s = (self._prompt_tokens - held.tokens) * s_per_token
        rtt_s = RTT_START_S if target.rtt_s is None else target.rtt_s
        ready = max(1, peer.ready(model))
        typical_s = lessons.prefill_tokens * s_per_token / ready
        line_s = target.ahead * typical_s
        queue_s = self._peer_queue_s(peer, rtt_s, typical_s)
        running = peer.running(model)
        if running is None:
            running = lessons.running
        batch_s = BATCH_WEIGHT * running * base_s
        base_s += s_per_decode * running
        others_s = (running * STALL_WEIGHT + target.ahead / ready) * prefill_s + batch_s
        others_s += lessons.returns * rtt_s
        # Who runs nothing has nothing to give back: waiting for it would not help.
        memory_s = self._memory_s(target, peer.kv_free_tokens(model), running) if running else 0.0
        seconds = rtt_s + line_s + queue_s + prefill_s + base_s + memory_s + others_s
        tokens = (line_s + queue_s + prefill_s) / s_per_token
        return (
            seconds,
            target,
            held,
            tokens,
            running,
            rtt_s,
            line_s,
            queue_s,
            prefill_s,
            base_s,
            memory_s,
            others_s,
        )

    def _peer_queue_s(self, peer: Peer, rtt_s: float, typical_s: float) -> float:
        """In an engine there: what the digest said, and what has come since.

        What we sent there is counted, what others did is expected. `typical_s`: one more request's
        share of the region's time.
        """
        model = self._request.model
        told_s = peer.wait_s(model)
        age_s = self._now - peer.seen_at + rtt_s / 2
        unseen = len(peer.forwarded_at) + peer.requests_per_s * age_s
        unseen_s = max(0.0, unseen - peer.free(model)) * typical_s
        return (typical_s * max(1, peer.ready(model)) if told_s is None else told_s) + unseen_s


def _replicas_among(targets: Sequence[Target]) -> int:
    return sum(target.replica is not None for target in targets)


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


class MeshPolicy:
    """Weighs replicas and peers against each other; learns from each first token."""

    joint: ClassVar[bool] = True
    judges_load: ClassVar[bool] = True

    def __init__(self, settings: RouterSettings, dice: Random) -> None:
        self._dice = dice
        self._cache_view = CacheView(settings.index_blocks_max)
        self._speed_models = SpeedModels()
        # The last choice and whose it is: a choice needn't be followed.
        self._chosen: tuple[int, Price] | None = None
        self._expected: dict[int, Expected] = {}  # by key of the request
        self._estimates: dict[int, CacheEstimate] = {}  # the same, whoever chose

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The cheapest of the targets, all things counted; nobody if that one is not open."""
        lessons = self._speed_models.of(request.model)
        rows = Prices(lessons, request, now).rows(targets, self._cache_view.of(request, targets))
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
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        """What replicas and peers are estimated to hold of prompts."""
        return self._cache_view.indexes

    def holders(self, request: Request, most: int) -> list[str]:
        """Replicas that a large fleet's sample must not miss."""
        return self._cache_view.deepest(request, most, self._dice)

    def hit_ratio(self, request: Request) -> float:
        """Of the longest match that any replica here has."""
        return self._cache_view.hit_ratio(request)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """Remember what was expected; the prompt will be there once those before it are."""
        estimate = self._cache_view.estimate(request, spot, now)
        self._cache_view.computed(request, spot, now)
        chosen, self._chosen = self._chosen, None
        if chosen is None or chosen[0] != request.key or chosen[1].target.name != spot.name:
            price = None  # somebody else's choice
        else:
            price = chosen[1]
        if price is not None and price.target.replica is not None:
            self._fit(price.target, request)
        if request.answer_inbox is not None:
            return  # a peer's request is not followed
        _keep(self._estimates, request.key, estimate)
        if price is not None:
            expected = Expected(now, price.rtt_s, price.tokens, price.running)
            _keep(self._expected, request.key, expected)
            lessons = self._speed_models.of(request.model)
            if price.target.replica is not None and price.target.replica.heartbeat.running:
                lessons.batch(price.target.replica.heartbeat.running)
            prefill_tokens = request.prompt.tokens - price.held.tokens
            lessons.prompt(prefill_tokens, goes_on=self._cache_view.goes_on(request))

    def _fit(self, target: Target, request: Request) -> None:
        """An owner can't hold more than its memory."""
        assert target.replica is not None
        capacity = target.replica.heartbeat.kv_capacity_tokens
        if capacity:
            self._cache_view.fit(target.name, int(capacity / request.prompt.block_tokens))

    def began(self, request: Request, spot: Destination, now: float) -> None:
        """How long its first token took is the lesson."""
        estimate = self._estimates.get(request.key)
        if estimate is not None:
            self._estimates[request.key] = estimate._replace(is_computed=True)
        expected = self._expected.get(request.key)
        if expected is None or expected.began_at is not None:
            return
        ttft_s = now - expected.placed_at - expected.rtt_s
        lessons = self._speed_models.of(request.model)
        lessons.began(spot, expected.tokens, expected.running, ttft_s)
        self._expected[request.key] = expected._replace(began_at=now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        """What the answer cost."""
        lessons, expected = self._speed_models.of(request.model), self._expected.get(request.key)
        if expected is not None and expected.began_at is not None:
            lessons.resided(spot, now - expected.began_at)
        if served.output_tokens is not None:
            lessons.answer(request.prompt.tokens, served.output_tokens)
        self._cache_view.served(request, spot, served, self._estimates.pop(request.key, None))

    def left(self, request: Request, spot: Destination, now: float) -> None:
        """Nothing more comes of that attempt; if nothing ever came, nothing is there."""
        self._expected.pop(request.key, None)
        estimate = self._estimates.pop(request.key, None)
        if estimate is not None:
            self._cache_view.left(request, spot, estimate)

    def forget(self, spot: Destination) -> None:
        """It is gone, or came back empty."""
        self._cache_view.forget(spot)
        self._speed_models.forget(spot)

    def expire(self, now: float) -> None:
        """What nobody asked for in a long time is believed no more."""
        self._cache_view.expire(now)


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
