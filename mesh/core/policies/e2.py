"""E2: exploit a cached prefix if it is most of the prompt, else explore (Preble 3.2, Algorithm 1).

Exploit: among the targets that hold the longest node of the matched path, the one with the
least load cost. Explore: all targets, by load cost L + M + P (Algorithm 2), in seconds of
computing: what the target was given within the window, what evicting for this prompt will cost
those who share the victims, and the prompt's own missing prefill.

What the paper does after the assignment is done here when the next request comes, because it
only ever changes where future requests go: *rebalancing* turns a request away from the most
loaded target to the least loaded while their loads differ by more than TH_BAL; *autoscaling*
gives a prefix whose requests wait twice as long as before a second home, between which the load
cost then divides its subtree; *prefill/decode balancing* explores first where decoding has left
the processor idle. Thresholds that compare loads need loads: below WARM requests per target,
which is the authors' number, none of the three applies.

The paper leaves DECODERATIO open. Here it is seconds of decoding per second of prefill, this
prompt's included, and IMBALR how often it may exceed the ratio of all targets together: a ratio
that suits every model and device is not known, one that stands out among equals is. A target
that rebalancing takes load from gets none back this way.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from random import Random
from typing import NamedTuple

from mesh.core.policies.base import Choice, Layered, Score, Spot, Target
from mesh.core.policies.e2_scaling import Scaling
from mesh.core.policies.e2_tree import Match, Node, RadixTree
from mesh.core.policies.e2_window import Account, Assignment, Window
from mesh.core.policies.speed import speed_of
from mesh.core.requests.request import Request, Served

TH_BAL = 1.5  # the authors' code, "HIGH_LOAD_THRESHOLD"
IMBALR = 2.0  # times the decode ratio of all targets
WARM = 50  # requests per target before loads are compared; the authors' code
SCORES_MAX = 16  # of the cheapest, for the receipt


class Cost(NamedTuple):
    """What giving the request to one target costs, in seconds."""

    account: Account
    load_s: float
    evict_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """L + M + P."""
        return self.load_s + self.evict_s + self.prefill_s


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
        self._tree: RadixTree[Account] = RadixTree()
        self._window = Window(window_s)
        self._scaling: Scaling[Node[Account]] = Scaling(window_s)
        self._accounts: dict[str, Account] = {}
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
        """Of the longest match that anyone has, free or not."""
        hashes = request.prompt.hashes
        return self._tree.held_blocks(hashes) / len(hashes) if hashes else 0.0

    def placed(self, request: Request, spot: Spot, now: float) -> None:
        """Its load counts from the assignment on, and its prefix will be there."""
        self._expire(now)
        account = self._account(spot.name)
        leaf, held, shared = self._tree.insert(account, request.prompt.hashes)
        self._tree.count(account, leaf, 1)
        missed_tokens = request.prompt.uncached_tokens(held)
        assignment = Assignment(account, leaf, shared, missed_tokens, now)
        self._window.add(assignment)
        if request.answer_inbox is None:
            self._under_way[request.key] = assignment

    def began(self, request: Request, spot: Spot, now: float) -> None:
        """It has waited; a prefix whose requests wait ever longer needs another home."""
        assignment = self._under_way.get(request.key)
        if assignment is None or assignment.began:
            return
        assignment.began = True
        if assignment.shared is not None:
            prefill_s = assignment.account.speed.prefill_s(assignment.missed_tokens)
            wait_s = max(0.0, now - assignment.at - prefill_s)
            self._scaling.waited(assignment.shared, wait_s, now)

    def served(self, request: Request, spot: Spot, served: Served, now: float) -> None:
        """Its length enters the average answer's."""
        assignment = self._under_way.get(request.key)
        if assignment is not None:
            self._window.answered(assignment, served)

    def left(self, request: Request, spot: Spot, now: float) -> None:
        """What never began to be answered was no load."""
        assignment = self._under_way.pop(request.key, None)
        if assignment is not None and not assignment.began and self._window.take_back(assignment):
            self._tree.count(assignment.account, assignment.leaf, -1)

    def forget(self, spot: Spot) -> None:
        """Whoever comes back under that name holds nothing and was given nothing."""
        account = self._accounts.pop(spot.name, None)
        if account is not None:
            self._tree.forget(account)

    # The two ways.

    def _exploit(
        self,
        request: Request,
        free: Mapping[Account, Target],
        match: Match[Account],
        prefix: Node[Account],
        now: float,
    ) -> Choice:
        costs = [self._cost(account, request, match) for account in match.holders]
        best = self._least(costs)
        lightest = min(account.load_s for account in free)
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
            light = self._lightest(others, min(account.load_s for account in others))
            reason = "replicate: requests with this prefix wait twice as long as before"
            return self._choice(request, light, free, match, costs, reason)
        ratio = match.blocks / len(request.prompt.hashes)
        reason = f"exploit: {ratio:.0%} of the prompt is cached, load cost {best.total_s:.2f} s"
        return self._choice(request, best.account, free, match, costs, reason)

    def _explore(
        self, request: Request, free: Mapping[Account, Target], match: Match[Account]
    ) -> Choice:
        costs = [self._cost(account, request, match) for account in free]
        decoding = self._decoding(costs)
        if decoding is not None:
            reason = "explore: it decodes much more than the others, prefill fits in"
            return self._choice(request, decoding, free, match, costs, reason)
        best = self._least(costs)
        reason = f"explore: load cost {best.total_s:.2f} s is the least"
        return self._choice(request, best.account, free, match, costs, reason)

    def _cost(self, account: Account, request: Request, match: Match[Account]) -> Cost:
        """Algorithm 2. L is kept up to date by the window; victims cost their prefill slope."""
        prompt, speed = request.prompt, account.speed
        matched = match.blocks_of.get(account, 0)
        evict_s = 0.0
        new_blocks = len(prompt.hashes) - matched
        if account.requests and account.blocks + new_blocks > account.capacity_blocks:
            shared_blocks = self._tree.eviction_cost(account, new_blocks, match.path)
            evict_tokens = shared_blocks * prompt.block_tokens / account.requests
            evict_s = evict_tokens * speed.prefill_s_per_token
        prefill_s = speed.prefill_s(prompt.uncached_tokens(matched))
        return Cost(account, account.load_s, evict_s, prefill_s)

    def _least(self, costs: Sequence[Cost]) -> Cost:
        totals = [cost.total_s for cost in costs]
        least = min(totals)
        ties = [cost for cost, total in zip(costs, totals, strict=True) if total == least]
        return ties[0] if len(ties) == 1 else self._dice.choice(ties)

    def _lightest(self, accounts: Sequence[Account], load_s: float) -> Account:
        return self._dice.choice([account for account in accounts if account.load_s == load_s])

    def _is_overloaded(
        self, account: Account, lightest_s: float, free: Collection[Account]
    ) -> bool:
        if account.load_s <= self._th_bal * lightest_s or not self._is_warm(free):
            return False
        return account.load_s >= max(other.load_s for other in free)

    def _is_warm(self, free: Collection[Account]) -> bool:
        return sum(account.given for account in free) >= self._warm * len(free)

    def _decoding(self, costs: Sequence[Cost]) -> Account | None:
        """The target whose decoding stands out, if any does."""
        accounts = [cost.account for cost in costs]
        if len(costs) < 2 or not self._is_warm(accounts):
            return None
        decode_s, prefill_s = 0.0, 0.0
        heavy_s = self._th_bal * min(account.load_s for account in accounts)
        best, highest = None, 0.0
        for account, load_s, _, own_s in costs:
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
        account: Account,
        free: Mapping[Account, Target],
        match: Match[Account],
        costs: Sequence[Cost],
        reason: str,
    ) -> Choice:
        shown = costs
        if len(costs) > SCORES_MAX:
            shown = nsmallest(SCORES_MAX, costs, key=lambda cost: cost.total_s)
        scores = [_score(free[cost.account], cost, match) for cost in shown]
        return Choice(free[account], reason, match.blocks_of.get(account, 0), scores)

    # Accounts.

    def _account(self, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(self._blocks_max)
        return account

    def _read_all(self, targets: Sequence[Target], request: Request) -> dict[Account, Target]:
        """The account of each; most have said nothing new."""
        read, accounts = {}, self._accounts
        for target in targets:
            account, replica = accounts.get(target.name), target.replica
            if account is None or replica is None or account.said is not replica.heartbeat:
                account = self._read(target, request)
            read[account] = target
        return read

    def _read(self, target: Target, request: Request) -> Account:
        """Its account, with what it says of itself now."""
        account = self._account(target.name)
        said = None if target.replica is None else target.replica.heartbeat
        if said is None or said is not account.said:
            account.said, account.speed = said, speed_of(target)
            if said is not None and said.kv_capacity_tokens:
                blocks = int(said.kv_capacity_tokens / request.prompt.block_tokens)
                account.capacity_blocks = min(self._blocks_max, max(1, blocks))
            account.reprice()
        return account

    def _expire(self, now: float) -> None:
        for assignment in self._window.expire(now):
            self._tree.count(assignment.account, assignment.leaf, -1)


def _score(target: Target, cost: Cost, match: Match[Account]) -> Score:
    """Load is seconds of computing, not of waiting: no TTFT is claimed."""
    terms = {"load_s": cost.load_s, "evict_s": cost.evict_s, "prefill_s": cost.prefill_s}
    return Score(target, None, terms, match.blocks_of.get(cost.account, 0))
