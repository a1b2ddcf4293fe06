import math

import pytest
from click.testing import CliRunner

from mesh.replay.tally import RequestOutcome
from mesh.sim.workload import ClosedLoopClient, RequestEnd, RequestNode, Segment, Workload
from mesh.sim.world import SETTLE_S
from tests.programs.studies.tables.case import System, case, fleet
from tests.programs.studies.tables.command import command
from tests.programs.studies.tables.figures import geomean, throughput, ttft, unfairness
from tests.programs.studies.tables.fingerprint import PLAYS, _closure, code_of
from tests.programs.studies.tables.plays import Throughput
from tests.programs.studies.tables.results import Results

ROUND_ROBIN = System(name="rr", policy="round-robin")


def one(system=ROUND_ROBIN, **changes):
    asked = {"workload": "short", "rate_per_s": 10.0, "duration_s": 2.0, "seed": 3} | changes
    return case((system.name,), system, fleet(2, ("us", "eu")), **asked)


def clients_of_two_regions(**changes):
    return one(clients={"us": 1, "eu": 1}, **changes)


def test_replicas_are_spread_evenly():
    assert list(fleet(7).values()) == [3, 2, 2]
    assert list(fleet(12).values()) == [4, 4, 4]


def test_a_key_names_what_matters_and_nothing_else():
    assert one().key() == one().key()
    assert one(seed=4).key() != one().key()
    assert one(heartbeat_ms=10.0).key() != one().key()
    assert one(System(name="other", policy="round-robin")).key() == one().key()
    assert one(System(name="rr", policy="least-load")).key() != one().key()


def test_a_result_depends_on_its_own_policy_and_on_no_other():
    base = _closure(PLAYS)
    assert "mesh.core.router" in base
    assert "agents.sim.engine" in base
    assert not any(name.startswith("mesh.core.policies.mesh") for name in base)
    assert "mesh.core.policies.mesh" in _closure("mesh.core.policies.mesh")
    codes = {code_of(name) for name in ("mesh", "power-of-two", "skywalker", "oracle")}
    assert len(codes) == 4
    assert code_of("cache-aware") == code_of("cache-aware:0.3/64/1.5")


class FakeSent:
    """As much of a request as throughput looks at."""

    def __init__(self, tokens):
        self.node = RequestNode(prompt=(Segment(1, 1),), answer=Segment(2, tokens))


def test_a_closed_loop_counts_what_ends_while_clients_ask():
    counted = Throughput(
        Workload(name="loop", clients=(ClosedLoopClient("us", iter(())),), until_s=10.0)
    )
    for at_s, tokens in ((1.0, 100), (9.9, 50), (10.1, 1000)):
        counted.add(FakeSent(tokens), RequestEnd(RequestOutcome.OK), SETTLE_S + at_s)
    assert counted.tokens_per_s() == pytest.approx(15.0)


def test_an_open_loop_counts_until_nine_tenths_are_there():
    counted = Throughput(Workload(name="open"))
    for at_s in range(1, 11):
        counted.add(
            FakeSent(100), RequestEnd(RequestOutcome.OK), SETTLE_S + (at_s if at_s < 10 else 500)
        )
    assert counted.tokens_per_s() == pytest.approx(100.0)
    counted.add(FakeSent(9000), RequestEnd(RequestOutcome.SHED), SETTLE_S + 501)
    assert counted.tokens_per_s() == pytest.approx(1000 / 500)


def test_what_was_played_is_not_played_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = command(
        "tiny",
        lambda size: [clients_of_two_regions(seed=seed) for seed in range(size.seeds)],
        lambda cases, results: f"hits {Results(cases, results).mean(ttft('mean'), 'rr'):.4f}",
        "A tiny table.",
    )
    runs = [CliRunner().invoke(table, ["--jobs", "1"], catch_exceptions=False) for _ in range(2)]
    assert [run.exit_code for run in runs] == [0, 0]
    assert "[2/2]" in runs[0].stderr
    assert "[" not in runs[1].stderr
    assert runs[0].stdout == runs[1].stdout != ""


def result(mean_s, rate, region_means=(1.0, 2.0)):
    times = dict.fromkeys(("mean", "p50", "p90", "p99"), mean_s)
    regions = {str(n): {"ttft_s": {"mean": value}} for n, value in enumerate(region_means)}
    return {
        "ttft_s": times,
        "throughput": rate,
        "regions": regions,
        "requests": 10,
        "shed": 0,
        "failed": 1,
    }


def test_figures_of_results():
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geomean([]))
    assert unfairness(result(1.0, 1.0, (0.5, 2.0))) == 4.0
    assert throughput(result(1.0, 7.0)) == 7.0
    assert math.isnan(ttft("p99")({"ttft_s": {"p99": None}}))
