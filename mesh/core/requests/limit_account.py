"""What one tenant, or key, may still spend at one router: token buckets, and this router's part.

Each limit is a bucket of its size which fills evenly, so over any time t at most its size plus
t times its rate is spent. All routers keep the whole bucket: each takes out what it spends itself
at once, and what others spent as it hears of it. What others spend meanwhile it can't know, and a
question would cost a round trip. So of a bucket's content each router spends at most its part until
the others have heard of that (as in the demarcation protocol of Barbara and Garcia-Molina, 1992;
here nothing is agreed on: what was spent beyond is a debt in every bucket).

Parts follow what is asked for: EVEN of the whole is split evenly, the rest by the tokens a second
that each router was asked for, as all were told of them. A request that is larger than the part is
let in where nobody else asks, or by turns: each router's turn is as likely as its part is large.
"""

from collections import deque
from math import inf
from random import Random
from typing import NamedTuple

from schemas.ids import RegionId, RouterId
from schemas.limits import LimitRow, LimitsTable

PERIOD_S = 0.25  # between messages
UNSEEN_PERIODS = 3  # after which others have heard: links of 300 ms, one message lost
EVEN = 0.2
WANTED_MIN = 0.1  # tokens a second: less is none
SMOOTHED = 0.3  # of what was asked in the last period, in the mean
OUTPUT_TOKENS_START = 256.0  # expected of an answer, before any was seen
OUTPUT_SMOOTHED = 0.1
FRESH_S = 2.0  # what a younger account has spent is in nobody's buckets
IDLE_PERIODS = 20
MINUTE_S, DAY_S = 60.0, 86_400.0
FREED_S = 1.0  # when to try again where no clock says when there is room

REQUESTS, TOKENS, OPEN = 0, 1, 2  # what is counted
BUCKETS = (
    ("requests_per_minute", REQUESTS, MINUTE_S),
    ("tokens_per_minute", TOKENS, MINUTE_S),
    ("requests_per_day", REQUESTS, DAY_S),
    ("tokens_per_day", TOKENS, DAY_S),
    ("concurrent_requests", OPEN, 0.0),
)
TIMED = 4  # of these fill with time
DEBT_S = 3600.0  # of a limit's rate: as much as others may say that they have overspent
COUNTED_MAX = (
    4 * 1024 * 1024
)  # tokens of one request: more than any model's context is a false count


class Before(NamedTuple):
    """What was spent this day before this process started, as accounts told it `since_s` ago."""

    requests: float = 0.0
    tokens: float = 0.0
    since_s: float = 0.0


NOTHING_BEFORE = Before()


class Exceeded(NamedTuple):
    """The limit that a request is refused for. `retry_after_s` inf: it is larger than the limit."""

    limit: str
    most: float
    asked: float
    retry_after_s: float
    is_part: bool = False  # there is room, but not in this router's part


class Bucket:
    """One limit. `level`: what is left, less than nothing where too much was spent. `full`: what
    this router might spend if the bucket were full, and others kept theirs."""

    __slots__ = (
        "capacity",
        "counted",
        "debt_max",
        "full",
        "kind",
        "level",
        "name",
        "place",
        "rate",
        "text",
    )

    def __init__(self, place: int, capacity: float) -> None:
        self.place, self.capacity, self.text = place, capacity, f"{capacity:.0f}"
        self.name, self.kind, period_s = BUCKETS[place]
        self.rate = capacity / period_s if period_s else 0.0
        self.level = self.full = capacity
        self.debt_max = max(capacity, DEBT_S * self.rate)
        self.counted = 0.0  # of the account's own sum, what is taken out

    def pass_time(self, spent: float, elapsed_s: float) -> None:
        """`spent`: the account's own sum now."""
        level = self.level - (spent - self.counted) + elapsed_s * self.rate
        self.level = min(self.capacity, level)
        self.counted = spent

    def start_level(self, before: Before) -> float:
        """What there was, less what was spent before: when that was, and what filled until this
        process began, is not known."""
        spent = (before.requests, before.tokens, 0.0)[self.kind]
        return min(self.capacity, max(0.0, self.capacity - spent) + before.since_s * self.rate)


Rest = tuple[float, Bucket | None]
NO_REST: Rest = (inf, None)


class Claim:
    """What another process has spent, as it said last, and what was taken out of each bucket for
    it, by place, that comes back: no more ever does."""

    __slots__ = ("assumed", "born", "requests", "tokens", "under_way", "wanted")

    def __init__(self, row: LimitRow) -> None:
        self.born, self.wanted = row.born, row.wanted
        self.requests, self.tokens = 0.0, 0.0
        self.under_way = [0.0] * len(BUCKETS)  # for its requests that are not over
        self.assumed: list[float] | None = None  # since it is silent


