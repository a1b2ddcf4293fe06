"""Two agents beside one engine: each sees the other's prompts as work of others."""

import pytest

from agents.core.events import EngineReading
from agents.core.speed_probe import AGAIN_S
from tests.agents.core.test_speed_probe import LINE, SCRAPE_S, ProbedBench

TAKES = 3  # scrapes, each prompt


@pytest.mark.parametrize("epoch", range(3))
def test_both_find_the_speed(epoch):
    both = ProbedBench(epoch=epoch), ProbedBench(epoch=epoch + 100)
    since = [0, 0]
    for _ in range(round(10 * AGAIN_S / SCRAPE_S)):
        running = sum(one.at_engine and not one.stopped for one in both)
        for number, one in enumerate(both):
            one.idle(SCRAPE_S, EngineReading(waiting=0, running=running))
            since[number] = since[number] + 1 if one.at_engine else 0
            if (one.stopped and one.at_engine) or since[number] > TAKES:
                one.answer()
    for one in both:
        assert one.prior is not None
        assert one.prior.s_per_token == pytest.approx(LINE.s_per_token, rel=0.01)
