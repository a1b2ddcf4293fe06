"""Limits over many routers that hear of each other late, or not: what is admitted in any time."""

import random
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count, product

import pytest

from mesh.core.requests import limits as module
from mesh.core.requests.limit_account import COUNTED_MAX, PERIOD_S, Before, Exceeded, Origin
from mesh.core.requests.limits import Held, LimitKeeper, least
from schemas.exchange import TOKENS_MAX
from schemas.ids import RegionId, RouterId
from schemas.limits import LimitClaims, Limited, LimitRow, LimitsTable, decode_claims, encode_claims

BOUND = 0.05
PER_MINUTE = 1200
PER_S = PER_MINUTE / 60
WARM_S = 1.0
ROUTER = RouterId("router")

Rate = Callable[[int, float], float]  # of a region, at a time: requests a second


def keeper(region: str = "us", regions: tuple[str, ...] = ("us",), seed: int = 1) -> LimitKeeper:
    return LimitKeeper(Origin(RegionId(region), ROUTER), 1, regions, random.Random(seed), 0.0)


def of(**limits: float) -> Limited:
    return (("t:acme", LimitsTable.model_validate(limits)),)


class World:
    """Routers, one a region; messages between them are late, and a part of them is lost."""

    def __init__(self, regions: int, limited: Limited, seed: int, loss: float = 0.02) -> None:
        self._chance, self._loss, self._limited = random.Random(seed), loss, limited
        names = tuple(f"r{number}" for number in range(regions))
        self.keepers = [keeper(name, names, seed + number) for number, name in enumerate(names)]
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self.admitted: list[tuple[float, float]] = []  # when, and what it cost
        self.refused = 0
        self.is_cut: Callable[[int, int, float], bool] = lambda one, other, now: False

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heappush(self._due, (when, next(self._numbers), what))

    def run(self, rate: Rate, tokens: int, seconds: float) -> None:
        for number in range(len(self.keepers)):
            self.at(self._chance.random() * PERIOD_S, self._period(number))
            self.at(WARM_S, self._arrival(number, rate, tokens))
        while self._due and self._due[0][0] < seconds + WARM_S:
            when, _, what = heappop(self._due)
            what(when)

    def _period(self, number: int) -> Callable[[float], None]:
        def period(now: float) -> None:
            for claims in self.keepers[number].turn_period(now):
                data = encode_claims(claims)
                for other, there in enumerate(self.keepers):
                    is_lost = self._chance.random() < self._loss
                    if other != number and not is_lost and not self.is_cut(number, other, now):
                        self.at(now + self._chance.uniform(0.005, 0.15), heard(there, data))
            self.at(now + PERIOD_S * self._chance.uniform(0.95, 1.1), period)

        return period

    def _arrival(self, number: int, rate: Rate, tokens: int) -> Callable[[float], None]:
        def arrival(now: float) -> None:
            per_s = rate(number, now - WARM_S)
            if per_s <= 0.0:
                self.at(now + 0.05, arrival)
                return
            self.at(now + self._chance.expovariate(per_s), arrival)
            there = self.keepers[number]
            prompt = int(tokens * self._chance.uniform(0.5, 1.5))
            held = there.take(self._limited, prompt, now, answer_max=0.0)
            if not isinstance(held, Held):
                self.refused += 1
                return
            cost = int(prompt * self._chance.uniform(0.7, 1.3))
            self.admitted.append((now, cost))
            over_at = now + self._chance.uniform(0.2, 2.0)
            self.at(over_at, lambda now: held.settle(cost, 0, 0))

        return arrival

    def most_at_once(self, per_s: float, *, tokens: bool) -> float:
        """The most by which any time's admitted requests, or tokens, exceed that time's rate."""
        above = most = last = 0.0
        for when, cost in self.admitted:
            above = max(0.0, above - per_s * (when - last)) + (cost if tokens else 1.0)
            most, last = max(most, above), when
        return most


def heard(there: LimitKeeper, data: bytes) -> Callable[[float], None]:
    return lambda now: there.hear(decode_claims(data), now)


def even(regions: int) -> Rate:
    return lambda number, now: 2 * PER_S / regions


