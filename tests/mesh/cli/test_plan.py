"""`mesh plan` as people run it."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from mesh.cli.plan import command
from mesh.sim.study.plan import Plan
from mesh.sim.study.results import plan_file, print_plan, saving
from mesh.sim.study.settings import PlanSettings
from schemas.ids import RegionId

TRACE = ("--trace", "tests/data/mooncake/conversation_first60.jsonl", "--scale-lengths", "0.2")
QUICK = (*TRACE, "--limit", "16", "--speed", "2", "--regions", "us,eu", "--ttft-p90", "10")


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
        assert all(r["ttft_s"]["p90"] <= 10 for r in each["report"]["regions"].values())
    totals = {topology: each["total"] for topology, each in found["plans"].items()}
    saved = found["saved"]["region-local"]
    assert saved["replicas"] == totals["region-local"] - totals["mesh"]
    assert 1 <= found["simulations"] <= 200
    assert "against region-local the mesh saves " in ended.stdout
    assert f"wrote {out}" in ended.stdout


def test_a_plan_made_twice_is_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        plan(*QUICK, "--limit", "6", "--out", file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_closed_loop_is_planned_for_throughput() -> None:
    loop = (
        "--workload",
        "chat",
        "--clients",
        "us=2,eu=1",
        "--duration-s",
        5,
        "--regions",
        "us,eu",
    )
    ended = plan(*loop, "--ttft-p90", 5, "--throughput", "0.1", "--replicas-max", 4)
    assert ended.exit_code == 0, ended.output
    assert "region-local" in ended.stdout


def test_a_target_that_no_fleet_meets_ends_with_1() -> None:
    ended = plan(*TRACE, "--regions", "us,eu", "--ttft-p90", "0.01", "--replicas-max", 2)
    assert ended.exit_code == 1
    assert "region-local: 2 replicas can't meet the target: us " in ended.stdout
    assert "mesh: 4 replicas can't meet the target" in ended.stdout
    assert ended.stderr == "region-local: no fleet; going on with mesh\n", "the reason comes once"


def test_simulations_are_bounded() -> None:
    ended = plan(*QUICK, "--simulations-max", 1)
    assert ended.exit_code == 1
    assert "mesh: no fleet did in 1 simulation\n1 simulation\n" in ended.stdout


US = RegionId("us")


def planned(topology: str, replicas: int, answered: int) -> Plan:
    """A plan whose run answered so many requests in 100 s."""
    figures = {"ok": answered, "duration_s": 100.0, "ttft_s": {"p90": 0.5}}
    report = {**figures, "regions": {"us": figures}}
    return Plan(topology=topology, replicas={US: replicas}, report=report, is_least=True)


def shown(told: PlanSettings, plans: Sequence[Plan], width: int = 80) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    print_plan(told, plans, 7, console)
    return text.getvalue()


def test_where_one_replica_will_do_nothing_is_saved_and_no_price_is_told() -> None:
    told = PlanSettings.model_validate({"workload": "chat", "ttft_p90": 1, "gpu_hour_price": 1.5})
    text = shown(told, [planned("region-local", 1, 11), planned("mesh", 1, 11)])
    assert "against region-local the mesh saves nothing: 1 replica will do for either" in text
    assert "a year" not in text
    assert shown(told, [planned("region-local", 3, 11), planned("mesh", 3, 11)]).count("3 rep") == 1


def test_few_answers_a_second_are_told_with_digits_that_differ() -> None:
    told = PlanSettings.model_validate({"workload": "chat", "ttft_p90": 1})
    plans = [planned("region-local", 2, 14), planned("mesh", 1, 13)]
    plans[0].report["duration_s"] = plans[1].report["duration_s"] = 98.0  # type: ignore[index]
    text = shown(told, plans).replace("\n", " ")
    assert "answers 0.133 requests a second, 7.1% fewer than region-local's 0.143; to" in text


def test_money_is_the_difference_of_the_fleets() -> None:
    told = PlanSettings.model_validate(
        {"workload": "chat", "ttft_p90": 1, "gpu_hour_price": 1.5, "gpus_per_replica": 2}
    )
    plans = [planned("region-local", 12, 400), planned("mesh", 9, 300)]
    assert saving(told, plans, plans[0]) == {
        "replicas": 3,
        "share": 0.25,
        "per_hour": 9.0,
        "per_year": 9.0 * 8766,
        "throughput_ratio": 0.75,
    }
    assert saving(told, plans, plans[1]) is None
    assert "saves 3 of 12 replicas (25.0%), 9.00 an hour, 78,894 a year" in shown(told, plans, 200)
    dearer = shown(told, [planned("central:us", 4, 400), planned("mesh", 5, 400)], 200)
    assert "needs 1 replica more than 4 (25.0%), 3.00 an hour, 26,298 a year" in dearer


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({}, "to plan for as many, add --throughput 4.005"),  # 4.00599…, rounded down
        ({"throughput": 3.0}, "both reach the target of 3"),
    ],
)
def test_a_smaller_fleet_that_answers_fewer_a_second_is_said_to(
    target: dict[str, float], says: str
) -> None:
    told = PlanSettings.model_validate({"workload": "chat", "ttft_p90": 1, **target})
    plans = [planned("region-local", 12, 401), planned("mesh", 9, 321)]
    plans[0].report["duration_s"] = 100.1  # type: ignore[index]
    text = shown(told, plans)
    assert "the mesh's fleet answers 3.21 requests a second, 19.9% fewer than" in text
    assert "region-local's 4.01" in text
    assert says in text.replace("\n", " ")
    alike = [planned("region-local", 12, 401), planned("mesh", 9, 400)]
    assert "fewer" not in shown(told, alike)


def test_the_target_is_told_and_reached_in_table_and_file() -> None:
    told = PlanSettings.model_validate({"workload": "chat", "ttft_p90": 1.5, "throughput": 3})
    plans = [planned("region-local", 12, 401), planned("mesh", 9, 400)]
    text = shown(told, plans)
    assert "TTFT p90 of every region at most 1.5 s, at least 3 answers/s over all" in text
    assert "at most 1% of a region's requests lost" in text
    found = plan_file(told, plans, 7)
    assert found["target"] == {"ttft_p90_s": 1.5, "throughput_per_s": 3.0, "lost_max": 0.01}
    assert found["plans"]["mesh"]["throughput_per_s"] == 4.0
    assert found["plans"]["mesh"]["ttft_p90_s"] == 0.5


def test_fleets_of_many_regions_fit_80_columns_and_none_is_cut(tmp_path: Path) -> None:
    names = [f"continent-{number}" for number in range(12)]
    rtt = tmp_path / "rtt.toml"
    links = (
        f'[[links]]\nbetween = ["{one}", "{other}"]\nrtt_ms = 80\n'
        for one, other in combinations(names, 2)
    )
    rtt.write_text("".join(links))
    told = PlanSettings.model_validate(
        {
            "workload": "chat",
            "ttft_p90": 1,
            "regions": names,
            "rtt": str(rtt),
            "gpu_hour_price": 1.25,
        }
    )
    plans = [
        replace(planned(topology, 12, 400), replicas={RegionId(name): 11 for name in names})
        for topology in ("region-local", "mesh", "central:us")
    ]
    lines = [line for line in shown(told, plans).splitlines() if " saves " not in line]
    table = lines[1:-1]
    assert all(len(line) <= 80 for line in table), max(table, key=len)
    assert "…" not in "".join(table)
    for name in names:
        assert sum(f"{name}=11" in line for line in table) == 3
    assert sum("165.00" in line for line in table) == 3


BAD = {
    "no target": (TRACE, "Missing option '--ttft-p90'"),
    "target 0": ((*TRACE, "--ttft-p90", "0"), "--ttft-p90: must be more than 0, not 0"),
    "throughput": ((*QUICK, "--throughput", "-1"), "--throughput: must be more than 0, not -1"),
    "no source": (("--ttft-p90", "1"), "give either --trace or --workload"),
    "region": ((*QUICK, "--central", "ap"), "topology: ap is none of us, eu"),
    "regions": ((*TRACE, "--ttft-p90", "1", "--regions", "us,us"), "us is named twice"),
    "policy": ((*QUICK, "--policy", "best"), "--policy: unknown policy 'best'"),
    "price": (
        (*QUICK, "--gpu-hour-price", "0"),
        "--gpu-hour-price: must be more than 0, not 0",
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


def test_a_plan_answers_every_line_of_its_batch_jobs(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    job = "us=20,prompt=200,answer=10,window=60"
    few = (*TRACE, "--limit", "6", "--regions", "us,eu", "--ttft-p90", "10", "--replicas-max", 2)
    ended = plan(*few, "--offline", job, "--out", out)
    assert ended.exit_code == 0, ended.output
    found = json.loads(out.read_text())["plans"]
    assert list(found) == ["region-local", "mesh"]
    for each in found.values():
        assert each["report"]["offline"]["answered"] == 20
    impossible = plan(*few, "--offline", "us=2000,answer=500,window=5")
    assert impossible.exit_code == 1
    assert "offline lines not answered" in impossible.stdout
