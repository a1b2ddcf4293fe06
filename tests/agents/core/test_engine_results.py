"""How the last requests at an engine ended: what is counted, what a heartbeat says of it."""

import itertools
from dataclasses import replace
from random import Random

import pytest

from agents.core import effects
from agents.core.engine_results import (
    ANSWERED,
    LOG_EVERY_S,
    NOTHING_SAID,
    WINDOW_S,
    RecentResults,
    ResultsLog,
    Verdict,
    by_status,
)
from schemas.exchange import Outcome
from schemas.state import FAILING_IN_A_ROW, RESULTS_MAX, EngineResults
from tests.agents.core.bench import IDLE, Bench
from tests.agents.core.test_offline_admission import LINEAR

FAILED = Verdict(failure="HTTP 500")


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (400, NOTHING_SAID),
        (404, NOTHING_SAID),
        (429, Verdict(too_many_s=7.0)),
        (500, Verdict(failure="it")),
        (501, NOTHING_SAID),
        (503, Verdict(failure="it")),
        (529, Verdict(failure="it")),
    ],
)
def test_what_a_status_says_about_the_engine(status, verdict) -> None:
    assert by_status(status, "it", 7.0) == verdict


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_last_ones_in_the_window(seed) -> None:
    random, results, now = Random(seed), RecentResults(), 0.0
    ends: list[tuple[float, bool]] = []
    for _ in range(400):
        now += random.expovariate(1.0) * random.choice((0.01, 0.1, 10.0))
        if random.random() < 0.4:
            results.failed("HTTP 500", now)
            ends.append((now, True))
        else:
            results.answered(now)
            ends.append((now, False))
        unanswered = next((n for n, end in enumerate(reversed(ends)) if not end[1]), len(ends))
        last = [
            failed
            for number, (at, failed) in enumerate(ends)
            if at > now - WINDOW_S or number >= len(ends) - unanswered
        ][-RESULTS_MAX:]
        in_a_row = next((i for i, failed in enumerate(reversed(last)) if not failed), len(last))
        report = results.report(now)
        if not any(last):
            assert report is None
            continue
        assert report == EngineResults(
            failed=sum(last), of=len(last), in_a_row=in_a_row, what="HTTP 500"
        )


def test_failures_are_forgotten_after_the_window_once_it_has_answered() -> None:
    results = RecentResults()
    for _ in range(5):
        results.failed("x" * 500, 10.0)
    assert results.report(10.0 + 9 * WINDOW_S).what == "x" * 80, "routers send it little"
    results.answered(10.0 + 9 * WINDOW_S)
    assert results.report(10.0 + 9 * WINDOW_S) is None


def one(bench: Bench, number: int, **end) -> None:
    """A request, from its arrival to its end."""
    bench.work(number)
    bench.end(number, **{"verdict": ANSWERED, **end})


def ready() -> Bench:
    bench = Bench()
    bench.read()
    return bench


def test_a_heartbeat_says_nothing_of_an_engine_that_answers() -> None:
    bench = ready()
    for number in range(5):
        one(bench, number)
    assert bench.beat.results is None


def test_a_heartbeat_says_how_the_last_requests_ended() -> None:
    bench = ready()
    one(bench, 1)
    one(bench, 2, verdict=FAILED)
    one(bench, 3, outcome=Outcome.ENGINE_LOST, verdict=Verdict(failure="no connection"))
    expected = EngineResults(failed=2, of=3, in_a_row=2, what="no connection")
    assert bench.beat.results == expected


def test_batch_jobs_count_too() -> None:
    bench = Bench(offline=LINEAR)
    bench.read()
    for number, verdict in enumerate((ANSWERED, FAILED)):
        assert effects.StartRelay in map(type, bench.offline(number, b'{"max_tokens":5}'))
        bench.end(number, verdict=verdict)
    assert bench.beat.results == EngineResults(failed=1, of=2, in_a_row=1, what="HTTP 500")


@pytest.mark.parametrize(
    "end",
    [
        {"outcome": Outcome.CANCELLED, "verdict": NOTHING_SAID},
        {"outcome": Outcome.DEADLINE, "verdict": NOTHING_SAID},
        {"verdict": NOTHING_SAID},  # 4xx
        {"verdict": Verdict(too_many_s=1.0)},
    ],
)
def test_what_says_nothing_about_the_engine_is_not_counted(end) -> None:
    bench = ready()
    one(bench, 1, verdict=FAILED)
    one(bench, 2, **end)
    assert bench.beat.results == EngineResults(failed=1, of=1, in_a_row=1, what="HTTP 500")


