"""What the agent knows of its engine."""

import pytest

from agents.core import effects
from agents.core.engine_load import EngineLoad
from agents.core.events import EngineReading, EngineScraped, RelayBegan, TokenUsage
from agents.core.requests import AgentRequest, RequestTable
from agents.core.routers import RouterKey
from agents.core.work_message import WorkRequest
from schemas.exchange import Outcome, Refusal
from tests.agents.core.bench import IDLE, MODEL, Bench, inbox

WORK = WorkRequest("m", "/v1/completions", "", 10.0, None)


def handed(inbox: str, at: float, answers: RequestTable) -> AgentRequest:
    answer = AgentRequest(inbox, RouterKey("us", "r1"), WORK, {}, 1, at)
    answers.add(answer, at)
    answers.send(answer, at)
    return answer


def test_the_operators_batch_size_fills_in_for_a_silent_page_only() -> None:
    view = EngineLoad(outstanding_max=8, batch_max=8, counts_own=False)
    view.scraped(EngineScraped(1.0, EngineReading(running=1), ("m",)))
    assert view.reading.batch_max == 8
    view.scraped(EngineScraped(2.0, EngineReading(batch_max=16), None))
    assert (view.reading.batch_max, view.models) == (16, ("m",))


def test_requests_sent_before_the_scrape_began_are_in_the_scrape() -> None:
    view, answers = EngineLoad(outstanding_max=8, batch_max=1, counts_own=False), RequestTable()
    view.scraped(EngineScraped(5.0, EngineReading(waiting=0, running=1), ("m",)))
    handed("a", 4.9, answers)
    answers.scraped(5.0, 5.0)
    assert view.counts(answers.counters, 1, answers.at_engine)[:2] == (0, 1)
    handed("b", 5.1, answers)
    assert view.counts(answers.counters, 1, answers.at_engine)[:2] == (1, 1)


def test_counting_what_was_handed() -> None:
    view, answers = EngineLoad(outstanding_max=8, batch_max=None, counts_own=True), RequestTable()
    handed("a", 1.0, answers)
    assert view.counts(answers.counters, 1, answers.at_engine)[:2] == (None, 1)


USAGE = TokenUsage(10, 5, 11)


@pytest.mark.parametrize(("began_at", "learned"), [(2.0, True), (None, False)])
def test_decode_rates_come_from_streams(began_at, learned) -> None:
    view = EngineLoad(outstanding_max=8, batch_max=None, counts_own=False)
    view.learn(USAGE, 1.0, began_at, 4.0, alone=True, odd=False)
    assert view.answers.decode_tokens_per_s == (5.0 if learned else None)
    assert view.prefix_hit_ratio == 0.5


def test_what_is_not_generated_is_no_example_of_answers() -> None:
    view = EngineLoad(outstanding_max=8, batch_max=None, counts_own=False)
    view.learn(USAGE, 1.0, 2.0, 4.0, alone=True, odd=True)
    assert view.prefix_hit_ratio is None


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.CANCELLED])
def test_only_whole_answers_teach(outcome) -> None:
    bench = Bench()
    bench.read()
    bench.work(1)
    bench.feed(RelayBegan(inbox(1)))
    bench.end(1, outcome, usage=USAGE, streamed=True)
    assert bench.beat.prefix_hit_ratio == (0.5 if outcome is Outcome.DONE else None)


def test_the_agents_own_hit_ratio_goes_before_the_engines() -> None:
    view = EngineLoad(outstanding_max=8, batch_max=None, counts_own=False)
    view.scraped(EngineScraped(1.0, EngineReading(prefix_hit_ratio=0.9), ("m",)))
    assert view.prefix_hit_ratio == 0.9
    view.answers.add(TokenUsage(10, 1, 2), None)
    assert view.prefix_hit_ratio == 0.1


def test_embeddings_are_no_example_of_answers() -> None:
    bench = Bench()
    bench.feed(EngineScraped(bench.now, IDLE, (MODEL,), paths=("/v1/embeddings",)))
    bench.work(1, **{"Mesh-Path": "/v1/embeddings"})
    bench.feed(RelayBegan(inbox(1)))
    bench.end(1, usage=TokenUsage(1000, 0, 0))
    bench.tick(1.0)
    beat = bench.beats[-1]
    assert (beat.served_total, beat.prefix_hit_ratio, beat.prefill_s_per_token) == (1, None, None)
    assert bench.core.state.engine.answers.tokens_per_answer is None


def test_work_on_a_path_that_the_engine_lacks_is_refused_and_heartbeats_name_those_it_has() -> None:
    bench = Bench()
    bench.read()
    [refused] = bench.work(1, **{"Mesh-Path": "/v1/embeddings"})
    assert refused.message.reason == Refusal.WRONG_MODEL
    seq = len(bench.beats)
    bench.now += 0.02
    bench.feed(EngineScraped(bench.now, IDLE, (MODEL,), paths=("/v1/embeddings",)))
    bench.tick(0.02)  # at once, as it matters to routers
    assert len(bench.beats) == seq + 1
    assert bench.beats[-1].paths == ("/v1/embeddings",)
    assert isinstance(bench.work(2, **{"Mesh-Path": "/v1/embeddings"})[0], effects.StartRelay)
