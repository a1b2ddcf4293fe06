"""The study of HyGen on runs that take a blink, and its command in the short form."""

import statistics
from itertools import islice

import pytest
from click.testing import CliRunner

from agents.core.slo_profile import Measure
from agents.sim.engine import EngineSim
from agents.sim.events import SimRequest
from tests.programs.studies.hygen import __main__ as study
from tests.programs.studies.hygen import predictor
from tests.programs.studies.hygen.grid import JUDGED, PROFILE, Setting, bench, queue
from tests.programs.studies.hygen.prefixes import consecutive_gain
from tests.programs.studies.hygen.runs import Supply, play
from tests.programs.studies.hygen.two_phase import TwoPhaseEngine
from tests.programs.studies.hygen.workloads import (
    AZURE,
    MOONCAKE,
    OFFLINE_IDS,
    Arrival,
    Stretch,
    documents,
    online,
    questions,
    recorded,
    subjects,
)

SMALL = Setting(AZURE, 2.0, 10.0, 20.0)
SHORT, OTHER = Stretch(0.0, 9.0), Stretch(10.0, 9.0)


@pytest.mark.parametrize("kind", [AZURE, MOONCAKE])
def test_online_requests_are_generated_after_the_quantiles_of_the_trace(kind):
    arrivals = online(kind, None, Stretch(0.0, 4000.0), 2.0)
    assert len(arrivals) == pytest.approx(8000, rel=0.15)
    prompts = [arrival.request.prompt_tokens for arrival in arrivals]
    middle = kind.prompt_tokens[4] * kind.scale
    assert statistics.median(prompts) == pytest.approx(middle, rel=0.1)
    assert online(kind, None, SHORT, 2.0) == online(kind, None, SHORT, 2.0)
    assert online(kind, None, SHORT, 2.0) != online(kind, None, OTHER, 2.0)