def test_it_is_told_at_once_that_an_engine_begins_to_fail() -> None:
    bench = ready()
    for number in range(FAILING_IN_A_ROW - 1):
        one(bench, number, verdict=FAILED)
    assert all(beat.results is None or beat.results.in_a_row < 3 for beat in bench.beats)
    one(bench, 7, verdict=FAILED)
    bench.tick(0.02)
    assert bench.beats[-1].results.in_a_row == FAILING_IN_A_ROW
    one(bench, 8)
    bench.tick(0.1)
    assert bench.beats[-1].results.in_a_row == 0


def test_another_engine_in_its_place_begins_anew() -> None:
    bench = ready()
    for number in range(5):
        one(bench, number, verdict=FAILED)
    bench.fail()
    assert bench.beat.results is None
    bench.read(IDLE)
    assert bench.beat.results is None


def test_an_engine_that_was_started_anew_between_two_scrapes_begins_anew() -> None:
    bench = ready()
    bench.read(replace(IDLE, progress=(40.0, 7.0)))
    for number in range(5):
        one(bench, number, verdict=FAILED)
    bench.read(replace(IDLE, progress=(41.0, 7.0)))
    assert bench.beat.results is not None
    bench.read(replace(IDLE, progress=(0.0, 0.0)))
    assert bench.beat.results is None


def test_an_engine_that_wakes_up_begins_anew() -> None:
    bench = ready()
    for number in range(5):
        one(bench, number, verdict=FAILED)
    bench.read(replace(IDLE, is_asleep=True))
    bench.read(IDLE)
    assert bench.beat.results is None


def test_the_log_has_one_pair_of_lines_a_minute() -> None:
    log, results = ResultsLog(), RecentResults()
    assert log.line(None, 0, 0.0) is None
    lines = []
    for second in range(120):
        (results.failed if second % 10 < 5 else results.answered)(
            *(["HTTP 500"] if second % 10 < 5 else []), second
        )
        lines.append(log.line(results.report(second), 0, second))
    said = [(second, line) for second, line in enumerate(lines) if line is not None]
    assert said[0] == (2, "engine fails: its last 3 requests, HTTP 500")
    warnings = [second for second, line in said if "fails" in line]
    assert all(b - a >= LOG_EVERY_S for a, b in itertools.pairwise(warnings))


def test_the_log_says_that_it_answers_again() -> None:
    log, results = ResultsLog(), RecentResults()
    for _ in range(3):
        results.failed("no connection", 1.0)
    assert "no connection" in log.line(results.report(1.0), 0, 1.0)
    for _ in range(4):
        results.answered(2.0)
    again = "engine answers again: 3 of its last 7 requests failed"
    assert (log.line(results.report(2.0), 0, 2.0), log.is_told) == (again, False)


def test_the_log_says_that_nothing_has_failed_for_long() -> None:
    log, results = ResultsLog(), RecentResults()
    for _ in range(5):
        results.failed("HTTP 500", 1.0)
    results.answered(1.0)
    assert log.line(results.report(1.0), 0, 1.0) is not None
    later = 1.0 + WINDOW_S
    assert log.line(results.report(later - 1.0), 0, later - 1.0) is None
    assert log.line(results.report(later), 0, later) == "engine has failed no request for 30 s"


@pytest.mark.parametrize("fails_again", [False, True])
def test_the_log_says_of_one_that_was_started_anew_just_that(fails_again) -> None:
    log, results = ResultsLog(), RecentResults()
    for _ in range(3):
        results.failed("HTTP 500", 1.0)
    assert "engine fails" in log.line(results.report(1.0), results.clears, 1.0)
    results.clear()
    for _ in range(3 * fails_again):
        results.failed("HTTP 500", 3.4)
    said = log.line(results.report(3.4), results.clears, 3.4)
    assert said == "engine begins anew: what failed before no longer counts"
    assert log.line(results.report(3.5), results.clears, 3.5) is None
    later = 1.0 + LOG_EVERY_S
    said = log.line(results.report(later), results.clears, later)
    assert said == ("engine fails: its last 3 requests, HTTP 500" if fails_again else None)
