"""What the agent knows of its engine."""

import pytest

from agents.core.answers import Answer, AnswerTable
from agents.core.events import AnswerEnded, EngineRead
from agents.core.reading import EngineReading, Usage
from agents.core.routers import RouterName
from agents.core.view import EngineView, Load
from agents.core.work import Work
from schemas.exchange import Outcome

WORK = Work("m", "/v1/completions", "", 10.0, None)


def handed(inbox: str, at: float, answers: AnswerTable) -> Answer:
    answer = Answer(inbox, RouterName("us", "r1"), WORK, {}, 1, at)
    answers.add(answer)
    answers.hand(answer, at)
    return answer


def test_the_operators_batch_size_fills_in_for_a_silent_page_only() -> None:
    view = EngineView(batch_max=8, counts_own=False)
    view.read(EngineRead(1.0, EngineReading(running=1), ("m",)))
    assert view.reading.batch_max == 8
    view.read(EngineRead(2.0, EngineReading(batch_max=16), None))
    assert (view.reading.batch_max, view.models) == (16, ("m",))


def test_what_was_handed_before_the_look_began_is_in_the_look() -> None:
    view, answers = EngineView(batch_max=1, counts_own=False), AnswerTable()
    view.read(EngineRead(5.0, EngineReading(waiting=0, running=1), ("m",)))
    handed("a", 4.9, answers)
    answers.look(5.0, 5.0)
    assert view.load(answers) == Load(0, 1)
    handed("b", 5.1, answers)
    assert view.load(answers) == Load(1, 1)


def test_counting_what_was_handed() -> None:
    view, answers = EngineView(batch_max=None, counts_own=True), AnswerTable()
    handed("a", 1.0, answers)
    assert view.load(answers) == Load(None, 1)


@pytest.mark.parametrize(
    ("outcome", "streamed", "learned"),
    [(Outcome.DONE, True, True), (Outcome.DONE, False, False), (Outcome.CANCELLED, True, False)],
)
def test_decode_rates_come_from_whole_streams(outcome, streamed, learned) -> None:
    view, answer = EngineView(batch_max=None, counts_own=False), handed("a", 1.0, AnswerTable())
    answer.began_at = 2.0
    usage = Usage(10, 5, 11)
    view.learn(answer, AnswerEnded(inbox="a", outcome=outcome, usage=usage, streamed=streamed), 4.0)
    assert view.served.decode_tokens_per_s == (5.0 if learned else None)
    assert view.prefix_hit_ratio == (0.5 if outcome is Outcome.DONE else None)


def test_the_agents_own_hit_ratio_goes_before_the_engines() -> None:
    view = EngineView(batch_max=None, counts_own=False)
    view.read(EngineRead(1.0, EngineReading(prefix_hit_ratio=0.9), ("m",)))
    assert view.prefix_hit_ratio == 0.9
    view.served.add(Usage(10, 1, 2), None)
    assert view.prefix_hit_ratio == 0.1
