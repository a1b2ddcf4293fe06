"""Who may be best in a cell, and what is inconclusive."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.programs.studies.mesh.judge import MEAN, P99, Cell, Place, Target, Verdict
from tests.programs.studies.mesh.samples import DRAWS, Sample, geomean, interval

REQUESTS = 300


def result(seed, *, factor=1.0, lost=0.0, patience_s=60.0, noise=0.2, late=0.0):
    """A run in which each request takes `factor` times its own time, a share being lost."""
    own, dice = Random(f"own {seed}"), Random(f"{seed} {factor} {lost}")
    ttft_s, end = [], ""
    for at in range(REQUESTS):
        time_s = own.expovariate(1.0) * factor * dice.lognormvariate(-noise * noise / 2, noise)
        is_lost, is_late = at % 100 < 100 * lost, at % 100 >= 100 - 100 * late
        ttft_s.append(patience_s if is_lost else time_s)
        end += "x" if is_lost else "-" if is_late else "+"
    return {
        "measured_from": 0,
        "offered_s": 100.0,
        "region": "012" * (REQUESTS // 3),
        "end": end,
        "ttft_s": ttft_s,
        "latency_s": [time + 5.0 for time in ttft_s],
        "tokens": [10] * REQUESTS,
        "ended_s": [None if one == "x" else float(at) for at, one in enumerate(end)],
        "batch_occupancy": 0.5,
    }


def sample(seeds=(0, 1), **facts):
    return Sample({seed: result(seed, **facts) for seed in seeds})


def cell(ours, **rivals):
    return Cell(Place("chat", "L4", 0.6), ours, rivals, frozenset(["central"]), {})


def test_a_rival_that_sheds_half_is_never_best():
    ours = sample(lost=0.02)
    shedding = sample(factor=0.1, lost=0.5)
    honest = sample(factor=3.0, lost=0.02)
    judged = cell(ours, shedding=shedding, central=honest)
    assert sorted(judged.eligible) == ["central"]
    for found in (judged.time(MEAN), judged.time(P99), judged.rate(lambda one: one.goodput)):
        assert found.name == "central"
    assert shedding.mean[0] > honest.mean[0], "what is shed counts with the patience"
    assert cell(ours, shedding=shedding).time(MEAN) is None


@pytest.mark.parametrize(("lost", "is_eligible"), [(0.03, True), (0.04, False)])
def test_one_point_more_than_we_lose_is_allowed(lost, is_eligible):
    judged = cell(sample(lost=0.02), rival=sample(lost=lost))
    assert ("rival" in judged.eligible) == is_eligible


def test_a_difference_inside_the_interval_is_inconclusive():
    target = Target("mean", 1.05, lambda one: one.time(MEAN))
    judged = {
        factor: target.judged([cell(sample(), rival=sample(factor=factor, noise=0.6))])
        for factor in (1.5, 1.06, 0.7)
    }
    assert [one.verdict for one in judged.values()] == [
        Verdict.HIT,
        Verdict.INCONCLUSIVE,
        Verdict.MISS,
    ]
    close = judged[1.06].summary
    assert close.low < 1.05 < close.high


def test_two_seeds_that_disagree_are_inconclusive():
    ours = Sample({0: result(0, noise=0.0), 1: result(1, noise=0.0)})
    rival = Sample({0: result(0, noise=0.0, factor=1.6), 1: result(1, noise=0.0, factor=0.9)})
    found = interval(cell(ours, rival=rival).time(MEAN).rows)
    assert found.low == pytest.approx(0.9, abs=0.01)
    assert found.high == pytest.approx(1.6, abs=0.01)


def test_rows_are_paired_by_request():
    ours, twice = sample(noise=0.0), sample(noise=0.0, factor=2.0)
    for figure in (MEAN, P99):
        ratio = cell(ours, rival=twice).time(figure).rows
        assert ratio == pytest.approx(np.full(1 + DRAWS + 2, 2.0))


def test_a_target_over_cells_counts_those_without_a_rival():
    target = Target("mean", 1.0, lambda one: one.time(MEAN))
    cells = [
        cell(sample(), rival=sample(factor=2.0)),
        replace(cell(sample(), rival=sample(lost=0.5)), place=Place("tot", "L4", 0.6)),
    ]
    judged = target.judged(cells)
    assert (len(judged.found), judged.without, judged.verdict) == (1, 1, Verdict.HIT)


def test_at_most_is_the_other_way_round():
    target = Target("oracle", 1.1, Cell.over_oracle, at_most=True)
    place = Place("chat", "mixed", 1.0)
    verdicts = [
        target.judged(
            [Cell(place, sample(factor=f), {}, frozenset(), {"oracle": sample()})]
        ).verdict
        for f in (1.0, 1.5)
    ]
    assert verdicts == [Verdict.HIT, Verdict.MISS]


def test_figures_of_a_sample():
    one = sample(lost=0.1, late=0.2)
    assert one.lost[0] == pytest.approx(0.1)
    assert one.goodput[0] == pytest.approx(0.7 * 2 * REQUESTS / 200.0)
    # Ten of each hundred are lost, so the last answer makes nine tenths; one ends every second.
    assert one.throughput[0] == pytest.approx(0.9 * REQUESTS * 10 / (REQUESTS - 1))
    assert sample().throughput[0] == pytest.approx(10.0, rel=0.01)
    assert sample(lost=1.0).throughput[0] < 1.0
    assert one.percentile(0.5)[0] == pytest.approx(np.median(one.ttft_s), rel=0.02)
    assert one.unfairness[0] >= 1.0
    assert geomean([one.mean, one.mean])[0] == pytest.approx(one.mean[0])


def test_the_cold_start_is_what_is_not_measured():
    run = result(0) | {"measured_from": 100}
    cold, warm = Sample({0: run}, cold=True), Sample({0: run})
    assert cold.mean[0] == pytest.approx(np.mean(run["ttft_s"][:100]))
    assert warm.mean[0] == pytest.approx(np.mean(run["ttft_s"][100:]))
