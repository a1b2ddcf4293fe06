"""What finished answers teach."""

import pytest

from agents.core.engine_load import AnswerStatistics
from agents.core.events import NO_USAGE, TokenUsage


def test_nothing_known_at_first_nor_from_answers_without_usage() -> None:
    served = AnswerStatistics()
    served.add(NO_USAGE, 1.0)
    assert served.decode_tokens_per_s is None
    assert served.prefix_hit_ratio is None
    assert served.tokens_per_answer is None


def test_the_median_rate_ignores_one_odd_answer() -> None:
    served = AnswerStatistics()
    for seconds in (1.0, 1.0, 50.0):
        served.add(TokenUsage(10, 0, 41), seconds)
    assert served.decode_tokens_per_s == 40.0


def test_a_short_answer_gives_no_rate() -> None:
    served = AnswerStatistics()
    served.add(TokenUsage(10, 0, 7), 0.0001)
    assert served.decode_tokens_per_s is None


def test_ratio_and_size() -> None:
    served = AnswerStatistics()
    for _ in range(1000):
        served.add(TokenUsage(100, 75, 50), None)
    assert served.prefix_hit_ratio == pytest.approx(0.75)
    assert served.tokens_per_answer == pytest.approx(150)
    served.add(TokenUsage(100, -1, 50), None)
    assert served.prefix_hit_ratio == pytest.approx(0.75)
