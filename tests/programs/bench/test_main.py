"""The whole command, on the systems that need no installation and a cell of two seconds."""

import subprocess
import sys

import orjson
import pytest
from click.testing import CliRunner

from tests.programs.bench.__main__ import main, status
from tests.programs.bench.cells import CELLS, chosen
from tests.programs.bench.test_targets import played


@pytest.mark.timeout(120)
def test_a_run_measures_and_writes(tmp_path):
    out = tmp_path / "found"
    options = ("--only", "direct,mesh,forwarded,many", "--rounds", "1", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.bench", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = orjson.loads(out.with_suffix(".json").read_bytes())
    for name in ("mesh", "forwarded"):
        [figures] = found["rounds"]["many"][name]
        assert (figures["answered"], figures["failed"]) == (768, 0)
        assert figures["path_cpu_us"] > figures["front_cpu_us"] > 0
        assert 20 < figures["router_peak_mb"] < figures["path_peak_mb"]
    assert found["absent"] == {}
    assert out.with_suffix(".md").read_text() == done.stdout.removesuffix("\n")


def test_what_is_dearer_than_the_last_release_or_lacks_it_fails():
    assert status(played()) == 0
    assert status(played(agents_cpu_us=51.0)) == 1
    lacking = played()
    lacking.absent["last-release"] = "it ended"
    assert status(lacking) == 1


def test_an_unknown_name_is_refused_with_the_known_ones():
    result = CliRunner().invoke(main, ["--only", "mesh,plane"])
    assert result.exit_code == 2
    assert "no system or cell plane; there are" in result.output
    assert "sglang-router" in result.output


def test_two_trees_of_one_name_are_refused(tmp_path):
    trees = [tmp_path / name / "mesh" for name in ("one", "other")]
    for tree in trees:
        tree.mkdir(parents=True)
    result = CliRunner().invoke(main, [f"--beside={tree}" for tree in trees])
    assert result.exit_code == 2
    assert "more than one is named mesh" in result.output


def test_named_cells_are_played_and_else_all_or_the_quick_ones():
    assert [cell.name for cell in chosen(frozenset({"plain", "mesh"}), True)] == ["plain"]
    assert chosen(frozenset({"mesh"}), False) == CELLS
    quick = chosen(frozenset(), True)
    assert 0 < len(quick) < len(CELLS)
    assert all(cell.is_quick for cell in quick)
