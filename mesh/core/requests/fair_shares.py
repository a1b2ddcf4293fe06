"""What each tenant has been given of one model's engines while others waited, by its weight.

A counter per tenant: seconds of engine time / weight, as in Virtual Token Counter (Sheng et al.,
OSDI 2024, arXiv 2401.00588): prompt tokens that are not cached, and answer tokens, one of which
counts as ANSWER_FACTOR prompt tokens (its section 5 and the prices of the public APIs have 2 to 4),
at the seconds that engines need for one. What is estimated when a request is placed is corrected
by what its engine reports at the end.

The tenant with the least counter goes first. Counters that are within the same QUANTUM_S count as
equal, so that within it the order is by what is to be computed, which keeps prefixes together
(Deficit Longest Prefix Match: Cao et al., arXiv 2501.14312). A tenant that had nothing to wait for
can't have saved up more than CREDIT_S: its counter is lifted to that much below the least of those
who wait. So for any two tenants who wait throughout an interval, and could use the same places,
what they were given in it, divided by their weights, differs by at most

    2 × CREDIT_S + the dearest request of each / its weight

and what estimates were wrong by. It is not counted while nobody else waits: idle engines are
anybody's. Each router counts for itself: among n routers the bound is n times as wide.

A prompt that an engine computes delays whoever comes next, whatever the shares. So tenants are kept
apart: as many replicas as those who were given less use, to the nearest, are kept for them, once
these have been given all that they can compute.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

QUANTUM_S = 0.5  # as much as an engine's queue may hold by the default policy
CREDIT_S = 2.0  # above QUANTUM_S: who waits seldom goes before a backlog
LAG_S = 600.0  # behind the first: what is left of having been able to use no place for long
ANSWER_FACTOR = 2.0
ANSWER_TOKENS_START = 200.0  # before any was counted
ANSWER_WEIGHT = 0.1  # of one more answer in a tenant's mean, and of one more request's cost
KEPT_S = 60.0  # after a tenant's last request beside others'
TENANTS_MAX = 4096
OPEN_MAX = 65_536  # placements whose answers have not ended
USE_S = 10.0  # what replicas were given fades within that time
FADED_S = 1e-3  # nothing
LOOK_S = 0.1  # how old what is kept may be: finding it takes a look at all replicas


@dataclass(slots=True)
class Share:
    """One tenant's. `given_s`: its counter."""

    weight: float
    given_s: float
    seen_at: float
    answer_tokens: float = ANSWER_TOKENS_START
    cost_s: float | None = None  # of its usual request, as placed


@dataclass(slots=True)
class Use:
    """Seconds of engine time that one replica was given of late.

    `first_s`: of tenants that no other had been given less than; `more_s`: of all others.
    """

    first_s: float
    more_s: float
    at: float

    def fade(self, now: float) -> None:
        left = _left(self.at, now)
        self.first_s, self.more_s, self.at = self.first_s * left, self.more_s * left, now


def _left(since: float, now: float) -> float:
    """The part that has not faded of what was given then."""
    return math.exp((since - now) / USE_S)


class Placed(NamedTuple):
    """What was counted for one placement."""

    tenant: str
    prompt_tokens: float
    answer_tokens: float
    s_per_token: float
    # Where it is in the use of a replica:
    replica: str = ""
    generates: bool = True  # the answer too
    is_first: bool = False
    at: float = 0.0

    def took(
        self, prompt_tokens: float | None, answer_tokens: float | None, now: float
    ) -> "Placed":
        """The same with what was computed, as far as that is known. No engine computes for longer
        than has passed: where one reports more than that, and than was estimated, both counts are
        made smaller alike."""
        found = self._replace(
            prompt_tokens=self.prompt_tokens if prompt_tokens is None else prompt_tokens,
            answer_tokens=self.answer_tokens if answer_tokens is None else answer_tokens,
        )
        part = max(self.seconds, now - self.at) / max(found.seconds, 1e-9)
        if part >= 1.0:
            return found
        return found._replace(
            prompt_tokens=part * found.prompt_tokens, answer_tokens=part * found.answer_tokens
        )

    @property
    def seconds(self) -> float:
        return engine_s(self.prompt_tokens, self.answer_tokens, self.s_per_token)

    @property
    def use_s(self) -> float:
        """Of its seconds, those of the replica."""
        answer_tokens = self.answer_tokens if self.generates else 0.0
        return engine_s(self.prompt_tokens, answer_tokens, self.s_per_token)


def engine_s(prompt_tokens: float, answer_tokens: float, s_per_token: float) -> float:
    """What they take of an engine's time."""
    return (prompt_tokens + ANSWER_FACTOR * answer_tokens) * s_per_token


