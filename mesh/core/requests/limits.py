"""Limits of tenants and keys at one router: what its clients spend, what others say they spent.

Every PERIOD_S the host sends what `turn_period` returns, and feeds in what others send. A process
that is silent for SILENT_S is assumed to spend its part, and after GONE_S none: regions that can't
hear each other each allow the whole limit from then on, as clients of a region that is down ask
another one.

Names are `t:` and a tenant, or `k:` and the id of a key. Of what is heard of names that nobody has
asked here yet the last word is kept, for the account that begins with the first request.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import inf
from random import Random

from mesh.core.requests.limit_account import (
    NOTHING_BEFORE,
    OPEN,
    Account,
    Before,
    Exceeded,
    Origin,
    Rest,
)
from schemas.ids import REGION_ROUTERS_MAX
from schemas.limits import ROWS_MAX, LimitClaims, Limited, LimitRow, LimitsTable

SILENT_S = 1.0
GONE_S = 10.0
RESTART_S = 1.0  # no process starts twice within
ACCOUNTS_MAX = 8192  # that are kept
TRIED_MAX = 16
HEARD_MAX = 16_384  # rows about names without an account
MESSAGES_MAX = 8  # a period
ROWS_MIN = 64
HEARD_ROWS_MAX = 2560  # a period, of all processes: 14 µs of an event loop each
AGAIN_PERIODS = 64  # between rows of an account that is used up in part, and idle


Least = tuple[Rest, Rest]  # of requests and of tokens: what is left here, and of which limit


class Held(list[tuple[Account, float]]):
    """What was set aside for a request: for each account the tokens."""

    __slots__ = ()

    def settle(self, uncached: int, cached: int, output: int) -> None:
        """The request is over, and has cost these tokens."""
        for account, tokens in self:
            account.settle(tokens, uncached, cached, output)


def least(held: Iterable[tuple[Account, float]]) -> Least:
    """Of requests and of tokens, the limit of which this router might spend the least when its
    account was last looked at, less what was spent since."""
    requests_left = tokens_left = inf
    of_requests = of_tokens = None
    for account, _ in held:
        requests, tokens, _ = account.sums
        (requests_most, of_these), (tokens_most, of_those) = account.rests
        if (left := requests_most - requests) < requests_left:
            requests_left, of_requests = left, of_these
        if (left := tokens_most - tokens) < tokens_left:
            tokens_left, of_tokens = left, of_those
    return (requests_left, of_requests), (tokens_left, of_tokens)


class _Process:
    __slots__ = ("epoch", "heard_at", "seq", "since")

    def __init__(self, epoch: int, now: float) -> None:
        self.epoch, self.seq, self.heard_at, self.since = epoch, -1, now, now


class LimitKeeper:
    """One process's, from its start. All times are seconds on one clock that never goes back."""

    def __init__(
        self, origin: Origin, epoch: int, regions: Iterable[str], dice: Random, now: float
    ) -> None:
        """`epoch`: differs at every start; `regions`: of the mesh, this one's among them."""
        self._origin, self._epoch, self._dice = origin, epoch, dice
        self._regions = frozenset(regions)
        self._started_at = self._turned_at = now
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._born = self._periods = 0
        self._processes: dict[Origin, _Process] = {}
        self._heard: OrderedDict[tuple[str, Origin], tuple[LimitRow, float]] = OrderedDict()
        self._before: dict[str, Before] = {}
        self._before_at = now
        self._known: Mapping[str, LimitsTable] = {}
        self._tells_all = False  # also of idle accounts, in the next period

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def is_used(self) -> bool:
        """Whether anybody has limits, as far as it knows."""
        return bool(self._known or self._accounts)

    def spent_before(self, before: Mapping[str, Before], now: float) -> None:
        """What names spent this day before this process started."""
        self._before, self._before_at = dict(before), now
        for name, account in self._accounts.items():
            if (spent := self._before.pop(name, None)) is not None:
                account.had_spent(spent, now)

    def know(self, limits: Mapping[str, LimitsTable]) -> None:
        """The limits of all names that have any: of these an account is kept too where others alone
        are asked, so that one of them that starts again can be told."""
        self._known = limits
        for name, account in self._accounts.items():
            if (given := limits.get(name)) is not None and given != account.limits:
                account.follow(given)

    # Requests.

    def take(
        self, limited: Limited, prompt_tokens: int, now: float, *, answer_max: float = inf
    ) -> Held | tuple[str, Exceeded]:
        """Set aside what a request is expected to cost, by each of its limits; or the first name
        and limit that it exceeds. Then nothing is set aside. `answer_max`: tokens of the longest
        answer that it may have."""
        held, accounts = Held(), self._accounts
        for name, limits in limited:
            account = accounts.get(name) or self._begin(name, limits, now)
            if account.limits is not limits:
                account.follow(limits)
            tokens = account.take(prompt_tokens, answer_max, now)
            if isinstance(tokens, Exceeded):
                for other, others in held:
                    other.give_back(others)
                return name, tokens
            held.append((account, tokens))
        return held

    def remaining(self, limited: Limited, now: float) -> Least:
        """Of these limits on requests and on tokens, the one of which the least is left here."""
        accounts = [self._accounts[name] for name, _ in limited if name in self._accounts]
        for account in accounts:
            account.look(now)
        return least((account, 0.0) for account in accounts)

    def spent(self, limited: Limited, tokens: tuple[int, int, int], now: float) -> None:
        """A request that was not asked about, a batch job's line, has cost these tokens: uncached,
        cached and output."""
        for name, limits in limited:
            account = self._accounts.get(name) or self._begin(name, limits, now)
            account.spend(limits.cost(*tokens))

    def _begin(self, name: str, limits: LimitsTable, now: float) -> Account:
        if len(self._accounts) >= ACCOUNTS_MAX:
            self._make_room(now)
        self._born += 1
        before = self._before.pop(name, NOTHING_BEFORE)._replace(since_s=now - self._before_at)
        account = Account(name, limits, self._born, 1.0 / self._count(now), now, before)
        self._accounts[name] = account
        for origin in self._processes:
            if (last := self._heard.pop((name, origin), None)) is not None:
                account.hear(origin, last[0], now - last[1], now)
        return account

    def _make_room(self, now: float) -> None:
        """Forget an account: of the next few one without a request under way, of which the least
        is used up. Who asks under ever new names, as holders of tokens may if their issuer lets
        them, frees no limit so."""
        least_used, least = (True, inf), ""
        for name in list(islice(self._accounts, TRIED_MAX)):
            account = self._accounts[name]
            account.look(now)
            if (used := (account.sums[OPEN] > 0.0, account.used)) < least_used or not least:
                least_used, least = used, name
            self._accounts.move_to_end(name)
        del self._accounts[least]

    # Other processes.

    def hear(self, claims: LimitClaims, now: float) -> None:
        """What another process says; that its region has sent it was checked. So a region can make
        others forget what its own processes said, at most once in RESTART_S of each."""
        origin = Origin(claims.region, claims.router)
        if origin == self._origin or claims.region not in self._regions:
            return
        process = self._processes.get(origin)
        if process is None or process.epoch != claims.epoch:
            if process is not None and now - process.since < RESTART_S:
                return
            others = sum(known.region == claims.region for known in self._processes)
            if process is None and others >= 2 * REGION_ROUTERS_MAX:  # batch runners are more
                return
            self._forget(origin)
            self._tells_all = True
            process = self._processes[origin] = _Process(claims.epoch, now)
        if claims.seq <= process.seq:
            return
        process.seq, process.heard_at = claims.seq, now
        for row in claims.rows:
            account = self._accounts.get(row.name)
            if account is None and (limits := self._known.get(row.name)) is not None:
                account = self._begin(row.name, limits, now)
            if account is not None:
                account.hear(origin, row, 0.0, now)
                continue
            self._heard[row.name, origin] = row, now
            self._heard.move_to_end((row.name, origin))
            while len(self._heard) > HEARD_MAX:
                self._heard.popitem(last=False)

    def turn_period(self, now: float) -> Iterator[LimitClaims]:
        """What others are to be told: at least one message, also of nothing. Call it every
        PERIOD_S."""
        self._periods += 1
        self._miss_silent(now)
        rows = self._rows(now)
        for start in range(0, max(1, len(rows)), ROWS_MAX):
            yield LimitClaims(
                region=self._origin.region,
                router=self._origin.router,
                epoch=self._epoch,
                seq=self._periods * MESSAGES_MAX + start // ROWS_MAX,
                rows=tuple(rows[start : start + ROWS_MAX]),
            )

    def _miss_silent(self, now: float) -> None:
        elapsed_s, self._turned_at = now - self._turned_at, now
        for origin, process in list(self._processes.items()):
            silent_s = now - process.heard_at
            if silent_s > GONE_S:
                self._forget(origin)
            elif silent_s > SILENT_S:
                for account in self._accounts.values():
                    if account.is_idle:
                        continue
                    account.assume(origin, self._count(now), elapsed_s)

    def _rows(self, now: float) -> list[LimitRow]:
        """What others are to hear now of accounts; of very many, each in its turn."""
        processes = self._count(now)
        tells_all, self._tells_all = self._tells_all, False
        told: list[Account] = []
        for account in list(self._accounts.values()):
            if account.is_news:
                account.turn_period(processes, self._dice, now)
                told.append(account)
            elif tells_all or (account.born + self._periods) % AGAIN_PERIODS == 0:
                account.look(now)
                if account.used <= 0.0:
                    del self._accounts[account.name]
                else:
                    told.append(account)
        most = min(MESSAGES_MAX * ROWS_MAX, max(ROWS_MIN, HEARD_ROWS_MAX // processes))
        if len(told) > most:
            start = self._periods * most % len(told)
            told = (told[start:] + told[:start])[:most]
        return [account.told(now) for account in told]

    def _count(self, now: float) -> int:
        """Processes that spend. Right after the start, regions that are not heard yet are too."""
        heard = 1 + len(self._processes)
        if now - self._started_at > GONE_S:
            return heard
        regions = {origin.region for origin in self._processes} | {self._origin.region}
        return heard + len(self._regions) - len(regions)

    def _forget(self, origin: Origin) -> None:
        if self._processes.pop(origin, None) is not None:
            for account in self._accounts.values():
                account.forget(origin)
            for key in [key for key in self._heard if key[1] == origin]:
                del self._heard[key]