def moving(regions: int) -> Rate:
    return lambda number, now: 2 * PER_S if int(now / 5) % regions == number else 0.0


def bursts(regions: int) -> Rate:
    return lambda number, now: 30 * PER_S / regions if now % 20 < 1.5 else 0.0


def one(regions: int) -> Rate:
    return lambda number, now: 2 * PER_S if number == 0 else 0.0


@pytest.mark.parametrize("rate", [even, moving, bursts, one])
@pytest.mark.parametrize("regions", [1, 3, 10])
def test_in_any_time_at_most_the_limit_and_a_twentieth_is_admitted(
    regions: int, rate: Callable[[int], Rate]
) -> None:
    world = World(regions, of(requests_per_minute=PER_MINUTE), seed=regions)
    world.run(rate(regions), 10, 70)
    most = world.most_at_once(PER_S, tokens=False)
    print(f"{regions} regions, {rate.__name__}: {most / PER_MINUTE - 1:+.1%}")
    assert most <= PER_MINUTE * (1 + BOUND)
    if rate is not bursts:  # and nothing of it is left unused
        assert len(world.admitted) >= 0.95 * (PER_MINUTE + 70 * PER_S)


@pytest.mark.parametrize("regions", [1, 10])
def test_tokens_are_held_to_what_engines_counted(regions: int) -> None:
    world = World(regions, of(tokens_per_minute=PER_MINUTE * 100), seed=regions)
    world.run(even(regions), 100, 70)
    assert world.most_at_once(PER_S * 100, tokens=True) <= PER_MINUTE * 100 * (1 + BOUND)
    spent = sum(cost for _, cost in world.admitted)
    assert spent >= 0.95 * (PER_MINUTE + 70 * PER_S) * 100


def test_requests_that_are_larger_than_a_routers_part_take_turns() -> None:
    """Each as large as a fifth of the limit, of ten routers."""
    world = World(10, of(tokens_per_minute=60_000), seed=1)
    world.run(lambda number, now: 0.5, 12_000, 100)
    spent = sum(cost for _, cost in world.admitted)
    assert spent >= 0.9 * (60_000 + 100 * 1000)
    # One of each router's may come beyond it at the start, when all have asked for nothing.
    assert world.most_at_once(1000, tokens=True) <= 60_000 + 10 * 12_000


@pytest.mark.parametrize("regions", [1, 3, 10])
@pytest.mark.parametrize("seconds", [0, 20])
def test_a_client_is_let_in_while_something_is_said_to_be_left(regions: int, seconds: int) -> None:
    """It asks at once, at a router that others are asked beside: until none is left, in whole
    requests, and no further."""
    limited = of(requests_per_minute=600, tokens_per_minute=60_000)
    world, now = World(regions, limited, seed=1), seconds + WARM_S
    world.run(lambda number, now: 1.0, 10, seconds)
    there, told = world.keepers[0], list[tuple[float, float]]()
    while isinstance(held := there.take(limited, 10, now, answer_max=0.0), Held):
        (requests, _), (tokens, _) = least(held)
        told.append((requests, tokens))
    assert len(told) > 5
    assert [requests >= 1.0 for requests, _ in told] == [True] * (len(told) - 1) + [False]
    assert all(tokens >= 10 for _, tokens in told[:-1])
    (requests, bucket), _ = there.remaining(limited, now)
    assert requests < 1.0 and bucket is not None
    assert bucket.full - requests == pytest.approx(bucket.capacity - bucket.level)


def test_a_router_that_is_silent_for_a_moment_is_thought_to_spend_its_part() -> None:
    world = World(3, of(requests_per_minute=PER_MINUTE), seed=5, loss=0.0)
    world.is_cut = lambda one, other, now: 20 < now < 28
    world.run(even(3), 10, 60)
    assert world.most_at_once(PER_S, tokens=False) <= PER_MINUTE * (1 + BOUND)


