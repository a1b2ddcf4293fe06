"""The scale benchmark on a small world."""

import pytest
from click.testing import CliRunner

from mesh.replay.report import RunReport
from tests.programs.studies.scale import Cost, Mark, Size, Watch, main, play, world, written

SMALL = Size(requests=12, replicas=5, regions=3, seed=1)


def test_a_small_world_is_played_to_its_end_and_measured() -> None:
    cost = play("round-robin", SMALL)
    assert cost.report["requests"] == cost.report["ok"] > 0
    assert cost.cpu_s > 0 < cost.wall_s
    assert cost.peak_bytes > 10 * 2**20, "an interpreter alone has more"


def test_regions_form_a_ring_and_replicas_are_spread() -> None:
    given = world("mesh", Size(1, 11, 4, 0))
    assert [len(fleet) for fleet in given.regions.values()] == [3, 3, 3, 2]
    names = list(given.regions)
    apart = [given.rtt.rtt_s(names[0], name) for name in names]
    assert apart == pytest.approx([0.0, 0.05, 0.1, 0.05])


def test_the_full_part_of_a_run_is_what_a_million_is_made_of() -> None:
    size = Size(requests=80, replicas=1, regions=1, seed=0)  # 100 s of arrivals
    watch = Watch("mesh", size)
    watch.marks += [Mark(at_s, cpu, 0) for at_s, cpu in ((0, 0), (25, 5), (100, 20), (300, 30))]
    assert watch.per_virtual_s() == pytest.approx(15 / 75)
    report: RunReport = {
        "requests": 80,
        "shed": 1,
        "failed": 2,
        "duration_s": 300.0,
        "ttft_s": {"p90": 0.5},
    }
    cost = Cost("mesh", report, 0.1, 40.0, 30.0, watch.per_virtual_s(), 2**30)
    row = written(size, [cost]).splitlines()[-1].split(" | ")
    million_s = 30.0 + 0.2 * (1_000_000 / 0.8 - 100)
    assert row[-1] == f"{million_s / 3600:.2f} |"
    assert row[1:3] == ["80", "3"]


def test_the_command_prints_a_row_for_each_policy() -> None:
    given = ["--requests", "6", "--replicas", "2", "--regions", "2"]
    ended = CliRunner().invoke(main, [*given, "--policy", "mesh", "--policy", "least-load"])
    assert ended.exit_code == 0, ended.output
    assert [line.split()[1] for line in ended.stdout.splitlines()[4:]] == ["mesh", "least-load"]
