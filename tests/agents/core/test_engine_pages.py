"""Is an engine up whose pages fail? Each page's last answer, and what follows."""

import pytest

from agents.core import effects, events
from agents.core.engine_load import BLIND_OUTSTANDING_MAX
from agents.core.engine_pages import (
    BUSY_S,
    FAILURES_MAX,
    PROOF_S,
    RETRY_S,
    START_S,
    UNREADABLE_S,
    EnginePages,
    FaultKind,
    Look,
    PageFault,
    ScrapeResult,
)
from agents.core.events import NOTHING_KNOWN, EngineReading, EngineScraped, PagesSeen, ScrapeFailed
from schemas.state import PAGE_PROBLEM_CHARS_MAX, ReplicaState
from tests.agents.core.bench import MODEL, Bench, inbox

NEVER = float("-inf")
HTTP_503 = PageFault(FaultKind.BAD_ANSWER, "HTTP 503")
LOGIN = PageFault(FaultKind.LOGIN, "HTTP 401")
LATE = PageFault(FaultKind.TIMED_OUT, "no answer within 1 s")
REFUSED = PageFault(FaultKind.NO_CONNECTION, "no connection")
EMPTY = PageFault(FaultKind.NO_MODEL, "no model")
NO_SERIES = PageFault(FaultKind.UNREADABLE, "no series of the engine's kind")


class Engine:
    """Scraped ten times a second; its pages are good, or have a fault."""

    def __init__(self, *, has_metrics: bool = True, one_server: bool = True) -> None:
        self.pages = EnginePages(has_metrics=has_metrics, one_server=one_server)
        self.has_metrics = has_metrics
        self.now = 100.0
        self.models: PageFault | None = None
        self.metrics: PageFault | None = None
        self.last_content_at = NEVER

    def look(self, *, models_too: bool = True) -> ScrapeResult:
        self.now += 0.1
        asks = self.has_metrics and self.pages.asks_metrics(self.now)
        look = Look(
            self.now - 0.05,
            self.last_content_at,
            models_too,
            self.models if models_too else None,
            asks,
            self.metrics if asks else None,
        )
        return self.pages.looked(look, self.now)

    def run(self, seconds: float) -> set[ScrapeResult]:
        return {self.look() for _ in range(round(seconds * 10))}

    @property
    def problem(self) -> str | None:
        return self.pages.seen.problem


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    assert engine.run(1.0) == {ScrapeResult.UP}
    return engine


@pytest.mark.parametrize("fault", [HTTP_503, LOGIN, LATE, REFUSED])
def test_without_its_page_of_metrics_it_is_up_and_blind(engine, fault) -> None:
    engine.metrics = fault
    assert engine.look(models_too=False) is ScrapeResult.FAILED, "the models were not asked"
    assert engine.pages.asks_both, "the next scrape asks both at once"
    assert [engine.look() for _ in range(FAILURES_MAX)] == [
        *[ScrapeResult.WAIT] * (FAILURES_MAX - 1),
        ScrapeResult.UP,
    ]
    assert engine.pages.seen == PagesSeen(f"metrics: {fault.what}", is_blind=True)
    assert engine.run(60.0) == {ScrapeResult.UP}
    assert engine.look(models_too=False) is ScrapeResult.UP
    engine.metrics = None
    engine.run(RETRY_S + 0.2)
    assert engine.pages.seen == PagesSeen()
    assert engine.pages.shows_numbers


def test_a_broken_page_is_asked_again_every_two_seconds(engine) -> None:
    engine.metrics = HTTP_503
    engine.run(1.0)
    asked = 0
    for _ in range(600):
        asked += engine.pages.asks_metrics(engine.now + 0.1)
        engine.look()
    assert asked == pytest.approx(60 / RETRY_S, abs=2)


@pytest.mark.parametrize("fault", [HTTP_503, REFUSED])
def test_one_that_never_had_a_page_works_without_after_a_while(fault) -> None:
    engine = Engine()
    engine.metrics = fault
    assert engine.run(START_S - 0.3) == {ScrapeResult.WAIT}
    engine.run(0.5)
    assert engine.look() is ScrapeResult.UP
    assert engine.problem == f"metrics: {fault.what}"


@pytest.mark.parametrize("fault", [REFUSED, EMPTY])
def test_one_that_can_not_be_reached_or_serves_nothing_is_not_up(engine, fault) -> None:
    engine.models = fault
    engine.last_content_at = engine.now
    assert engine.run(1.0) == {ScrapeResult.FAILED}