def test_regions_that_are_cut_off_serve_alone_until_they_hear_of_each_other() -> None:
    world = World(2, of(requests_per_minute=PER_MINUTE), seed=5, loss=0.0)
    world.is_cut = lambda one, other, now: 20 < now < 60
    world.run(lambda number, now: 3 * PER_S, 10, 100)
    during = [when for when, _ in world.admitted if 35 < when < 60]
    assert len(during) >= 25 * 1.9 * PER_S  # each side all that it is asked
    late = [when for when, _ in world.admitted if when > 65]
    assert len(late) <= 36 * PER_S + 0.1 * PER_MINUTE


def turn(keepers: list[LimitKeeper], now: float) -> None:
    for there in keepers:
        for claims in list(there.turn_period(now)):
            for other in keepers:
                other.hear(claims, now)


def spend(there: LimitKeeper, limited: Limited, now: float, most: int = 10_000) -> int:
    """How many requests it takes at once."""
    taken = 0
    while taken < most and isinstance(held := there.take(limited, 10, now), Held):
        held.settle(10, 0, 5)
        taken += 1
    return taken


def times(seconds: float, start: float = 0.0) -> Iterator[float]:
    return (start + PERIOD_S * number for number in range(1, int(seconds / PERIOD_S)))


def test_a_router_that_starts_again_hears_from_others_what_is_left() -> None:
    limited = of(requests_per_day=100)
    one, other = keeper("us", ("us", "eu")), keeper("eu", ("us", "eu"))
    other.know(dict(limited))
    turn([one, other], 0.0)
    taken = 0
    for now in times(30):
        taken += spend(one, limited, now, 1)
        turn([one, other], now)
    assert taken == 100
    again = LimitKeeper(Origin(RegionId("us"), ROUTER), 2, ("us", "eu"), random.Random(3), 40.0)
    for now in times(5, 40.0):
        turn([again, other], now)
    assert spend(again, limited, 50.0) == 0


def test_one_that_starts_alone_begins_with_what_accounts_tell() -> None:
    there = keeper()
    there.spent_before({"t:acme": Before(requests=70, tokens=900)}, 0.0)
    assert spend(there, of(requests_per_day=100, requests_per_minute=100), 1.0) == 30


def test_a_limit_of_one_request_is_met_where_nobody_else_asks() -> None:
    limited = of(requests_per_minute=2)
    keepers = [keeper(f"r{number}", tuple(f"r{n}" for n in range(10))) for number in range(10)]
    for now in times(3):
        turn(keepers, now)
    assert spend(keepers[3], limited, 3.1, 1) == 1


def test_requests_under_way_are_bounded_and_free_their_place() -> None:
    there, limited = keeper(), of(concurrent_requests=2)
    held = [there.take(limited, 10, 0.0) for _ in range(3)]
    assert [isinstance(one, Held) for one in held] == [True, True, False]
    assert isinstance(held[0], Held)
    held[0].settle(10, 0, 1)
    assert isinstance(there.take(limited, 10, 0.0), Held)


def test_what_a_gone_router_had_under_way_is_free() -> None:
    limited, regions = of(concurrent_requests=2), ("us", "eu")
    one, other = keeper("us", regions), keeper("eu", regions)
    turn([one, other], 0.0)
    assert isinstance(one.take(limited, 10, 0.1), Held)
    assert isinstance(other.take(limited, 10, 0.1), Held)
    turn([one, other], 0.25)
    assert not isinstance(other.take(limited, 10, 0.3), Held)
    for now in times(15, 0.25):
        list(other.turn_period(now))
    assert isinstance(other.take(limited, 10, 15.0), Held)


def test_a_key_and_its_tenant_are_both_held_to_theirs() -> None:
    there = keeper()
    tenant = LimitsTable(requests_per_minute=3)
    key = LimitsTable(requests_per_minute=2)
    first, second = (("k:a", key), ("t:acme", tenant)), (("k:b", key), ("t:acme", tenant))
    assert spend(there, first, 0.0) == 2
    assert spend(there, second, 0.0) == 1
    refused = there.take(second, 10, 0.0)
    assert refused[0] == "t:acme"
    assert isinstance(refused[1], Exceeded) and refused[1].limit == "requests_per_minute"
    assert refused[1].retry_after_s == pytest.approx(20.0)
    # What the tenant refused was not taken from the key.
    assert isinstance(there.take((second[0],), 10, 0.0), Held)


