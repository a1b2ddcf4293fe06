"""How much an engine is given that says 429."""

from random import Random

import pytest

from agents.core.effects import StartRelay
from agents.core.engine_limit import (
    FORGOTTEN_S,
    PAUSE_S,
    RETRY_S_MAX,
    RETRY_S_MIN,
    EngineLimit,
    retry_after_s,
)
from agents.core.engine_results import ANSWERED, Verdict
from agents.core.events import EngineScraped, PagesSeen
from schemas.exchange import Outcome, Refusal
from tests.agents.core.bench import IDLE, MODEL, Bench
from tests.agents.core.test_offline_admission import LINEAR

USUAL = 16


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ((), RETRY_S_MIN),
        (("retry-after", "7"), 7.0),
        (("x-queue-time", "9", "retry-after", " 7 "), 7.0),
        (("retry-after", "0"), RETRY_S_MIN),
        (("retry-after", "86400"), RETRY_S_MAX),
        (("retry-after", "9" * 400), RETRY_S_MAX),
        (("retry-after", "-5"), RETRY_S_MIN),
        (("retry-after", "nan"), RETRY_S_MIN),
        (("retry-after", "²"), RETRY_S_MIN),
        (("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"), RETRY_S_MIN),
    ],
)
def test_how_long_it_wants_to_be_left_alone(headers, seconds) -> None:
    assert retry_after_s(headers) == seconds


def test_it_is_left_with_what_it_runs_for_its_retry_after() -> None:
    limit = EngineLimit(USUAL)
    limit.too_many(5.0, running=3, now=100.0)
    assert limit.most == 3
    for at in (100.1, 104.9):
        limit.answered(at)
        assert limit.most == 3
    for grown in range(4, USUAL + 1):
        limit.answered(105.0)
        assert limit.most == grown
    assert not limit.is_lowered
    limit.answered(105.0)
    assert limit.most == USUAL


def test_several_refusals_leave_the_least_of_what_ran() -> None:
    limit = EngineLimit(USUAL)
    for running in (7, 6, 5, 4, 4):
        limit.too_many(1.0, running, now=1.0)
    assert limit.most == 4
    limit.too_many(1.0, 9, now=1.5)
    assert limit.most == 4


def test_one_that_refuses_though_it_runs_nothing_is_asked_once_a_second() -> None:
    limit = EngineLimit(USUAL)
    limit.too_many(30.0, running=0, now=10.0)
    assert limit.most == 0
    limit.update(10.0 + PAUSE_S)
    assert limit.most == 1


def test_one_that_is_given_one_at_a_time_is_left_alone_too() -> None:
    limit = EngineLimit(1)
    limit.too_many(30.0, running=0, now=10.0)
    assert (limit.most, limit.is_lowered) == (0, True)
    limit.set_usual(1, 10.0 + 0.9 * PAUSE_S)
    assert (limit.most, limit.is_lowered) == (0, True)
    limit.update(10.0 + PAUSE_S)
    assert (limit.most, limit.is_lowered) == (1, False)


def test_without_requests_it_is_forgotten() -> None:
    limit = EngineLimit(USUAL)
    limit.too_many(2.0, running=2, now=10.0)
    limit.update(11.9 + FORGOTTEN_S)
    assert limit.most == 2
    limit.update(12.0 + FORGOTTEN_S)
    assert (limit.most, limit.is_lowered) == (USUAL, False)


def test_a_smaller_usual_number_holds_besides() -> None:
    limit = EngineLimit(USUAL)
    limit.set_usual(4, 1.0)
    assert limit.most == 4
    limit.too_many(1.0, running=3, now=1.0)
    limit.set_usual(USUAL, 2.0)
    assert limit.most == 3
    limit.set_usual(2, 2.0)
    assert (limit.most, limit.is_lowered) == (2, False)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_never_above_the_usual_nor_closed_for_long_and_comes_back(seed) -> None:
    random, limit, now, closed_s = Random(seed), EngineLimit(USUAL), 0.0, 0.0
    for _ in range(500):
        step = random.expovariate(2.0)
        now += step
        kind = random.randrange(3)
        if kind == 0:
            limit.too_many(random.uniform(-10.0, 1e9), random.randrange(USUAL + 3), now)
        elif kind == 1:
            limit.answered(now)
        limit.update(now)
        assert 0 <= limit.most <= USUAL
        closed_s = closed_s + step if limit.most == 0 and kind != 0 else 0.0
        assert closed_s <= PAUSE_S
    for _ in range(USUAL):
        now += RETRY_S_MAX
        limit.answered(now)
    assert limit.most == USUAL


def test_an_agent_gives_an_engine_less_that_says_429() -> None:
    bench = Bench(outstanding_max=8)
    bench.read()
    for number in range(5):
        bench.work(number)
    bench.end(4, verdict=Verdict(too_many_s=2.0))
    assert (bench.beat.full, bench.beat.outstanding_max, bench.beat.results) == (True, 4, None)
    [refused] = bench.work(9)
    assert refused.message.reason is Refusal.FULL
    bench.tick(0.02)
    assert bench.beats[-1].full, "told at once"
    bench.end(0, verdict=ANSWERED)
    bench.work(10)
    bench.tick(2.0)
    for grown in range(5, 9):
        bench.end(10 if grown == 5 else 20 + grown - 1, verdict=ANSWERED)
        assert bench.beat.outstanding_max == grown
        assert not bench.beat.full
        bench.work(20 + grown)
    assert bench.beat.outstanding_max == 8


def test_what_batch_jobs_run_counts_too() -> None:
    bench = Bench(offline=LINEAR, outstanding_max=8)
    bench.read()
    for number in range(2):
        assert StartRelay in map(type, bench.offline(number, b'{"max_tokens":5}'))
    bench.work(5)
    bench.end(5, verdict=Verdict(too_many_s=30.0))
    assert (bench.beat.full, bench.beat.outstanding_max) == (True, 2)
    bench.end(0, verdict=ANSWERED)
    assert not bench.beat.full
    bench.work(6)
    assert bench.beat.full


def test_an_idle_one_is_left_alone_for_a_second() -> None:
    bench = Bench()
    bench.read()
    bench.work(1)
    bench.end(1, verdict=Verdict(too_many_s=20.0))
    assert (bench.beat.full, bench.beat.outstanding_max) == (True, 0)
    bench.tick(PAUSE_S + 0.2)
    assert (bench.beat.full, bench.beat.outstanding_max) == (False, 1)


def test_what_an_engine_said_ends_with_it() -> None:
    bench = Bench()
    bench.read()
    bench.work(1)
    bench.end(1, verdict=Verdict(too_many_s=60.0))
    bench.fail()
    bench.read()
    assert (bench.beat.full, bench.beat.outstanding_max) == (False, 4)


def test_an_engine_without_its_page_keeps_the_lower_limit() -> None:
    bench = Bench(outstanding_max=100)
    bench.read()
    for number in range(4):
        bench.work(number)
    bench.end(3, outcome=Outcome.DONE, verdict=Verdict(too_many_s=5.0))
    pages = PagesSeen("metrics: HTTP 503", is_blind=True)
    bench.feed(EngineScraped(bench.now, IDLE, (MODEL,), pages=pages))
    assert bench.beat.outstanding_max == 3