def test_one_failed_scrape_or_late_ones_while_answers_flow_are_no_other_process(engine) -> None:
    engine.models = engine.metrics = REFUSED
    assert [(engine.look(), engine.pages.was_away)[1] for _ in range(FAILURES_MAX)] == [
        *[False] * (FAILURES_MAX - 1),
        True,
    ]
    engine.models = engine.metrics = None
    assert engine.look() is ScrapeResult.UP and not engine.pages.was_away
    engine.models = engine.metrics = LATE
    for _ in range(2 * FAILURES_MAX):
        engine.last_content_at = engine.now + 0.1
        assert engine.look() is ScrapeResult.FAILED and not engine.pages.was_away


def test_a_frozen_process_is_not_up(engine) -> None:
    engine.models = engine.metrics = LATE
    engine.last_content_at = engine.now
    assert engine.run(3.0) == {ScrapeResult.FAILED}


def test_a_page_that_is_late_while_answers_flow_has_longer(engine) -> None:
    engine.metrics = LATE
    for _ in range(round(BUSY_S * 10) - 2):
        engine.last_content_at = engine.now + 0.1
        assert engine.look() is ScrapeResult.WAIT
    for _ in range(5):
        engine.last_content_at = engine.now + 0.1
        engine.look()
    assert engine.pages.seen.is_blind


@pytest.mark.parametrize("fault", [HTTP_503, LATE])
def test_without_its_list_of_models_it_is_up_by_its_metrics(engine, fault) -> None:
    engine.models = fault
    assert engine.run(60.0) == {ScrapeResult.UP}
    assert engine.pages.seen == PagesSeen(f"models: {fault.what}")
    engine.models = None
    engine.look()
    assert engine.problem is None


def test_a_page_elsewhere_does_not_show_that_the_engine_is_up() -> None:
    engine = Engine(one_server=False)
    engine.run(1.0)
    engine.models = HTTP_503
    assert engine.run(1.0) == {ScrapeResult.FAILED}


def test_a_list_behind_a_login_is_no_engine_that_answers(engine) -> None:
    """The metrics of vLLM need no key, and each request does."""
    engine.models = LOGIN
    assert engine.run(1.0) == {ScrapeResult.FAILED}


def test_models_that_were_never_known_are_no_engine() -> None:
    engine = Engine()
    engine.models = HTTP_503
    assert engine.run(60.0) == {ScrapeResult.FAILED}


@pytest.mark.parametrize("has_metrics", [True, False])
def test_with_no_page_at_all_good_answers_show_that_it_is_up(has_metrics) -> None:
    engine = Engine(has_metrics=has_metrics)
    engine.run(1.0)
    engine.models = engine.metrics = HTTP_503
    assert engine.look() is ScrapeResult.FAILED
    assert engine.pages.seen.wants_proof
    verdicts = []
    for _ in range(300):
        engine.last_content_at = engine.now
        verdicts.append(engine.look())
        assert not engine.pages.seen.wants_proof
    waits = FAILURES_MAX - 1 if has_metrics else 0  # its load as last read may still hold
    assert verdicts == [ScrapeResult.WAIT] * waits + [ScrapeResult.UP] * (300 - waits)
    assert engine.run(PROOF_S / 2 - 0.2) == {ScrapeResult.UP}
    assert not engine.pages.seen.wants_proof
    engine.run(0.5)
    assert engine.pages.seen.wants_proof, "before it would count as gone"
    assert engine.look(models_too=False) is ScrapeResult.UP
    assert engine.pages.seen.wants_proof, "until the models are asked again"
    engine.pages.proved(engine.now)
    assert engine.run(PROOF_S - 0.2) == {ScrapeResult.UP}
    assert engine.run(1.0) == {ScrapeResult.UP, ScrapeResult.FAILED}


def test_a_page_of_a_new_format_is_broken_once_there_was_something_to_show() -> None:
    engine = Engine()
    engine.metrics = NO_SERIES
    assert engine.run(2 * UNREADABLE_S) == {ScrapeResult.UP}
    assert engine.problem is None, "no request was answered: the page may be empty"
    engine.last_content_at = engine.now
    assert engine.run(UNREADABLE_S - 1.0) == {ScrapeResult.UP}
    assert engine.problem is None
    assert engine.run(2.0) == {ScrapeResult.UP}
    assert engine.pages.seen == PagesSeen("metrics: no series of the engine's kind", is_blind=True)


def test_an_engine_of_another_kind_is_up_and_named_at_once() -> None:
    engine = Engine()
    engine.metrics = PageFault(FaultKind.OTHER_KIND, "looks like llamacpp, not vllm")
    assert engine.run(1.0) == {ScrapeResult.UP}
    assert engine.pages.seen == PagesSeen("metrics: looks like llamacpp, not vllm", is_blind=True)