def test_a_turn_is_not_used_by_a_request_that_another_limit_refuses() -> None:
    regions = "us", "eu"
    key = ("k:a", LimitsTable(requests_per_minute=1))
    there, eu = keeper("us", regions), RegionId("eu")
    row = LimitRow(
        name="k:a", born=1, age_s=0.0, requests=0.0, tokens=0.0, held=0.0, open=0.0, wanted=5.0,
        lacks=(),
    )  # fmt: skip
    tenant = ("t:acme", LimitsTable(tokens_per_minute=10))
    assert not isinstance(there.take((key, tenant), 100, 0.0, answer_max=0.0), Held)
    account, turned_at = there._accounts["k:a"], 0.0
    while not account.turn:
        turned_at += PERIOD_S
        seq = int(turned_at / PERIOD_S)
        there.hear(LimitClaims(region=eu, router=ROUTER, epoch=1, seq=seq, rows=(row,)), turned_at)
        assert not isinstance(there.take((key, tenant), 100, turned_at, answer_max=0.0), Held)
        list(there.turn_period(turned_at))
    assert not isinstance(there.take((key, tenant), 100, turned_at, answer_max=0.0), Held)
    assert account.turn
    assert isinstance(there.take((key,), 1, turned_at, answer_max=0.0), Held)
    assert not account.turn


def test_one_that_is_larger_than_the_limit_never_fits() -> None:
    refused = keeper().take(of(tokens_per_minute=100), 101, 0.0)
    assert not isinstance(refused, Held) and refused[1].retry_after_s == float("inf")


def test_weights_count() -> None:
    there = keeper()
    limited = of(tokens_per_minute=1000, cached_weight=0.1, output_weight=2.0)
    held = there.take(limited, 100, 0.0, answer_max=0.0)
    assert isinstance(held, Held)
    held.settle(50, 50, 100)  # 50 + 5 + 200
    assert isinstance(there.take(limited, 745, 0.0, answer_max=0.0), Held)
    assert not isinstance(there.take(limited, 1, 0.0, answer_max=0.0), Held)


def claims(seq: int, **of_row: float) -> LimitClaims:
    row = {"requests": 0.0, "tokens": 0.0, "held": 0.0, "open": 0.0, "wanted": 0.0, "lacks": ()}
    given = LimitRow(name="t:acme", born=1, age_s=0.0, **(row | of_row))  # type: ignore[arg-type]
    return LimitClaims(region="eu", router="router", epoch=7, seq=seq, rows=(given,))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_no_word_of_others_lifts_a_limit(seed: int) -> None:
    chance, there = random.Random(seed), keeper("us", ("us", "eu"))
    limited = of(requests_per_minute=60, tokens_per_minute=60_000, concurrent_requests=50)
    taken = now = 0.0
    for seq in range(200):
        now += 0.05
        given = {
            name: chance.choice([0.0, 1.0, 50.0, 2.0**52])
            for name in ("requests", "tokens", "held", "open", "wanted")
        }
        lacks = tuple(chance.choice([0.0, 10.0, 2.0**52]) for _ in range(8))
        there.hear(claims(seq, **given, lacks=lacks), now)  # type: ignore[arg-type]
        if seq % 5 == 0:
            list(there.turn_period(now))
        taken += spend(there, limited, now)
    assert taken <= 60 + now


def test_a_false_word_uses_up_an_hour_and_no_more() -> None:
    there = keeper("us", ("us", "eu"))
    limited = of(requests_per_minute=60)
    assert spend(there, limited, 0.0, 1) == 1
    there.hear(claims(0, requests=2.0**52), 0.0)
    assert spend(there, limited, 3590.0) == 0
    assert spend(there, limited, 3605.0, 1) == 1


def test_an_engine_that_counts_too_much_uses_up_no_more_than_the_longest_answer() -> None:
    """A tenant is not locked out for years by one false count; an honest one is paid back whole."""
    for counted, believed in ((TOKENS_MAX, COUNTED_MAX), (128_000, 128_000)):
        there, limited = keeper(), of(tokens_per_day=100_000)
        held = there.take(limited, 100, 0.0)
        assert isinstance(held, Held)
        held.settle(100, 0, counted)
        days = believed / 100_000 - 1.0
        assert isinstance(there.take(limited, 100, (days - 0.01) * 86_400.0), tuple)
        assert isinstance(there.take(limited, 100, (days + 0.2) * 86_400.0), Held)


