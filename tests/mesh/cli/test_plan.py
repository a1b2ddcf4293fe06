"""`mesh plan` as people run it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mesh.cli.plan import command
from mesh.sim.study.plan import Plan
from mesh.sim.study.plan_out import saving
from mesh.sim.study.plan_settings import PlanSettings
from schemas.ids import RegionId

TRACE = ("--trace", "tests/data/mooncake/conversation_first60.jsonl", "--scale-lengths", "0.2")
QUICK = (*TRACE, "--speed", "2", "--regions", "us,eu", "--ttft-p90", "5")


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_plan_has_a_fleet_for_each_topology_and_what_the_mesh_saves(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    ended = plan(*QUICK, "--central", "us", "--gpu-hour-price", 2, "--out", out)
    assert (ended.exit_code, ended.stderr) == (0, ""), ended.output
    found = json.loads(out.read_text())
    assert list(found["plans"]) == ["region-local", "mesh", "central:us"]
    for topology, each in found["plans"].items():
        assert each["replicas"].keys() == {"us", "eu"}
        assert each["total"] == sum(each["replicas"].values())
        assert each["per_hour"] == 2 * each["total"]
        assert each["is_least"]
        assert each["report"]["topology"] == topology
        assert all(r["ttft_s"]["p90"] <= 5 for r in each["report"]["regions"].values())
    totals = {topology: each["total"] for topology, each in found["plans"].items()}
    saved = found["saved"]["region-local"]
    assert saved["replicas"] == totals["region-local"] - totals["mesh"] >= 0
    assert 1 <= found["simulations"] <= 200
    assert f"of {totals['region-local']} replicas" in ended.stdout
    again = tmp_path / "again.json"
    plan(*QUICK, "--central", "us", "--gpu-hour-price", 2, "--out", again)
    assert again.read_bytes() == out.read_bytes()


def test_a_closed_loop_is_planned_for_throughput() -> None:
    loop = (
        "--workload",
        "chat",
        "--clients",
        "us=6,eu=2",
        "--duration-s",
        20,
        "--regions",
        "us,eu",
    )
    ended = plan(*loop, "--ttft-p90", 5, "--throughput", "0.1", "--replicas-max", 4)
    assert ended.exit_code == 0, ended.output
    assert "region-local" in ended.stdout


def test_a_target_that_no_fleet_meets_ends_with_1() -> None:
    ended = plan(*TRACE, "--regions", "us,eu", "--ttft-p90", "0.01", "--replicas-max", 2)
    assert ended.exit_code == 1
    assert "region-local: 2 replicas miss the target: us TTFT p90" in ended.stdout
    assert "mesh: 4 replicas miss the target" in ended.stdout


def test_simulations_are_bounded() -> None:
    ended = plan(*QUICK, "--simulations-max", 1)
    assert ended.exit_code == 1
    assert "no fleet did in 1 simulations" in ended.stdout


def test_money_is_the_difference_of_the_fleets() -> None:
    told = PlanSettings.model_validate(
        {"workload": "chat", "ttft_p90": 1, "gpu_hour_price": 1.5, "gpus_per_replica": 2}
    )
    us = RegionId("us")
    plans = [
        Plan(topology=topology, replicas={us: count}, report={}, is_least=True)
        for topology, count in (("region-local", 12), ("mesh", 9))
    ]
    assert saving(told, plans, plans[0]) == {
        "replicas": 3,
        "share": 0.25,
        "per_hour": 9.0,
        "per_year": 9.0 * 8766,
    }
    assert saving(told, plans, plans[1]) is None


BAD = {
    "no target": (TRACE, "Missing option '--ttft-p90'"),
    "target 0": ((*TRACE, "--ttft-p90", "0"), "--ttft-p90: Input should be greater than 0"),
    "throughput": ((*QUICK, "--throughput", "-1"), "--throughput: Input should be greater than 0"),
    "no source": (("--ttft-p90", "1"), "give either --trace or --workload"),
    "region": ((*QUICK, "--central", "ap"), "topology: ap is none of us, eu"),
    "regions": ((*TRACE, "--ttft-p90", "1", "--regions", "us,us"), "us is named twice"),
    "policy": ((*QUICK, "--policy", "best"), "--policy: unknown policy 'best'"),
    "price": (
        (*QUICK, "--gpu-hour-price", "0"),
        "--gpu-hour-price: Input should be greater than 0",
    ),
    "clients": (("--workload", "chat", "--ttft-p90", "1", "--regions", "us"), "clients in ap"),
    "out": ((*QUICK, "--out", "nowhere/plan.json"), "--out: nowhere/plan.json: give a file"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_what_can_not_be_used_is_named_and_nothing_is_played(
    arguments: tuple[str, ...], says: str
) -> None:
    ended = plan(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert says in ended.stderr