def test_a_stretch_of_a_recorded_trace_is_sampled_to_a_rate(tmp_path):
    folder = tmp_path / "azure"
    folder.mkdir()
    rows = [f"2023-11-16 18:{s // 60:02}:{s % 60:02},{100 + s},10" for s in range(3500)]
    (folder / "conv.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    trace = recorded(AZURE, tmp_path)
    first, second = (online(AZURE, trace, Stretch(at, 400.0), 0.25) for at in (0.0, 1750.0))
    assert len(first) == len(second) == 100
    assert all(100 <= arrival.request.prompt_tokens <= 500 for arrival in first)
    assert all(1850 <= arrival.request.prompt_tokens <= 2250 for arrival in second)
    assert [a.at_s for a in first] == sorted(a.at_s for a in first) and first[-1].at_s <= 400.0
    assert recorded(MOONCAKE, tmp_path) is None and recorded(AZURE, None) is None


def test_documents_are_as_long_as_their_source_says():
    sizes = list(islice(documents(1), 4000))
    prompts = sorted(request.prompt_tokens for request in sizes)
    assert prompts[2000] == pytest.approx(6151, rel=0.05)
    assert prompts[3600] == pytest.approx(14_405, rel=0.08)
    assert statistics.median(r.output_tokens for r in sizes) == pytest.approx(171, rel=0.05)
    assert all(request.offline for request in sizes)
    assert len({request.id for request in sizes}) == len({r.keys[0] for r in sizes}) == 4000


def test_questions_of_a_subject_share_its_examples_and_nothing_else():
    asked = list(islice(questions(subjects(1), 1), 500))
    beginnings = {request.keys[0] for request in asked}
    assert 30 < len(beginnings) <= 57
    one, other = [request for request in asked if request.keys[0] == asked[0].keys[0]][:2]
    same = [left == right for left, right in zip(one.keys, other.keys, strict=False)]
    assert same[:19] == [True] * 19 and not all(same)


def test_a_run_measures_what_the_engine_did():
    requests = [Arrival(0.0, SimRequest(0, 500, 4)), Arrival(1.0, SimRequest(1, 64, 1))]
    outcome = play(EngineSim(PROFILE), requests, None, 10.0)
    first_s = PROFILE.iteration_s(((500, 500),), 0, 0)
    second_s = PROFILE.iteration_s(((64, 64),), 0, 0)
    decodes_s = sum(PROFILE.decode_s(1, 501 + step) for step in range(3))
    assert outcome.latency[Measure.TTFT_MEAN] == pytest.approx((first_s + second_s) / 2)
    assert outcome.latency[Measure.TBT_MEAN] == pytest.approx(decodes_s / 3)
    assert outcome.tokens_s == outcome.online_tokens_s == pytest.approx((504 + 65) / 10)


def test_a_preemption_counts_as_time_between_tokens():
    requests = [Arrival(0.0, SimRequest(n, 300, 300)) for n in range(2)]
    calm = play(EngineSim(PROFILE), requests, None, 60.0)
    short = play(EngineSim(PROFILE, kv_tokens=1000), requests, None, 60.0)
    assert short.preemptions >= 1 and calm.preemptions == 0
    assert short.latency[Measure.TBT_MEAN] > calm.latency[Measure.TBT_MEAN]


def test_offline_requests_come_without_end_or_at_a_rate():
    endless = play(TwoPhaseEngine(PROFILE, queue()), [], Supply(documents(1)), 60.0)
    rated = play(TwoPhaseEngine(PROFILE, queue()), [], Supply(documents(1), 0.1), 60.0)
    assert endless.offline_tokens_s > 3 * rated.offline_tokens_s > 0
    assert len(rated.offline_waits_s) == 6, "at 0, 10, … 50 s"
    assert rated.wait_max_s() < 30.0 <= endless.wait_max_s()
    assert rated.wait_max_s({OFFLINE_IDS}) <= rated.wait_max_s()


def test_a_cell_is_profiled_on_one_half_and_judged_on_the_other():
    runs = bench(SMALL, None)
    tight, loose = (runs.cell({Measure.TBT_MEAN: tolerance}) for tolerance in (0.1, 1.0))
    assert tight.knob is not None and loose.knob is not None and tight.knob < loose.knob
    assert loose.outcome.offline_tokens_s > tight.outcome.offline_tokens_s
    for cell, tolerance in ((tight, 0.1), (loose, 1.0)):
        assert cell.profiled[Measure.TBT_MEAN] <= 1 + 0.85 * tolerance
        assert cell.kept == (cell.relative[Measure.TBT_MEAN] <= 1 + tolerance)
    assert runs.alone(0) is runs.alone(0) is not runs.alone(JUDGED)
    plus = runs.relative(runs.sarathi_plus(JUDGED), JUDGED)
    assert plus[Measure.TBT_MEAN] > loose.relative[Measure.TBT_MEAN] > 1.0


def test_an_agent_before_an_ordinary_engine_fills_it_within_the_objective():
    runs = bench(SMALL, None)
    cell = runs.agent_cell({Measure.TBT_MEAN: 1.0})
    assert cell.knob is not None
    assert cell.profiled[Measure.TBT_MEAN] <= 1.85
    assert cell.outcome.online_tokens_s == pytest.approx(runs.alone(JUDGED).online_tokens_s, 0.1)
    assert cell.outcome.offline_tokens_s > 0.3 * cell.outcome.online_tokens_s
    assert cell.outcome.offline_tokens_s < runs.pure_offline().offline_tokens_s * 1.2


def test_shared_prompts_next_to_each_other_are_deducted():
    assert consecutive_gain(0.0) < 1.2
    assert consecutive_gain(1.0) > 4.0


def test_the_predictor_is_within_two_percent_on_the_studys_profile():
    run = predictor.run_of(PROFILE, None, 20.0)
    errors = predictor.measure(PROFILE, run)
    assert errors.in_run < predictor.WANTED and errors.refreshed < predictor.WANTED
    ignoring_context = predictor.measure(PROFILE, run, predictor.decode_tokens)
    assert ignoring_context.in_run > 2 * errors.in_run


def test_the_short_form_prints_every_table():
    ended = CliRunner().invoke(study.main, ["--quick"])
    assert ended.exit_code == 0, ended.output
    for head in (
        "p99 TBT, 10%",
        "Sarathi++",
        "At the agent",
        "two objectives",
        "PSM",
        "µs a prediction",
    ):
        assert head in ended.stdout