class FairShares:
    """Of one model's tenants, while more than one of them has had requests of late."""

    def __init__(self, weights: Mapping[str, float], waiting: Iterable[str], now: float) -> None:
        """`weights`: of tenants, 1 for others. `waiting`: who has had all of it until now."""
        self._weights = weights
        self._shares = {one: Share(weights.get(one, 1.0), 0.0, now) for one in waiting}
        self._open: dict[int, Placed] = {}  # by the request's key
        self._uses: dict[str, Use] = {}  # by replica
        self._kept: tuple[float, frozenset[str]] = -math.inf, frozenset()  # found at that time
        self._floor_s = 0.0

    def __len__(self) -> int:
        return len(self._shares)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """From now on by these."""
        self._weights = weights
        for tenant, share in self._shares.items():
            share.weight = weights.get(tenant, 1.0)

    def seen(self, tenant: str, waiting: Collection[str], now: float) -> Share:
        """A request of that tenant waits, or is placed while those `waiting` wait."""
        share = self._shares.get(tenant)
        if share is None:
            if len(self._shares) >= TENANTS_MAX:
                self._make_room(waiting)
            weight = self._weights.get(tenant, 1.0)
            share = self._shares[tenant] = Share(weight, self._floor_s - CREDIT_S, now)
        elif tenant not in waiting:
            self._lift(waiting)
        share.given_s = max(share.given_s, self._floor_s - CREDIT_S)
        share.seen_at = now
        return share

    def _lift(self, waiting: Collection[str]) -> None:
        """The floor rises with the least of those who wait, and with the most."""
        given = [self._shares[one].given_s for one in waiting if one in self._shares]
        if given:
            self._floor_s = max(self._floor_s, min(given), max(given) - LAG_S)

    def given_s(self, tenant: str) -> float:
        """Its counter."""
        share, least_s = self._shares.get(tenant), self._floor_s - CREDIT_S
        return least_s if share is None else max(share.given_s, least_s)

    def cost_s(self, tenant: str, usual_s: float) -> float:
        """Of its usual request, divided by its weight; `usual_s`: while none was placed."""
        share = self._shares.get(tenant)
        if share is None:
            return usual_s / self._weights.get(tenant, 1.0)
        return (usual_s if share.cost_s is None else share.cost_s) / share.weight

    def answer_tokens(self, tenant: str) -> float:
        """Of its usual answer."""
        share = self._shares.get(tenant)
        return ANSWER_TOKENS_START if share is None else share.answer_tokens

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def is_behind_others(self, tenant: str, now: float) -> bool:
        """Whether another tenant that has had requests of late was given less."""
        mine = self.given_s(tenant)
        return mine > self._floor_s - CREDIT_S and any(
            one.given_s < mine and now - one.seen_at <= KEPT_S
            for name, one in self._shares.items()
            if name != tenant
        )

    def kept(self, now: float) -> frozenset[str]:
        """Replicas for those who were given less."""
        if now - self._kept[0] >= LOOK_S:
            self._fade(now)
            used_s = sum(use.first_s for use in self._uses.values())
            most = heapq.nlargest(
                round(used_s / USE_S), self._uses.items(), key=lambda one: one[1].first_s
            )
            full = (name for name, use in most if use.first_s + use.more_s >= USE_S)
            self._kept = now, frozenset(full)
        return self._kept[1]

    def computes(
        self, replica: str, placed: Placed, now: float, *, generates: bool = True
    ) -> Placed:
        """It is placed there: count it in the replica's use. `generates`: the answer too."""
        is_first = not self.is_behind_others(placed.tenant, now)
        counted = placed._replace(replica=replica, generates=generates, is_first=is_first, at=now)
        self._uses.setdefault(replica, Use(0.0, 0.0, now))
        self._use(counted, counted.use_s, now)
        return counted

    def _use(self, placed: Placed, seconds: float, now: float) -> None:
        """So much more of its replica's time."""
        use = self._uses.get(placed.replica)
        if use is None:
            return
        use.fade(now)
        if placed.is_first:
            use.first_s = max(0.0, use.first_s + seconds)
        else:
            use.more_s = max(0.0, use.more_s + seconds)

    def _fade(self, now: float) -> None:
        for name, use in list(self._uses.items()):
            use.fade(now)
            if use.first_s + use.more_s < FADED_S:
                del self._uses[name]

    def placed(self, key: int, placed: Placed, *, is_followed: bool) -> None:
        """Count it. `is_followed`: its answer comes here."""
        share = self._shares[placed.tenant]
        seconds = placed.seconds
        share.given_s += seconds / share.weight
        before = seconds if share.cost_s is None else share.cost_s
        share.cost_s = before + ANSWER_WEIGHT * (seconds - before)
        if is_followed:
            self._open.pop(key, None)
            self._open[key] = placed
            if len(self._open) > OPEN_MAX:
                del self._open[next(iter(self._open))]

    def came_back(self, key: int, now: float) -> None:
        """It was not computed where it had been placed."""
        self._correct(key, 0.0, 0.0, now)

    def served(
        self, key: int, prompt_tokens: float | None, answer_tokens: float | None, now: float
    ) -> None:
        """What was computed for it, as far as its engine reported that."""
        took = self._correct(key, prompt_tokens, answer_tokens, now)
        share = None if took is None else self._shares.get(took.tenant)
        if took is not None and share is not None and answer_tokens is not None:
            share.answer_tokens += ANSWER_WEIGHT * (took.answer_tokens - share.answer_tokens)

    def _correct(
        self, key: int, prompt_tokens: float | None, answer_tokens: float | None, now: float
    ) -> Placed | None:
        """It took so much, as far as that is known, and not what was estimated."""
        placed = self._open.pop(key, None)
        if placed is None:
            return None
        took = placed.took(prompt_tokens, answer_tokens, now)
        if (share := self._shares.get(placed.tenant)) is not None:
            share.given_s += (took.seconds - placed.seconds) / share.weight
        self._use(placed, (took.use_s - placed.use_s) * _left(placed.at, now), now)
        return took

    def expire(self, waiting: Collection[str], now: float) -> bool:
        """Forget tenants that have had no request for long; whether fewer than two are left."""
        self._lift(waiting)
        self._fade(now)
        for tenant in [name for name, one in self._shares.items() if now - one.seen_at > KEPT_S]:
            if tenant not in waiting:
                del self._shares[tenant]
        return len(self._shares) < 2

    def _make_room(self, waiting: Collection[str]) -> None:
        """The longest silent one is forgotten."""
        silent = (name for name in self._shares if name not in waiting)
        oldest = min(silent, key=lambda name: self._shares[name].seen_at, default=None)
        if oldest is not None:
            del self._shares[oldest]
