"""The prompts still to be computed: summed, less the progress; unknown without an estimate."""

import pytest

from agents.core.prefill_speed import PrefillLine
from agents.core.requests import AgentRequest, RequestTable
from agents.core.routers import RouterKey
from agents.core.work_message import WorkRequest

LINE = PrefillLine(s_per_token=0.01, base_s=0.0)


def table(*estimates: int | None, sent_at: float | None = 10.0) -> RequestTable:
    answers = RequestTable()
    for number, estimate in enumerate(estimates):
        work = WorkRequest("m", "/v1/completions", "", 10.0, None, estimate)
        entry = AgentRequest(str(number), RouterKey("us", "r1"), work, {}, 1, 0.0)
        answers.add(entry, 0.0)
        if sent_at is not None:
            answers.send(entry, sent_at)
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
    assert table(*estimates).prefill_queued_tokens(line, now) == expected


def test_who_has_begun_waits_no_more_and_the_next_is_at_the_front() -> None:
    answers = table(100, 50, 7)
    answers.begin(answers.by_inbox["0"], 11.0)
    assert answers.prefill_queued_tokens(LINE, 11.2) == 37


def test_what_is_still_being_carried_here_is_queued() -> None:
    assert table(100, sent_at=None).prefill_queued_tokens(LINE, 99.0) == 100
