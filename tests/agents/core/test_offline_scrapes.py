"""What a scrape shows of offline requests is taken out of it, whatever became of them since."""

from dataclasses import replace

import pytest

from agents.core import events
from agents.core.events import EngineReading
from agents.core.latency_predictor import FEATURES
from agents.core.state import ENDED_MAX
from schemas.exchange import Outcome
from tests.agents.core.bench import MODEL, inbox
from tests.agents.core.test_agent_offline import bench_with
from tests.agents.core.test_offline_admission import LINEAR


@pytest.mark.parametrize(
    ("happens", "reading"),
    [
        (events.RelayBegan(inbox(1)), EngineReading(waiting=1, running=0)),
        (
            events.RelayEnded(inbox=inbox(1), outcome=Outcome.PREEMPTED),
            EngineReading(waiting=1, running=0),
        ),
        (
            events.RelayEnded(inbox=inbox(1), outcome=Outcome.DONE),
            EngineReading(waiting=0, running=1),
        ),
    ],
)
def test_a_scrape_is_of_the_moment_when_it_began(happens, reading) -> None:
    bench = bench_with()
    bench.offline(1)
    if happens == events.RelayEnded(inbox=inbox(1), outcome=Outcome.DONE):
        bench.feed(events.RelayBegan(inbox(1)))
    bench.now += 0.1
    began_at = bench.now
    bench.now += 0.01
    bench.feed(happens)
    bench.now += 0.01
    bench.feed(events.EngineScraped(began_at, reading, (MODEL,)))
    beat = bench.beat
    assert (beat.pending, beat.running, beat.full) == (0, 0, False)


def test_what_has_ended_is_remembered_until_a_later_scrape_and_within_bounds() -> None:
    bench = bench_with()
    for number in range(2 * ENDED_MAX):
        bench.offline(number)
        bench.end(number)
    assert len(bench.core.state.offline.ended) == ENDED_MAX
    bench.now += 0.1
    bench.read()
    assert not bench.core.state.offline.ended


def test_a_profile_may_have_fitted_no_time_to_some_iterations() -> None:
    bench = bench_with(offline=replace(LINEAR, waiting=(0.0,) * FEATURES))
    bench.offline(1)
    bench.feed(events.RelayBegan(inbox(1)))
    bench.tick(1.0)
    assert bench.beat.offline_running == 1