def test_what_is_under_way_when_a_limit_falls_counts_to_its_end() -> None:
    there, limited, fewer = keeper(), of(concurrent_requests=100), of(concurrent_requests=5)
    held = [there.take(limited, 10, 0.0) for _ in range(100)]
    for number, one in enumerate(held):
        assert isinstance(there.take(fewer, 10, 1.0), Held) is (number > 95), number
        assert isinstance(one, Held)
        one.settle(10, 0, 1)


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNTS_MAX", "HEARD_MAX"):
        monkeypatch.setattr(module, name, 50)
    there, limits = keeper("us", ("us", "eu")), LimitsTable(requests_per_minute=60)
    for number in range(200):
        there.take(((f"k:{number}", limits),), 10, 0.0)
        row = LimitRow(
            name=f"k:x{number}", born=1, age_s=0.0, requests=1.0, tokens=0.0, held=0.0,
            open=0.0, wanted=0.0, lacks=(),
        )  # fmt: skip
        there.hear(
            LimitClaims(region="eu", router=f"r{number}", epoch=1, seq=number, rows=(row,)),  # type: ignore[arg-type]
            0.0,
        )
    assert len(there) == 50
    assert len(there._heard) <= 50 and len(there._processes) <= 64


def test_ever_new_names_free_no_limit_that_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACCOUNTS_MAX", 50)
    there, daily = keeper(), (("k:used", LimitsTable(requests_per_day=5)),)
    assert spend(there, daily, 0.0) == 5
    limits = LimitsTable(requests_per_day=5)
    for number in range(1000):
        now = 0.05 * number
        assert spend(there, ((f"k:{number}", limits),), now, 1) == 1
        if number % 5 == 0:
            list(there.turn_period(now))
    assert len(there) == 50
    assert spend(there, daily, 50.0) == 0


def test_an_account_with_a_request_under_way_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ACCOUNTS_MAX", 50)
    there, daily = keeper(), of(tokens_per_day=1_000_000)
    held = there.take(daily, 10, 0.0)  # set aside: 266 tokens, fewer than any below
    assert isinstance(held, Held)
    for number in range(200):
        name = ((f"k:{number}", LimitsTable(tokens_per_day=1_000_000)),)
        spend(there, name, 0.0, 100)
    held.settle(10, 0, 2_000_000)
    assert len(there) == 50
    assert spend(there, daily, 1.0) == 0


def test_an_account_that_is_full_again_is_forgotten() -> None:
    there = keeper()
    assert spend(there, of(requests_per_minute=60), 0.0, 1) == 1
    assert len(there) == 1
    for now in times(60):
        list(there.turn_period(now))
    assert len(there) == 0


# What others say, whatever they are.


def a_row(**fields: object) -> LimitRow:
    given = dict.fromkeys(("age_s", "requests", "tokens", "held", "open", "wanted"), 0.0)
    return LimitRow(**{"name": "t:acme", "born": 1, "lacks": (0.0,) * 4, **given, **fields})  # type: ignore[arg-type]


def two(limited: Limited) -> LimitKeeper:
    one = keeper("us", ("us", "eu"))
    one.know(dict(limited))
    return one


def let_in(there: LimitKeeper, limited: Limited, tokens: int, now: float) -> int:
    """How many it lets in at that moment, and they stay."""
    for number in range(100_000):
        if not isinstance(there.take(limited, tokens, now, answer_max=0.0), Held):
            return number
    raise AssertionError("no end")


def says(there: LimitKeeper, now: float, seq: int, epoch: int = 1, **fields: object) -> None:
    rows = (a_row(**fields),)
    region, router = RegionId("eu"), RouterId("r")
    there.hear(LimitClaims(region=region, router=router, epoch=epoch, seq=seq, rows=rows), now)


