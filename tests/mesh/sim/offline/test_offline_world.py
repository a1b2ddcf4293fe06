"""Batch jobs in a whole world: every line has one result, whatever dies."""

from random import Random

import pytest

from mesh.sim.config import Cut, EngineCrash, ReplicaCrash, RouterCrash, RunnerCrash, WorldInvalid
from mesh.sim.offline.config import NONE, REGION_LOCAL, OfflineConfig
from mesh.sim.offline.jobs import SimJob
from mesh.sim.offline.store import ACK_WAIT_S
from mesh.sim.workload import RequestNode, Segment
from mesh.sim.world import report, run
from schemas.ids import ReplicaId
from tests.mesh.sim.build import AP, EU, US, config, leftovers, played, steady
from tests.mesh.sim.random_faults import random_faults

US1, EU1 = ReplicaId("us-1"), ReplicaId("eu-1")
WINDOW_S = 600.0


def job(lines=40, region=US, *, prompt=100, answer=5, name="job", **fields):
    """Lines of which four at a time share a beginning of a block."""
    nodes = tuple(
        RequestNode(
            prompt=(Segment(9000 + n // 4, 64), Segment(10_000 + n, prompt - 64)),
            answer=Segment(50_000 + n, answer),
            priority="low",
        )
        for n in range(lines)
    )
    return SimJob(name=name, region=region, lines=nodes, **{"window_s": WINDOW_S, **fields})


def offline(*jobs, **fields):
    return OfflineConfig(jobs=jobs or (job(),), budget_s=10.0, **fields)


def report_of(workload, world_config):
    world = played(workload, world_config)
    assert leftovers(world) == {}
    runners = [one for runners in world.offline.runners.values() for one in runners]
    assert sum(runner.held_lines for runner in runners) == 0
    return report(world, workload)


def ended(counts):
    return counts["answered"] + counts["failed"] + counts["expired"]


def test_every_line_of_a_job_is_answered():
    result = report_of(steady(20, 0.5, US), config(offline=offline()))
    counts = result["offline"]
    assert (counts["lines"], counts["answered"], counts["repeated"]) == (40, 40, 0)
    assert counts["tokens"]["prompt"] == 40 * 100
    assert counts["tokens"]["output"] == 40 * 5
    assert counts["tokens"]["cached"] > 0
    assert counts["jobs"]["job"]["took_s"] < WINDOW_S
    assert result["ok"] == 20


def test_lines_go_where_there_are_replicas():
    result = report_of(steady(4, 0.5, EU), config({US: 0, EU: 1}, offline=offline()))
    counts = result["offline"]
    assert counts["answered"] == counts["elsewhere"] == 40
    assert counts["control_bytes_per_s"]["us>eu"] > 0


def test_lines_stay_at_home_where_their_scope_says_so():
    asked = offline(job(region=US), job(region=EU, name="other"), scope=REGION_LOCAL)
    counts = report_of(steady(4, 0.5, EU), config({US: 1, EU: 1}, offline=asked))["offline"]
    assert counts["answered"] == 80
    assert counts["elsewhere"] == 0
    assert counts["tokens_by_region"] == {US: 40 * 105, EU: 40 * 105}
    assert counts["control_bytes_per_s"] == {}


def test_a_window_that_is_over_ends_what_is_left():
    slow = offline(job(lines=200, answer=500, window_s=20.0))
    counts = report_of(steady(4, 0.5, US), config(offline=slow))["offline"]
    assert 0 < counts["expired"] < 200
    assert ended(counts) == 200
    assert counts["late_jobs"] == ["job"]


def test_without_a_scope_nothing_changes():
    workload = steady(30, 0.1, US, EU)
    without = run(workload, config({US: 1, EU: 1}))
    left_out = run(workload, config({US: 1, EU: 1}, offline=offline(scope=NONE)))
    assert left_out == without
    assert "offline" not in without


def test_the_same_seed_gives_the_same_results():
    asked = offline(job(), job(region=EU, name="other", at_s=3.0))
    first, second = (
        run(steady(40, 0.2, US, EU), config({US: 1, EU: 1}, seed=5, offline=asked, loss=0.1))
        for _ in range(2)
    )
    assert first == second


FAULTS = {
    "peer's runner": (RunnerCrash(region=EU, at_s=2.0, until_s=30.0),),
    "runner, twice": (
        RunnerCrash(region=US, at_s=2.0, until_s=4.0),
        RunnerCrash(region=US, at_s=6.0, until_s=7.0),
    ),
    "replica": (ReplicaCrash(replica=US1, at_s=2.0, until_s=20.0),),
    "peer's replica": (ReplicaCrash(replica=EU1, at_s=2.0, until_s=20.0),),
    "engine": (EngineCrash(replica=US1, at_s=2.0, until_s=8.0),),
    "link, for ever": (Cut(one=US, other=EU, at_s=2.0),),
    "routers": (RouterCrash(region=US, at_s=2.0, until_s=10.0),),
    "runner and link": (
        RunnerCrash(region=US, at_s=2.0, until_s=4.0),
        Cut(one=US, other=EU, at_s=3.0, until_s=8.0),
    ),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_every_line_is_answered_exactly_once_whatever_dies(faults):
    asked = offline(job(lines=120, answer=40))
    workload = steady(60, 0.3, US, EU)
    result = report_of(workload, config({US: 1, EU: 1}, offline=asked, faults=faults))
    counts = result["offline"]
    assert (counts["answered"], counts["failed"], counts["expired"]) == (120, 0, 0)
    assert counts["jobs"]["job"]["took_s"] < 2 * ACK_WAIT_S + 30


def test_two_runners_share_a_region():
    asked = offline(job(lines=80), runners=2)
    counts = report_of(steady(4, 0.5, US), config({US: 2}, offline=asked))["offline"]
    assert counts["answered"] == 80


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_of_faults_loses_a_line(seed):
    print("seed", seed)
    faults = random_faults(
        Random(seed),
        replicas=(US1, EU1, ReplicaId("ap-1")),
        regions=(US, EU, AP),
        count=8,
        within_s=20.0,
    )
    crash = RunnerCrash(region=(US, EU, AP)[seed % 3], at_s=5.0 + seed, until_s=9.0 + seed)
    asked = offline(job(lines=60, answer=20), job(lines=60, region=AP, name="other"))
    workload = steady(60, 0.3, US, EU, AP)
    world_config = config(
        {US: 1, EU: 1, AP: 1}, seed=seed, offline=asked, faults=(*faults, crash), loss=0.05
    )
    counts = report_of(workload, world_config)["offline"]
    assert ended(counts) == 120
    assert counts["answered"] == 120


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scope": "moon"}, "offline scope"),
        ({"runners": 0}, "runners must be"),
        ({"budget_s": 0.0}, "budget of an iteration"),
        ({"jobs": tuple(job(1, name=str(n)) for n in range(101))}, "101 jobs"),
    ],
)
def test_bad_configurations_say_what_to_change(fields, says):
    with pytest.raises(ValueError, match=says):
        OfflineConfig(**{"jobs": (), **fields})


def test_without_offline_work_no_runner_can_crash():
    with pytest.raises(WorldInvalid, match="no batch runner"):
        config(faults=(RunnerCrash(region=US, at_s=1.0),))
