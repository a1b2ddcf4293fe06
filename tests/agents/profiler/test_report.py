"""The table and the picture of a search, whatever it found."""

import io
import xml.dom.minidom
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agents.core.slo_profile import Measure
from agents.profiler.measurement import Measured
from agents.profiler.picture import HEIGHT, WIDTH, draw
from agents.profiler.report import table_of
from agents.profiler.run import BudgetTrial, Found, shortfall
from agents.profiler.trial import TrialResult
from tests.agents.profiler.test_trial import PROFILE, TRAINED

MEASURED = Measured(TRAINED, 0.01, 100, 20, 512, 8, 0.001, 10.0)
LIMITS = {Measure.TBT_P99: 0.05, Measure.TTFT_MEAN: 0.2}
seconds = st.floats(1e-6, 3600.0)
latencies = st.dictionaries(st.sampled_from(Measure), seconds)


def result(latency_s: dict[Measure, float], rate: float = 0.0, failed: int = 0) -> TrialResult:
    return TrialResult(latency_s, 10, failed, "", 0, rate, 3)


trials = st.lists(
    st.builds(
        BudgetTrial,
        seconds,
        st.builds(result, latencies, st.floats(0.0, 1e6), st.integers(0, 3)),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(trials=trials, is_found=st.booleans())
def test_whatever_was_found_can_be_drawn_and_printed(trials, is_found):
    profile = replace(PROFILE, latency_budget_s=trials[0].budget_s) if is_found else None
    found = Found(MEASURED, result({}), LIMITS, tuple(trials), profile)
    picture = xml.dom.minidom.parseString(draw(found))
    for mark in picture.getElementsByTagName("circle"):
        x, y = float(mark.getAttribute("cx")), float(mark.getAttribute("cy"))
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    assert len(picture.getElementsByTagName("polyline")) == len(LIMITS) + 1
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(found))
    assert table_of(found).row_count == len(trials) + 1


def test_what_was_broken_is_said_and_marked():
    seen = {Measure.TBT_P99: 0.07, Measure.TTFT_MEAN: 0.1}
    assert shortfall(seen, LIMITS) == "p99 TBT is 70.0 ms, its limit 50.0 ms"
    assert "mean TTFT can't be measured" in shortfall({Measure.TBT_P99: 0.01}, LIMITS)
    trial = BudgetTrial(0.02, result(seen), False)
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(Found(MEASURED, result(seen), LIMITS, (trial,), None)))
    text = console.file.getvalue()
    assert "70.0 !" in text and "100.0 !" not in text and "no offline" in text
    assert "TBT: time between tokens" in text
