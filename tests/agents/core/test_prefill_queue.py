"""The prompts still to be computed: summed, reckoned down by time, unknown where not told."""

import pytest

from agents.core.answers import Answer, AnswerTable
from agents.core.prefill import PrefillLine
from agents.core.prefill_queue import queued_tokens
from agents.core.routers import RouterName
from agents.core.work import Work

LINE = PrefillLine(s_per_token=0.01, base_s=0.0)


def table(*estimates: int | None, handed_at: float = 10.0) -> AnswerTable:
    answers = AnswerTable()
    for number, estimate in enumerate(estimates):
        work = Work("m", "/v1/completions", "", 10.0, None, estimate)
        entry = Answer(str(number), RouterName("us", "r1"), work, {}, 1, 0.0)
        answers.add(entry)
        answers.hand(entry, handed_at)
    return answers


@pytest.mark.parametrize(
    ("estimates", "line", "now", "expected"),
    [
        ((), LINE, 20.0, 0),
        ((100, 50), None, 20.0, 150),  # the speed is not known
        ((100, 50), LINE, 10.5, 100),  # half a second is 50 tokens
        ((100, 50), LINE, 99.0, 50),  # the first is through, the next can't be known to be
        ((100, None), LINE, 10.5, None),  # unknown, not small
    ],
)
def test_the_queue(estimates, line, now, expected) -> None:
    assert queued_tokens(table(*estimates), line, 0.0, now) == expected


def test_who_has_begun_waits_no_more_and_the_next_is_at_the_front() -> None:
    answers = table(100, 50, 7)
    answers.begin(answers.get("0"), 11.0)
    assert queued_tokens(answers, LINE, answers.settled_at, 11.2) == 37


def test_what_is_still_being_carried_here_is_queued() -> None:
    answers = table(100)
    next(iter(answers)).handed_at = None
    assert queued_tokens(answers, LINE, 0.0, 99.0) == 100
