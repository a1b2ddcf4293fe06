"""Batch jobs in studies and plans: their options, their runs, their tables."""

from dataclasses import replace

import pytest

from mesh.sim.study.cells import labels
from mesh.sim.study.plan import PlanTarget
from mesh.sim.study.settings import PlanSettings, SimSettings
from tests.mesh.sim.study.small import settings, study

JOB = "us=12,prompt=200,answer=5,window=10m"


def test_scopes_are_compared_and_none_is_a_run_without_jobs():
    results = study(settings(offline=(JOB,), offline_scope="mesh,none"))
    assert list(results) == ["mesh offline mesh", "mesh offline none"]
    with_jobs, without = (result.report for result in results.values())
    assert with_jobs["offline"]["answered"] == 12
    assert "offline" not in without
    (alone,) = study(settings()).values()
    assert alone.report["digest"] == without["digest"]


def test_jobs_are_no_part_of_a_run_without_them():
    given = SimSettings.model_validate({"workload": "chat", "offline_budget_ms": 10})
    assert [cell.offline for cell in given.cells()] == [None]
    assert labels(given.cells()) == ["mesh"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"offline": ("nowhere.jsonl",)}, "is no file"),
        ({"offline": ("ap=5",)}, "job in ap, which is not in --regions"),
        ({"offline": ("5,prompt=x",)}, "from 1 to"),
        ({"offline": ("5",) * 101}, "101 jobs"),
        ({"offline_scope": "mesh"}, "give that too"),
        ({"offline": ("5",), "offline_scope": "moon"}, "offline scope"),
        ({"offline_budget_ms": 0}, "greater than 0"),
    ],
)
def test_what_can_not_be_used_is_named(fields, says):
    with pytest.raises(ValueError, match=says):
        settings(**fields)


def test_a_plan_counts_lines_that_are_not_answered():
    figures = {"requests": 10, "ok": 10, "ttft_s": {"p90": 0.1}}
    job = {"region": "us", "lines": 9, "answered": 7}
    report = {"regions": {"us": figures, "eu": figures}, "offline": {"jobs": {"a": job}}}
    target = PlanTarget(ttft_p90_s=1.0)
    assert target.missed(report) == {"us": "2 offline lines not answered"}
    assert not target.met(report)
    done = {"jobs": {"a": {**job, "answered": 9}}}
    assert target.met({**report, "offline": done})
    assert replace(target, ttft_p90_s=0.01).missed(report)["us"].startswith("TTFT")


def test_a_plan_knows_where_jobs_are_submitted():
    given = {"workload": "chat", "ttft_p90": 1, "regions": "us,eu"}
    planned = PlanSettings.model_validate({**given, "offline": ("5", "eu=7", "us=2")})
    assert planned.offline_regions == {"us", "eu"}
    assert [job.name for job in planned.offline_jobs()] == ["job-1", "job-2", "job-3"]