def test_restarts_of_another_router_take_nothing_of_the_requests_at_once() -> None:
    limited = of(concurrent_requests=100)
    there, now = two(limited), 0.0
    for restart in range(6):
        says(there, now, 1, epoch=restart, wanted=50.0)
        for _ in range(20):  # silent for 5 s
            now += PERIOD_S
            held = there.take(limited, 10, now, answer_max=0.0)
            if isinstance(held, Held):
                held.settle(10, 0, 0)
            list(there.turn_period(now))
    now += 60.0
    list(there.turn_period(now))
    assert let_in(there, limited, 1, now) == 100


def test_a_limit_that_is_lowered_while_others_use_more_is_free_again_after_them() -> None:
    limited, fewer = of(concurrent_requests=200), of(concurrent_requests=10)
    there = two(limited)
    there.take(limited, 1, 0.0)
    says(there, 0.0, 1, open=90.0)
    there.know(dict(fewer))
    says(there, 0.1, 2, open=90.0)
    says(there, 0.2, 3, open=0.0)
    list(there.turn_period(30.0))
    assert let_in(there, fewer, 1, 30.0) == 9, "one is its own"


def test_what_others_say_gives_nothing() -> None:
    limited = of(tokens_per_day=100_000)
    there, seq, admitted = two(limited), 0, 0
    for born in range(20):
        admitted += let_in(there, limited, 1000, born * 0.01)
        for held in (100_000.0, 0.0):
            seq += 1
            says(there, born * 0.01, seq, born=born, age_s=9.0, held=held)
    assert admitted <= 100


@pytest.mark.parametrize("seed", range(10))
def test_a_region_that_says_that_it_starts_again_and_again_gives_nothing(seed: int) -> None:
    limited, chance = of(requests_per_minute=60, concurrent_requests=50), random.Random(seed)
    there, taken, now = two(limited), 0, 0.0
    for seq in range(200):
        now += chance.choice([0.05, 0.05, 1.5])
        given = {name: chance.choice([0.0, 50.0, 2.0**52]) for name in ("requests", "held", "open")}
        age_s = chance.choice([0.0, 9.0])
        says(there, now, seq, epoch=chance.randrange(3), wanted=5.0, age_s=age_s, **given)
        if seq % 5 == 0:
            list(there.turn_period(now))
        taken += spend(there, limited, now)
    assert taken <= 60 + now


def test_a_process_starts_once_a_second_at_most() -> None:
    limited = of(requests_per_day=1000)
    there = two(limited)
    for period in range(8):
        says(there, 10.0 + period * PERIOD_S, period, epoch=period, requests=10.0)
    account = there._accounts["t:acme"]
    account.look(12.0)
    assert account.buckets[0].level == pytest.approx(980, abs=1), "started at 10 and 11 s"


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_that_start_together_all_hear_what_is_used_up(processes: int) -> None:
    limited = of(requests_per_day=1000)
    other = two(limited)
    assert spend(other, limited, 0.0) == 500  # its part, while it does not know of others
    for now in times(40):
        list(other.turn_period(now))
    assert spend(other, limited, 40.0) == 500
    for now in times(80):
        list(other.turn_period(max(40.0, now)))
    all_of_them, taken = [other], 0
    for period in range(24):
        now = 80.0 + period * PERIOD_S
        if period < processes:
            origin = Origin(RegionId("eu"), RouterId(f"r{period}"))
            dice = random.Random(period)
            all_of_them.append(LimitKeeper(origin, 1, ("us", "eu"), dice, now))
        turn(all_of_them, now)
        taken += sum(spend(one, limited, now + 0.1, 40) for one in all_of_them[1:])
    assert taken <= 0.11 * 1000


def test_an_overdraft_elsewhere_is_missing_here_until_it_is_paid_back() -> None:
    limited = of(tokens_per_minute=6000)
    there = two(limited)
    says(there, 0.0, 1)
    there.take(limited, 1, 0.0, answer_max=0.0)
    says(there, 1.0, 2, tokens=60_000.0)  # ten minutes'
    assert let_in(there, limited, 10, 300.0) == 0
    assert let_in(there, limited, 10, 1000.0) > 0


def test_what_was_spent_before_the_start_is_not_missing_days_later() -> None:
    limited = of(tokens_per_day=1000)
    there = keeper()
    there.spent_before({"t:acme": Before(tokens=1000.0)}, 0.0)
    assert let_in(there, limited, 100, 2 * 86_400.0) == 10


