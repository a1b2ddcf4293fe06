"""Who may be best in a cell, and what is inconclusive."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.programs.studies.mesh.judge import (
    GOODPUT,
    MEAN,
    P99,
    TARGETS,
    Against,
    Cell,
    Place,
    Target,
    Verdict,
    sample_of,
)
from tests.programs.studies.mesh.samples import (
    BLOCK,
    BLOCK_SATURATED,
    DRAWS,
    Sample,
    geomean,
    interval,
    weights,
)

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
        "patience_s": patience_s,
        "follow": 0.5,
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
    assert judged.left_out(Against.RIVALS) == ["shedding"]
    assert judged.left_out(Against.CENTRAL) == []
    for found in (judged.time(MEAN, everyone=True), judged.rate(GOODPUT, everyone=True)):
        assert found.name == "central", "its losses count; they don't if the rest is quick enough"


def test_a_rival_that_loses_a_little_and_is_better_for_it_is_no_win_for_us():
    ours = sample(factor=3.0, late=0.5)
    lossy, weak = sample(factor=0.2, lost=0.02), sample(factor=3.6, late=0.6)
    judged = cell(ours, lossy=lossy, weak=weak)
    assert judged.time(MEAN).name == judged.rate(GOODPUT).name == "weak"
    goodput = next(target for target in TARGETS if "goodput" in target.text)
    places = replace(judged, place=Place("chat", "L4", 1.3))
    told, over_all = goodput.judged([places]), goodput.judged_over_everyone([places])
    assert (told.verdict, over_all.verdict) == (Verdict.HIT, Verdict.MISS)
    assert dict(told.times_left_out) == {"lossy": 1}


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


@pytest.mark.parametrize("is_mean", [False, True])
def test_a_cell_without_a_rival_is_inconclusive(is_mean):
    target = Target("mean", 1.0, lambda one: one.time(MEAN), is_mean=is_mean)
    cells = [
        cell(sample(), rival=sample(factor=2.0)),
        replace(cell(sample(), rival=sample(lost=0.5)), place=Place("tot", "L4", 0.6)),
    ]
    judged = target.judged(cells)
    assert (len(judged.found), judged.without, judged.verdict) == (1, 1, Verdict.INCONCLUSIVE)
    assert target.judged(cells[:1]).verdict is Verdict.HIT
    assert target.judged(cells[1:]).verdict is Verdict.INCONCLUSIVE
    worse = cell(sample(), rival=sample(factor=0.5))
    assert target.judged([worse, *cells[1:]]).verdict is Verdict.MISS


def test_a_row_shows_the_worst_cell_that_has_its_verdict():
    def place_of(workload, *factors):
        seeds = {at: result(at, noise=0.0, factor=factor) for at, factor in enumerate(factors)}
        there = cell(sample(noise=0.0), rival=Sample(seeds))
        return replace(there, place=Place(workload, "L4", 0.6))

    wide, missed = place_of("wide", 1.2, 0.2), place_of("missed", 0.9, 0.9)
    cells = [wide, missed, place_of("slight", 0.95, 0.95), place_of("won", 2.0, 2.0)]
    target = Target("mean", 1.0, lambda one: one.time(MEAN))
    judged = target.judged(cells)
    assert judged.verdict is Verdict.MISS
    assert judged.worst == missed.place
    assert (judged.summary.value, judged.summary.high) == pytest.approx((0.9, 0.9))
    assert judged.intervals[wide.place].value < 0.8
    mean = replace(target, is_mean=True).judged([missed, cells[-1]])
    assert (mean.verdict, mean.worst) == (Verdict.HIT, missed.place)
    alone = replace(cell(sample(), rival=sample(lost=0.5)), place=Place("alone", "L4", 0.6))
    only_hits = target.judged([alone, cells[-1]])
    assert only_hits.verdict is Verdict.INCONCLUSIVE
    assert only_hits.worst == cells[-1].place


def test_a_tie_is_1_at_both_ends():
    def times(*factors):
        return Sample(
            {at: result(0, noise=0.0, factor=factor) for at, factor in enumerate(factors)}
        )

    target = Target("mean", 1.0, lambda one: one.time(MEAN))
    for factors, ties in (((1.0, 1.0), 1), ((2.0, 2.0), 0), ((0.8, 1.2), 0)):
        judged = target.judged([cell(times(1.0, 1.0), rival=times(*factors))])
        assert judged.summary.value == pytest.approx(sum(factors) / 2)
        assert judged.ties == ties


def p99_target(ours, theirs):
    target = Target("p99", 0.95, lambda one: one.time(P99))
    return target.judged([cell(ours, rival=theirs)])


def test_where_both_p99_are_the_patience_the_shares_that_are_lost_decide():
    even = p99_target(sample(lost=0.1), sample(lost=0.1))
    assert even.summary.value == pytest.approx(1.0)
    fewer, more = sample(lost=0.04), sample(lost=0.1)
    assert p99_target(more, fewer).summary.value == pytest.approx(0.4)
    assert p99_target(more, fewer).verdict is Verdict.MISS
    other_way = cell(fewer, rival=more).time(P99, everyone=True)
    assert other_way.rows[0] == pytest.approx(2.5)
    quick = sample()
    assert p99_target(more, quick).verdict is Verdict.MISS
    ratio = cell(quick, rival=quick).time(P99)
    assert ratio.rows == pytest.approx(np.ones(1 + DRAWS + 2)), "nothing lost: as it was"


def test_that_the_best_of_several_is_partly_luck_is_part_of_the_interval():
    # Twenty rivals as good as we are: the best of them is better by chance alone.
    rivals = {f"rival {n}": sample(factor=1.0 + 1e-9 * n, noise=0.8) for n in range(20)}
    together = cell(sample(noise=0.0), **rivals).time(MEAN)
    alone = cell(sample(noise=0.0), rival=rivals[together.name]).time(MEAN)
    assert together.rows[0] == alone.rows[0]
    assert np.all(together.rows <= alone.rows)
    assert interval(together.rows).high < interval(alone.rows).high
    found = {name: one.goodput for name, one in rivals.items()}
    rate = cell(sample(late=0.1), **rivals).rate(GOODPUT)
    best = np.max(list(found.values()), axis=0)
    assert rate.rows == pytest.approx(sample(late=0.1).goodput / best)


def test_cells_have_dice_of_their_own_and_longer_blocks_at_full_load():
    lengths = [REQUESTS, REQUESTS]
    assert np.array_equal(weights(lengths, place="a"), weights(lengths, place="a"))
    assert not np.array_equal(weights(lengths, place="a"), weights(lengths, place="b"))
    for load, block in ((0.6, BLOCK), (1.0, BLOCK_SATURATED), (1.3, BLOCK_SATURATED)):
        drawn = sample_of(Place("chat", "L4", load), {0: result(0)})._weights[1 : 1 + DRAWS]
        changes = np.flatnonzero(np.any(np.diff(drawn, axis=1) != 0, axis=0)) + 1
        assert list(changes) == list(range(block, REQUESTS, block))
    one = sample_of(Place("chat", "L4", 0.6), {0: result(0)}).mean
    other = sample_of(Place("tot", "L4", 0.6), {0: result(0)}).mean
    assert one[0] == other[0]
    assert not np.array_equal(one[1 : 1 + DRAWS], other[1 : 1 + DRAWS])


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


def everywhere_of(occupancy, **facts):
    return Sample({seed: result(seed, **facts) | {"batch_occupancy": occupancy} for seed in (0, 1)})


@pytest.mark.parametrize(
    ("ours", "reference", "is_full"),
    [(0.1, 0.6, True), (0.9, 0.59, False), (0.9, 0.1, False), (0.9, None, False)],
)
def test_full_memory_is_that_of_the_reference(ours, reference, is_full):
    everywhere = None if reference is None else everywhere_of(reference)
    there = replace(cell(everywhere_of(ours)), everywhere=everywhere)
    assert there.kv_saturated is is_full
    asked = {target.text: target.among(there) for target in TARGETS}
    assert asked["the same where memory is full"] is is_full
    assert asked["price of federation"] is not is_full


@pytest.mark.parametrize(("ours", "verdict"), [(2.0, Verdict.MISS), (0.5, Verdict.HIT)])
def test_the_price_of_federation_is_our_time_over_that_with_one_view(ours, verdict):
    everywhere = everywhere_of(0.1, noise=0.0)
    there = replace(cell(sample(noise=0.0, factor=ours)), everywhere=everywhere)
    price = next(target for target in TARGETS if target.text == "price of federation")
    judged = price.judged([there])
    assert judged.summary.value == pytest.approx(ours)
    assert judged.verdict is verdict


def test_what_an_oracle_gains_is_the_least_time_of_a_rival_over_that_of_the_better_oracle():
    rivals = {"near": sample(factor=1.2), "central": sample(factor=1.5)}
    oracles = {"good": sample(factor=0.8), "better": sample(factor=0.5)}
    place = Place("chat", "L4", 0.6)
    cell = Cell(place, sample(factor=1.0), rivals, frozenset(["central"]), oracles)
    least = oracles["better"].mean[0]
    for against, rival in ((Against.RIVALS, "near"), (Against.CENTRAL, "central")):
        gain = cell.oracles_gain(against)
        assert gain.name == rival
        assert gain.rows[0] == pytest.approx(rivals[rival].mean[0] / least)
    assert Cell(place, sample(), rivals, frozenset(), {}).oracles_gain(Against.RIVALS) is None
    assert Cell(place, sample(), {}, frozenset(), oracles).oracles_gain(Against.RIVALS) is None


def test_figures_of_a_sample():
    one = sample(lost=0.1, late=0.2)
    assert one.lost[0] == pytest.approx(0.1)
    assert one.goodput[0] == pytest.approx(0.7 * 2 * REQUESTS / 200.0)
    # Ten of each hundred are lost, so the last answer makes nine tenths; one ends every second.
    assert one.throughput[0] == pytest.approx(0.9 * REQUESTS * 10 / (REQUESTS - 1))
    assert sample().throughput[0] == pytest.approx(10.0, rel=0.01)
    assert sample(lost=1.0).throughput[0] < 1e-3
    assert one.percentile(0.5)[0] == pytest.approx(np.median(one.ttft_s), rel=0.02)
    assert geomean([one.mean, one.mean])[0] == pytest.approx(one.mean[0])


def by_region(*times_s):
    run = result(0)
    return Sample({0: run | {"ttft_s": [times_s[int(region)] for region in run["region"]]}})


def test_we_are_compared_with_the_fairest_of_the_three_quickest():
    rivals = {"slow": by_region(9.0, 9.0, 9.0), "four": by_region(1.0, 4.0, 1.0)}
    rivals |= {"five": by_region(1.0, 5.0, 1.0), "three": by_region(2.0, 6.0, 2.0)}
    found = cell(by_region(1.0, 6.0, 1.0), **rivals).unfairness()
    assert found.name == "three"
    assert found.rows == pytest.approx(np.full(1 + DRAWS + 1, 2.0))


def test_unfairness_is_the_slowest_regions_mean_over_the_quickest():
    assert by_region(0.5, 2.0, 1.0).unfairness == pytest.approx(np.full(1 + DRAWS + 1, 4.0))


def test_what_is_lost_does_not_end_the_clock_of_throughput():
    whole, early = result(0), result(0)
    for at in range(REQUESTS // 3, REQUESTS):  # all but the first third is lost
        early["ended_s"][at] = None
    # It ends an answer each second; a third of the tokens in a third of the time is no gain.
    assert Sample({0: whole}).throughput[0] == pytest.approx(10.0, rel=0.01)
    early["offered_s"] = 300.0
    assert Sample({0: early}).throughput[0] == pytest.approx(1000 / 360.0)
    none = result(1) | {"ended_s": [None] * REQUESTS}
    both = Sample({0: whole | {"offered_s": 300.0}, 1: none}).throughput[0]
    assert both == pytest.approx(2700 / (269 + 160.0), rel=0.01), "its clock runs as well"


def test_the_cold_start_is_what_is_not_measured():
    run = result(0) | {"measured_from": 100}
    cold, warm = Sample({0: run}, cold=True), Sample({0: run})
    assert cold.mean[0] == pytest.approx(np.mean(run["ttft_s"][:100]))
    assert warm.mean[0] == pytest.approx(np.mean(run["ttft_s"][100:]))
