"""E2: exploit a cached prefix if it is most of the prompt, else explore (Preble 3.2, Algorithm 1).

Exploit: among the targets that hold the longest node of the matched path, the one with the least
load cost. Explore: all targets, by load cost L + M + P (Algorithm 2), in seconds of computing: what
the target was given within the window H, what evicting for this prompt will cost those that share
the victims, and the prompt's own missing prefill. L counts what was given within the last three
minutes and not what runs now, because a prefix stays where it was placed; only token counts are
kept, and each target's own speed turns them into seconds.

The steps that the paper takes after an assignment are taken here when the next request comes, as
they only affect future requests: *rebalancing* turns a request from the most loaded target to the
least loaded while their loads differ by more than TH_BAL; *autoscaling* gives a prefix whose
requests wait twice as long as before a second home; *prefill/decode balancing* explores first where
decoding has left the processor idle. None applies below WARM requests per target (the authors'
number).

The paper leaves DECODERATIO open. Here it is seconds of decoding per second of prefill, this
prompt's included, and IMBALR is how often it may exceed the ratio of all targets together.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from random import Random
from typing import Generic, NamedTuple, TypeVar

from mesh.core.model.request import Request, Served
from mesh.core.policies.base import (
    Choice,
    Destination,
    Layered,
    LazyScores,
    Policy,
    Score,
    Target,
    speed_of,
)
from mesh.core.policies.e2_tree import (
    Assignment,
    LoadAccount,
    LoadWindow,
    RadixMatch,
    RadixNode,
    RadixTree,
)

# A prefix is replicated when "average queueing time doubles over H" (Preble 3.2), comparing the
# window's halves, and the later wait exceeds what computing the prefix once more costs.
WAITS_MIN = 5  # requests in each half, for an average that means something
PREFIXES_MAX = 4096  # watched at once; beyond it the longest unused is forgotten

Prefix = TypeVar("Prefix", bound=Hashable)


@dataclass(slots=True)
class QueueWaits:
    """Sums of one prefix, of this half of a window and of the one before."""

    half: int
    wait_s: float = 0.0
    requests: int = 0
    wait_s_before: float = 0.0
    requests_before: int = 0

    def enter(self, half: int) -> None:
        """Go on to that half; what is older than the one before it is dropped."""
        if half == self.half:
            return
        follows = half == self.half + 1
        self.wait_s_before = self.wait_s if follows else 0.0
        self.requests_before = self.requests if follows else 0
        self.half, self.wait_s, self.requests = half, 0.0, 0

    def doubled(self, least_s: float) -> bool:
        """Whether the average has, and is `least_s` or more."""
        if min(self.requests, self.requests_before) < WAITS_MIN:
            return False
        mean_s = self.wait_s / self.requests
        return mean_s >= least_s and mean_s >= 2.0 * self.wait_s_before / self.requests_before


class PrefixScaling(Generic[Prefix]):
    """The waits of requests, by recently used prefix."""

    def __init__(self, window_s: float) -> None:
        self._half_s = window_s / 2.0
        self._waits: OrderedDict[Prefix, QueueWaits] = OrderedDict()

    def waited(self, prefix: Prefix, wait_s: float, now: float) -> None:
        """A request with that prefix began to be answered after waiting so long."""
        half = int(now // self._half_s)
        waits = self._waits.setdefault(prefix, QueueWaits(half))
        self._waits.move_to_end(prefix)
        waits.enter(half)
        waits.wait_s += wait_s
        waits.requests += 1
        if len(self._waits) > PREFIXES_MAX:
            self._waits.popitem(last=False)

    def overloaded(self, prefix: Prefix, prefill_s: float, now: float) -> bool:
        """Whether another replica of this prefix, which costs `prefill_s`, is due."""
        waits = self._waits.get(prefix)
        if waits is None:
            return False
        waits.enter(int(now // self._half_s))
        return waits.doubled(prefill_s)

    def replicated(self, prefix: Prefix) -> None:
        """Start anew: waits before say nothing about two homes."""
        self._waits.pop(prefix, None)


TH_BAL = 1.5  # the authors' code, "HIGH_LOAD_THRESHOLD"
IMBALR = 2.0  # times the decode ratio of all targets
WARM = 50  # requests per target before loads are compared; the authors' code
SCORES_MAX = 16  # of the cheapest, for the receipt
LOAD_S: Callable[[LoadAccount], float] = attrgetter("load_s")
GIVEN: Callable[[LoadAccount], int] = attrgetter("given")


class E2Cost(NamedTuple):
    """What giving the request to one target costs, in seconds."""

    account: LoadAccount
    load_s: float
    evict_s: float
    prefill_s: float
    total_s: float  # L + M + P


@dataclass(frozen=True, slots=True)
class E2Options:
    """`window_s`: how far back a target's load reaches, in seconds (Preble 3.2: H).

    `warm`: requests per target before loads are compared (the authors' code).
    """

    window_s: float = 180.0
    warm: int = WARM

    def __post_init__(self) -> None:
        if self.warm < 0:
            raise ValueError(f"warm must be 0 or more, not {self.warm}")
        if not 0.0 < self.window_s < math.inf:
            raise ValueError(f"window_s must be more than 0, not {self.window_s}")


class E2(Layered):
    """Preble's global scheduler, over the available targets of one layer."""

    def __init__(
        self,
        dice: Random,
        *,
        blocks_max: int,
        window_s: float,
        th_bal: float = TH_BAL,
        imbalr: float = IMBALR,
        warm: int = WARM,
    ) -> None:
        """`blocks_max`: per target; `window_s`: Preble's H; `warm`: requests per target."""
        self._dice = dice
        self._blocks_max = blocks_max
        self._th_bal = th_bal
        self._imbalr = imbalr
        self._warm = warm
        self._tree: RadixTree[LoadAccount] = RadixTree()
        self._window = LoadWindow(window_s)
        self._scaling: PrefixScaling[RadixNode[LoadAccount]] = PrefixScaling(window_s)
        self._accounts: dict[str, LoadAccount] = {}
        self._under_way: dict[int, Assignment] = {}  # by the request's key

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """Exploit when more is cached than new, else explore."""
        self._expire(now)
        free = self._read_all(targets, request)
        match = self._tree.match(request.prompt.hashes, free)
        missed_tokens = request.prompt.uncached_tokens(match.blocks)
        if match.node is not None and missed_tokens < request.prompt.tokens - missed_tokens:
            return self._exploit(request, free, match, match.node, now)
        return self._explore(request, free, match)

    def hit_ratio(self, request: Request) -> float:
        hashes = request.prompt.hashes
        return self._tree.held_blocks(hashes) / len(hashes) if hashes else 0.0

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        self._expire(now)
        account = self._account(spot.name)
        leaf, held, shared = self._tree.insert(account, request.prompt.hashes)
        self._tree.count(account, leaf, 1)
        missed_tokens = request.prompt.uncached_tokens(held)
        generates = request.answer_tokens != 0
        assignment = Assignment(account, leaf, shared, missed_tokens, now, generates)
        self._window.add(assignment)
        if request.answer_inbox is None:
            self._under_way[request.key] = assignment

    def began(self, request: Request, spot: Destination, now: float) -> None:
        assignment = self._under_way.get(request.key)
        if assignment is None or assignment.began:
            return
        assignment.began = True
        if assignment.shared is not None:
            prefill_s = assignment.account.speed.prefill_s(assignment.missed_tokens)
            wait_s = max(0.0, now - assignment.at - prefill_s)
            self._scaling.waited(assignment.shared, wait_s, now)

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        assignment = self._under_way.get(request.key)
        if assignment is not None:
            self._window.answered(assignment, served)

    def left(self, request: Request, spot: Destination, now: float) -> None:
        assignment = self._under_way.pop(request.key, None)
        if assignment is not None and not assignment.began and self._window.take_back(assignment):
            self._tree.count(assignment.account, assignment.leaf, -1)

    def forget(self, spot: Destination) -> None:
        account = self._accounts.pop(spot.name, None)
        if account is not None:
            self._tree.forget(account)

    def go_on_from(self, earlier: Policy, *, copied: bool) -> None:
        """Go on with its tree and loads over another window. Beside one that stays, begin anew."""
        if isinstance(earlier, E2) and not copied:
            earlier._window.window_s = self._window.window_s
            self._tree, self._window = earlier._tree, earlier._window
            self._accounts, self._under_way = earlier._accounts, earlier._under_way

    # The two ways.

    def _exploit(
        self,
        request: Request,
        free: Mapping[LoadAccount, Target],
        match: RadixMatch[LoadAccount],
        prefix: RadixNode[LoadAccount],
        now: float,
    ) -> Choice:
        costs = self._costs(match.holders, request, match)
        best = self._least(costs)
        lightest = min(map(LOAD_S, free))
        if self._is_overloaded(best.account, lightest, free):
            light = self._lightest([*free], lightest)
            reason = (
                f"rebalance: {best.load_s:.1f} s of load where it is cached, {lightest:.1f} s there"
            )
            return self._choice(request, light, free, match, costs, reason)
        others = [account for account in free if account not in match.holders]
        prefill_s = best.account.speed.prefill_s(len(prefix.hashes) * request.prompt.block_tokens)
        if others and self._is_warm(free) and self._scaling.overloaded(prefix, prefill_s, now):
            self._scaling.replicated(prefix)
            light = self._lightest(others, min(map(LOAD_S, others)))
            reason = "replicate: requests with this prefix wait twice as long as before"
            return self._choice(request, light, free, match, costs, reason)
        ratio = match.blocks / len(request.prompt.hashes)
        reason = f"exploit: {ratio:.0%} of the prompt is cached, load cost {best.total_s:.2f} s"
        return self._choice(request, best.account, free, match, costs, reason)

    def _explore(
        self, request: Request, free: Mapping[LoadAccount, Target], match: RadixMatch[LoadAccount]
    ) -> Choice:
        costs = self._costs(free, request, match)
        decoding = self._decoding(costs)
        if decoding is not None:
            reason = "explore: it decodes much more than the others, prefill fits in"
            return self._choice(request, decoding, free, match, costs, reason)
        best = self._least(costs)
        reason = f"explore: load cost {best.total_s:.2f} s is the least"
        return self._choice(request, best.account, free, match, costs, reason)

    def _costs(
        self, accounts: Iterable[LoadAccount], request: Request, match: RadixMatch[LoadAccount]
    ) -> list[E2Cost]:
        """Algorithm 2. L is kept up to date by the window; victims cost their prefill slope."""
        prompt, matched_of, costs = request.prompt, match.blocks_of, list[E2Cost]()
        blocks, new = len(prompt.hashes), tuple.__new__
        missed_of: dict[int, int] = {}  # tokens, by blocks matched: many match the same beginning
        for account in accounts:
            matched, speed, load_s = matched_of.get(account, 0), account.speed, account.load_s
            evict_s = 0.0
            new_blocks = blocks - matched
            if account.requests and account.blocks + new_blocks > account.capacity_blocks:
                shared_blocks = self._tree.eviction_cost(account, new_blocks, match.path)
                evict_tokens = shared_blocks * prompt.block_tokens / account.requests
                evict_s = evict_tokens * speed.prefill_s_per_token
            missed_tokens = missed_of.get(matched)
            if missed_tokens is None:
                missed_tokens = missed_of[matched] = prompt.uncached_tokens(matched)
            s_per_token, base_s, _ = speed
            prefill_s = base_s + missed_tokens * s_per_token  # `Speed.prefill_s`, without the call
            total_s = load_s + evict_s + prefill_s
            # `E2Cost.__new__` takes twice as long.
            costs.append(new(E2Cost, (account, load_s, evict_s, prefill_s, total_s)))
        return costs

    def _least(self, costs: Sequence[E2Cost]) -> E2Cost:
        least = min(costs, key=itemgetter(4)).total_s
        ties = [cost for cost in costs if cost[4] == least]
        return ties[0] if len(ties) == 1 else self._dice.choice(ties)

    def _lightest(self, accounts: Sequence[LoadAccount], load_s: float) -> LoadAccount:
        return self._dice.choice([account for account in accounts if account.load_s == load_s])

    def _is_overloaded(
        self, account: LoadAccount, lightest_s: float, free: Collection[LoadAccount]
    ) -> bool:
        if account.load_s <= self._th_bal * lightest_s or not self._is_warm(free):
            return False
        return account.load_s >= max(map(LOAD_S, free))

    def _is_warm(self, free: Collection[LoadAccount]) -> bool:
        return sum(map(GIVEN, free)) >= self._warm * len(free)

    def _decoding(self, costs: Sequence[E2Cost]) -> LoadAccount | None:
        """The target whose decoding stands out, if any does."""
        accounts = [cost.account for cost in costs]
        if len(costs) < 2 or not self._is_warm(accounts):
            return None
        decode_s, prefill_s = 0.0, 0.0
        heavy_s = self._th_bal * min(map(LOAD_S, accounts))
        best, highest = None, 0.0
        for account, load_s, _, own_s, _ in costs:
            its_prefill_s = account.prefill_s
            decode_s += load_s - its_prefill_s
            prefill_s += its_prefill_s
            ratio = (load_s - its_prefill_s) / (its_prefill_s + own_s)
            if ratio > highest and load_s <= heavy_s:
                best, highest = account, ratio
        stands_out = highest * prefill_s > self._imbalr * decode_s
        return best if stands_out else None

    def _choice(
        self,
        request: Request,
        account: LoadAccount,
        free: Mapping[LoadAccount, Target],
        match: RadixMatch[LoadAccount],
        costs: Sequence[E2Cost],
        reason: str,
    ) -> Choice:
        shown = costs
        if len(costs) > SCORES_MAX:
            shown = sorted(costs, key=itemgetter(4))[:SCORES_MAX]  # by `total_s`
        scores = LazyScores(
            [(free[cost.account], cost, match.blocks_of.get(cost.account, 0)) for cost in shown],
            _score,
        )
        return Choice(free[account], reason, match.blocks_of.get(account, 0), scores)

    # Accounts.

    def _account(self, name: str) -> LoadAccount:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = LoadAccount(self._blocks_max)
        return account

    def _read_all(self, targets: Sequence[Target], request: Request) -> dict[LoadAccount, Target]:
        """The account of each; most have no new report."""
        read, accounts = {}, self._accounts
        for target in targets:
            account, replica = accounts.get(target.name), target.replica
            if account is None or replica is None or account.report is not replica.heartbeat:
                account = self._read(target, request)
            read[account] = target
        return read

    def _read(self, target: Target, request: Request) -> LoadAccount:
        """Its account, with its latest report."""
        account = self._account(target.name)
        report = None if target.replica is None else target.replica.heartbeat
        if report is None or report is not account.report:
            account.report, account.speed = report, speed_of(target)
            if report is not None and report.kv_capacity_tokens:
                blocks = int(report.kv_capacity_tokens / request.prompt.block_tokens)
                account.capacity_blocks = min(self._blocks_max, max(1, blocks))
            account.reprice()
        return account

    def _expire(self, now: float) -> None:
        for assignment in self._window.expire(now):
            self._tree.count(assignment.account, assignment.leaf, -1)


def _score(priced: tuple[Target, E2Cost, int]) -> Score:
    """Load is seconds of computing, not of waiting: no TTFT is claimed."""
    target, cost, matched_blocks = priced
    terms = {"load_s": cost.load_s, "evict_s": cost.evict_s, "prefill_s": cost.prefill_s}
    return Score(target, None, terms, matched_blocks)