def test_accounts_that_are_read_late_take_no_more_than_was_spent() -> None:
    limited = of(requests_per_minute=600)
    there = keeper()
    for second in range(600):
        assert spend(there, limited, float(second), 9) == 9
    there.spent_before({"t:acme": Before(requests=100)}, 600.0)
    assert spend(there, limited, 600.0) >= 500


def test_accounts_and_other_routers_do_not_tell_the_same_twice() -> None:
    limited = of(tokens_per_day=1000)
    there = two(limited)
    there.take(limited, 100, 0.0, answer_max=0.0)
    says(there, 0.1, 1, age_s=9.0, lacks=(0.0, 0.0, 0.0, 600.0))
    there.spent_before({"t:acme": Before(tokens=600.0)}, 0.2)
    says(there, 11.0, 2, epoch=2)
    list(there.turn_period(30.0))
    assert let_in(there, limited, 100, 30.0) >= 2


def test_answers_longer_than_a_days_limit_do_not_shut_it_for_good() -> None:
    limited = of(tokens_per_day=1000)
    there, now = keeper(), 0.0
    for _ in range(30):
        held = there.take(limited, 10, now)
        if isinstance(held, Held):
            held.settle(10, 0, 5000)
        now += 10 * 86_400.0
        list(there.turn_period(now))
    assert isinstance(there.take(limited, 10, now), Held)


def test_requests_under_way_count_in_a_limit_that_is_added() -> None:
    """An operator stops a tenant who had another limit before."""
    before, now = of(requests_per_day=100_000), 0.0
    there = two(before)
    under_way = [there.take(before, 1, now, answer_max=0.0) for _ in range(100)]
    after = of(requests_per_day=100_000, concurrent_requests=10)
    there.know(dict(after))
    for _ in range(400):
        now += 0.1
        held = under_way.pop(0)
        assert isinstance(held, Held)
        held.settle(1, 0, 0)
        more = there.take(after, 1, now, answer_max=0.0)
        if isinstance(more, Held):
            under_way.append(more)
        if len(under_way) < 10:
            break
    assert len(under_way) <= 10


def gossip(keepers: list[LimitKeeper], now: float) -> None:
    """Every router hears at once what each other tells."""
    for claims in [claims for there in keepers for claims in there.turn_period(now)]:
        for one in keepers:
            one.hear(claims, now)


def test_what_was_not_told_yet_counts_as_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many names that each is told only now and then."""
    monkeypatch.setattr(module, "HEARD_ROWS_MAX", 40)
    monkeypatch.setattr(module, "ROWS_MIN", 4)
    limited, regions = of(requests_per_minute=6000), tuple(f"r{number}" for number in range(10))
    keepers = [keeper(region, regions, seed) for seed, region in enumerate(regions)]
    others = [((f"k:{number}", limited[0][1]),) for number in range(60)]
    now, let = 20.0, 0
    for period in range(180):
        now += PERIOD_S
        asked = [limited] * (100 if period >= 60 else 0) + others
        for there, name in product(keepers, asked):
            held = there.take(name, 1, now, answer_max=0.0)
            if isinstance(held, Held):
                held.settle(1, 0, 0)
                let += name is limited
        gossip(keepers, now)
    assert let <= 2 * (6000 + 120 * PERIOD_S * 100), "eight times as much where it counted as heard"


@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_goes_round_the_regions_gets_a_small_limit_whole(seed: int) -> None:
    limited, regions = of(requests_per_minute=6), ("us", "eu", "ap")
    keepers = [keeper(region, regions, 10 * seed + at) for at, region in enumerate(regions)]
    now, asked, let = 20.0, 0, 0
    for period in range(720):  # three minutes
        now += PERIOD_S
        if period % 4 == 0:
            held = keepers[asked % 3].take(limited, 1, now, answer_max=0.0)
            asked += 1
            if isinstance(held, Held):
                held.settle(1, 0, 0)
                let += 1
        gossip(keepers, now)
    assert 6 + 18 - 4 <= let <= 6 + 18 + 2