class Origin(NamedTuple):
    """A process that spends: a router, or a batch runner."""

    region: RegionId
    router: RouterId


Sums = tuple[float, float, float]  # of requests, of tokens, of requests under way
LOOK_AGAIN = -inf, -inf, -inf


class Account:
    """One tenant's, or key's. `sums`: what this process has spent, with what it holds; of requests
    that are over `over_tokens`. `most`: what the sums may grow to before the buckets are looked at
    again. `rests`: the same with its bucket; of requests, of tokens."""

    __slots__ = (
        "asked",
        "born",
        "born_at",
        "buckets",
        "claims",
        "expected_tokens",
        "history",
        "idle",
        "limits",
        "looked_at",
        "most",
        "name",
        "output_tokens",
        "over_tokens",
        "rests",
        "share",
        "sums",
        "tokens_most",
        "turn",
        "turn_used_at",
        "wanted",
    )

    def __init__(
        self, name: str, limits: LimitsTable, born: int, share: float, now: float, before: Before
    ) -> None:
        self.name, self.born, self.born_at = name, born, now
        self.sums: Sums = (0.0, 0.0, 0.0)
        self.over_tokens, self.asked, self.wanted = 0.0, 0.0, 0.0
        self.share, self.turn, self.idle = share, share >= 1.0, IDLE_PERIODS + 1
        self.turn_used_at: float | None = None  # the sum of requests with the one that used it
        self.output_tokens = self.expected_tokens = OUTPUT_TOKENS_START
        self.claims: dict[Origin, Claim] = {}
        start = (0.0, 0.0, 0.0, 0.0)
        self.history = deque([start] * UNSEEN_PERIODS, UNSEEN_PERIODS)
        self.looked_at = now
        self.most: Sums = LOOK_AGAIN
        self.rests: tuple[Rest, Rest] = (NO_REST, NO_REST)
        self.buckets: tuple[Bucket, ...] = ()
        self.follow(limits, before)

    def follow(self, limits: LimitsTable, before: Before = NOTHING_BEFORE) -> None:
        """These limits hold from now on; what was used up stays so."""
        self.limits, self.tokens_most = limits, limits.tokens_most
        for bucket in self.buckets:
            bucket.pass_time(self.sums[bucket.kind], 0.0)
        for claim in self.claims.values():
            self._end_silence(claim)
        old = {bucket.place: bucket for bucket in self.buckets}
        sizes = ((place, getattr(limits, BUCKETS[place][0])) for place in range(len(BUCKETS)))
        self.buckets = tuple(Bucket(place, size) for place, size in sizes if size is not None)
        for bucket in self.buckets:
            bucket.counted = self.sums[bucket.kind]
            if (was := old.get(bucket.place)) is not None:
                bucket.level -= was.capacity - was.level
            else:
                under_way = (0.0, self.held, self.sums[OPEN])[bucket.kind]
                bucket.level = bucket.start_level(before) - under_way  # comes back as they end
                for claim in self.claims.values():
                    claim.under_way[bucket.place] = 0.0
        self.most = LOOK_AGAIN

    def had_spent(self, before: Before, now: float) -> None:
        """It turns out that this was spent before it began."""
        filled_s = now - self.born_at
        for bucket in self.buckets:
            level = bucket.start_level(before) - bucket.counted + filled_s * bucket.rate
            bucket.level = min(bucket.level, level)
        self.most = LOOK_AGAIN

    # What this process spends.

    @property
    def held(self) -> float:
        """The tokens that requests under way are expected to cost."""
        return self.sums[TOKENS] - self.over_tokens

    def take(self, prompt_tokens: int, answer_max: float, now: float) -> float | Exceeded:
        """Set aside what a request of that prompt is expected to cost, in tokens; or why not.
        `answer_max`: tokens of the longest answer that it may have."""
        limits = self.limits
        tokens = prompt_tokens * limits.uncached_weight
        if answer_max:
            answer = self.expected_tokens
            if answer > answer_max:
                answer = answer_max
            prompt = tokens
            tokens += answer * limits.output_weight
            if tokens > (most := self.tokens_most) >= prompt:
                tokens = most
        self.asked += 1.0 + tokens
        requests, spent, under_way = self.sums
        requests += 1.0
        spent += tokens
        under_way += 1.0
        most_requests, most_spent, most_under_way = self.most
        if (requests > most_requests or spent > most_spent or under_way > most_under_way) and (
            exceeded := self._look(tokens, now)
        ) is not None:
            return exceeded
        self.sums = requests, spent, under_way
        self.idle = 0
        return tokens

    def give_back(self, tokens: float) -> None:
        """The request that was let in last is refused after all."""
        requests, spent, under_way = self.sums
        if self.turn_used_at == requests:
            self.turn, self.turn_used_at = True, None
        self.sums = requests - 1.0, spent - tokens, under_way - 1.0

    def settle(self, held: float, uncached: int, cached: int, output: int) -> None:
        """A request is over that was expected to cost `held` tokens; it has cost these."""
        if uncached + cached + output > COUNTED_MAX:
            uncached, cached, output = 0, 0, COUNTED_MAX
        cost = self.limits.cost(uncached, cached, output)
        self.over_tokens += cost
        requests, spent, under_way = self.sums
        self.sums = requests, spent + cost - held, under_way - 1.0
        self.idle = 0
        if output:
            mean = self.output_tokens
            seen = output if output <= self.tokens_most else self.tokens_most
            self.output_tokens = mean = mean + OUTPUT_SMOOTHED * (seen - mean)
            # Never few, as the next ones may be longer.
            self.expected_tokens = mean if mean > OUTPUT_TOKENS_START else OUTPUT_TOKENS_START

    def spend(self, cost: float) -> None:
        """A request that nobody asked for here has cost that many tokens."""
        requests, spent, under_way = self.sums
        self.sums = requests + 1.0, spent + cost, under_way
        self.over_tokens += cost
        self.idle = 0

    def look(self, now: float) -> None:
        """See what is in the buckets, and what of it this router may spend."""
        elapsed_s, self.looked_at = now - self.looked_at, now
        rests = [NO_REST, NO_REST, NO_REST]
        sums, then, share = self.sums, self.history[0], self.share
        for bucket in self.buckets:
            kind = bucket.kind
            spent = sums[kind]
            bucket.pass_time(spent, elapsed_s)
            unseen = max(0.0, spent - then[kind])
            mine = bucket.level if share >= 1.0 else share * (bucket.level + unseen) - unseen
            if (up_to := spent + mine) < rests[kind][0]:
                rests[kind] = up_to, bucket
                bucket.full = bucket.capacity - bucket.level + mine
        self.most = rests[REQUESTS][0], rests[TOKENS][0], rests[OPEN][0]
        self.rests = rests[REQUESTS], rests[TOKENS]

    def _look(self, tokens: float, now: float) -> Exceeded | None:
        self.look(now)
        most, sums, cost = self.most, self.sums, (1.0, tokens, 1.0)
        is_large = False
        for bucket in self.buckets:
            kind, need, level = bucket.kind, cost[bucket.kind], bucket.level
            if need > bucket.capacity:
                return Exceeded(bucket.name, bucket.capacity, need, inf)
            if need > level:
                wait_s = (need - level) / bucket.rate if bucket.rate else FREED_S
                return Exceeded(bucket.name, bucket.capacity, need, wait_s)
            if sums[kind] + need > most[kind]:
                if not self._may_exceed_part(bucket):
                    return Exceeded(bucket.name, bucket.capacity, need, FREED_S, is_part=True)
                is_large = True
        if is_large and self.turn:
            self.turn, self.turn_used_at = False, sums[REQUESTS] + 1.0
        return None

    def _may_exceed_part(self, bucket: Bucket) -> bool:
        if self.sums[bucket.kind] > self.history[0][bucket.kind]:
            return False  # it has spent what others have not heard of
        return self.turn or not any(claim.wanted for claim in self.claims.values())

    # What others spend.

    def hear(self, origin: Origin, row: LimitRow, age_s: float, now: float) -> None:
        """What that process said `age_s` ago."""
        claim = self.claims.get(origin)
        is_known = claim is not None and claim.born == row.born
        if not is_known:
            self.look(now)
            self.forget(origin)
            claim = self.claims[origin] = Claim(row)
        assert claim is not None
        self._end_silence(claim)
        if not is_known and row.age_s >= FRESH_S:
            # It began before; what it spent is in what its own buckets lack.
            claim.requests, claim.tokens = row.requests, row.tokens
            for bucket in self.buckets:
                self._join(claim, bucket, row, age_s)
        for bucket in self.buckets:
            spent = 0.0
            if bucket.kind == REQUESTS:
                spent = row.requests - claim.requests
            elif bucket.kind == TOKENS:
                spent = row.tokens - claim.tokens
            # A region's word may use up a limit, and never give more than it used.
            bucket.level -= max(0.0, min(spent, bucket.level + bucket.debt_max))
            if is_known or row.age_s < FRESH_S:
                self._set_under_way(claim, bucket, (0.0, row.held, row.open)[bucket.kind])
        claim.wanted = row.wanted
        claim.requests = max(claim.requests, row.requests)
        claim.tokens = max(claim.tokens, row.tokens)
        self.most = LOOK_AGAIN

    def _set_under_way(self, claim: Claim, bucket: Bucket, claimed: float) -> None:
        taken = min(claimed, bucket.capacity)
        bucket.level += claim.under_way[bucket.place] - taken
        bucket.level = min(bucket.capacity, bucket.level)
        claim.under_way[bucket.place] = taken

    def _join(self, claim: Claim, bucket: Bucket, row: LimitRow, age_s: float) -> None:
        """Of two that did not hear of each other, the bucket that is emptier."""
        if bucket.place >= TIMED:
            self._set_under_way(claim, bucket, row.open)
        elif bucket.place < len(row.lacks):
            lacks = min(row.lacks[bucket.place] - age_s * bucket.rate, bucket.capacity)
            before = bucket.level
            bucket.level = min(before, bucket.capacity - max(0.0, lacks))
            if bucket.kind == TOKENS:
                claim.under_way[bucket.place] = min(row.held, before - bucket.level)

    def _end_silence(self, claim: Claim) -> None:
        """What was assumed of it is known now, or never will be."""
        if claim.assumed is not None:
            for bucket in self.buckets:
                level = bucket.level + claim.assumed[bucket.place]
                bucket.level = min(bucket.capacity, level)
            claim.assumed = None

    def assume(self, origin: Origin, processes: int, elapsed_s: float) -> None:
        """That process is silent: it may spend its part of what there was, and of what fills."""
        claim = self.claims.get(origin)
        if claim is None:
            return
        share, is_first = self._share_of(claim.wanted, processes), claim.assumed is None
        if claim.assumed is None:
            claim.assumed = [0.0] * len(BUCKETS)
        for bucket in self.buckets:
            there = max(0.0, bucket.level) if is_first else bucket.rate * elapsed_s
            claim.assumed[bucket.place] += share * there
            bucket.level -= share * there
        self.most = LOOK_AGAIN

    def forget(self, origin: Origin) -> None:
        """That process is gone, and what it held is free."""
        claim = self.claims.pop(origin, None)
        if claim is None:
            return
        self._end_silence(claim)
        for bucket in self.buckets:
            self._set_under_way(claim, bucket, 0.0)

    # Periods.

    def turn_period(self, processes: int, dice: Random, now: float) -> None:
        """A period is over. `processes`: that spend, this one among them."""
        mean = self.wanted + SMOOTHED * (self.asked / PERIOD_S - self.wanted)
        self.wanted, self.asked = (mean if mean > WANTED_MIN else 0.0), 0.0
        self.idle += 1
        self.share = self._share_of(self.history[0][3], processes)
        if not self.turn:  # one that comes stays until a request uses it, as clients ask seldom
            self.turn = self.share >= 1.0 or dice.random() < self.share / UNSEEN_PERIODS
        self.look(now)

    def told(self, now: float) -> LimitRow:
        """What others are told now: what is spent from here on they can't know."""
        self.history.append((*self.sums, self.wanted))
        self.look(now)
        if self.idle > IDLE_PERIODS:
            self.most = LOOK_AGAIN  # nobody looks until the next request
        return self.row(now)

    @property
    def is_news(self) -> bool:
        """Whether others are to hear of it soon."""
        return not self.is_idle or self.history[-1][:OPEN] != self.sums[:OPEN]

    def _share_of(self, wanted: float, processes: int) -> float:
        if processes <= 1:
            return 1.0
        others = sum(claim.wanted for claim in self.claims.values())
        whole = self.history[0][3] + others
        even = 1.0 / processes
        return even if whole <= 0.0 else EVEN * even + (1.0 - EVEN) * wanted / whole

    @property
    def is_idle(self) -> bool:
        """Whether nothing has happened here for IDLE_PERIODS."""
        return self.idle > IDLE_PERIODS and self.sums[OPEN] <= 0.0 and not self.wanted

    @property
    def used(self) -> float:
        """The part of its limits that was used up when it was looked at, of the one of which the
        most was: 0, and it is as if it had never been used."""
        parts = (1.0 - bucket.level / bucket.capacity for bucket in self.buckets)
        return max(parts, default=0.0)

    def row(self, now: float) -> LimitRow:
        """What others are to know."""
        lacks = [0.0] * TIMED
        for bucket in self.buckets:
            if bucket.place < TIMED:
                lacks[bucket.place] = max(0.0, bucket.capacity - bucket.level)
        requests, _, is_open = self.sums
        return LimitRow(
            name=self.name, born=self.born, age_s=max(0.0, now - self.born_at),
            requests=max(0.0, requests), tokens=max(0.0, self.over_tokens),
            held=max(0.0, self.held), open=max(0.0, is_open), wanted=self.wanted,
            lacks=tuple(lacks),
        )  # fmt: skip