def test_a_page_that_showed_numbers_and_shows_none_is_broken_at_once(engine) -> None:
    engine.last_content_at = engine.now
    engine.run(1.0)
    engine.metrics = NO_SERIES
    engine.run(1.0)
    assert engine.pages.seen == PagesSeen("metrics: no series of the engine's kind", is_blind=True)


def test_a_restarted_engine_has_time_for_its_page(engine) -> None:
    engine.models = engine.metrics = REFUSED
    assert engine.run(1.0) == {ScrapeResult.FAILED}
    engine.models, engine.metrics = None, HTTP_503
    assert engine.run(START_S - 0.3) == {ScrapeResult.WAIT}
    engine.metrics = None
    assert engine.look() is ScrapeResult.UP
    assert engine.problem is None


def test_a_problem_is_short(engine) -> None:
    engine.metrics = PageFault(FaultKind.BAD_ANSWER, "x" * 1000)
    engine.run(1.0)
    assert len(engine.problem) == PAGE_PROBLEM_CHARS_MAX


BLIND = PagesSeen("metrics: HTTP 503", is_blind=True)


def scraped(bench: Bench, reading: EngineReading, pages: PagesSeen) -> list:
    return bench.feed(EngineScraped(bench.now, reading, (MODEL,), pages=pages))


def test_an_agent_without_the_page_counts_its_own_requests_until_it_is_back() -> None:
    bench = Bench(outstanding_max=256)
    scraped(bench, EngineReading(waiting=3, running=0), PagesSeen())
    assert (bench.beat.pending, bench.beat.running, bench.beat.outstanding_max) == (3, 0, 256)
    scraped(bench, NOTHING_KNOWN, BLIND)
    bench.work(1, **{"Mesh-May-Queue": "1"})
    beat = bench.beat
    assert (beat.state, beat.page_problem) == (ReplicaState.READY, "metrics: HTTP 503")
    assert (beat.pending, beat.running) == (None, 1)
    assert beat.outstanding_max == BLIND_OUTSTANDING_MAX
    scraped(bench, EngineReading(waiting=0, running=1), PagesSeen())
    assert bench.beat.page_problem is None
    assert (bench.beat.pending, bench.beat.outstanding_max) == (0, 256)


@pytest.mark.parametrize(
    ("shown", "given", "most"),
    [
        ({"running": 40}, {}, 40),
        ({"running": 1, "batch_max": 16}, {}, 16),
        ({"running": 1}, {"batch_max": 32}, 32),
        ({"running": 400}, {}, 256),
        ({"running": 1}, {"outstanding_max": 4}, 4),
    ],
)
def test_what_an_engine_was_seen_to_run_is_its_limit_without_the_page(shown, given, most) -> None:
    bench = Bench(**{"outstanding_max": 256, **given})
    scraped(bench, EngineReading(waiting=0, **shown), PagesSeen())
    for _ in range(3):
        scraped(bench, NOTHING_KNOWN, BLIND)
    assert bench.beat.outstanding_max == most


def failed(bench: Bench, **more) -> list:
    return bench.feed(
        ScrapeFailed(began_at=bench.now, last_content_at=NEVER, timed_out=False, detail="x", **more)
    )


def test_scrapes_that_fail_in_part_do_not_make_an_engine_down() -> None:
    bench = Bench()
    bench.read()
    for _ in range(2):
        failed(bench)
    assert bench.beat.down_detail is None, "it is ready"
    for _ in range(10):
        failed(bench, is_up=True)
    failed(bench)
    assert bench.beat.state is ReplicaState.READY


def test_where_only_an_answer_shows_that_it_is_up_one_small_request_is_sent() -> None:
    bench = Bench()
    bench.read()
    for _ in range(3):
        failed(bench, wants_proof=True)
    assert bench.beat.state is ReplicaState.DOWN
    assert bench.tick(1.0) == [], "it has answered nothing: it might have to load a model"
    bench.read()
    bench.work(1)
    bench.feed(events.RelayBegan(inbox(1)))
    bench.end(1)
    for _ in range(3):
        failed(bench, wants_proof=True)
    probe = effects.ProbeEngine("/v1/completions", MODEL)
    assert bench.tick(1.0) == [probe]
    bench.feed(events.ProbeEnded(answered=False))
    assert bench.beat.down_reason == "unreachable", "it is not hung"
    assert bench.beat.down_detail == "x"
    assert bench.tick(1.5) == [probe]
    bench.feed(events.ProbeEnded(answered=True))
    bench.read()
    assert (bench.beat.state, bench.tick(2.0)) == (ReplicaState.READY, [])
    assert bench.beat.down_detail is None
