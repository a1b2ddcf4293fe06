"""The program: killed and started again, in pieces, with more seeds where a cell is saturated."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mesh.sim.twin_policies import checked_twin_policy
from schemas.settings import parse_pushing
from tests.programs.studies.mesh import search
from tests.programs.studies.mesh.matrix import Matrix, Place, is_saturated, name_of
from tests.programs.studies.mesh.page import written
from tests.programs.studies.mesh.rivals import CENTRAL, RIVALS, Rival, Setting
from tests.programs.studies.mesh.test_judge import result
from tests.programs.studies.tables.command import FOLDER, Size
from tests.programs.studies.tables.result_files import ResultFiles
from tests.support.result_page import ROOT

CELL = "short, L4, 1.3"
SMALL = ("--requests", "40", "--cell", CELL, "--rival", "skywalker", "--seeds", "1", "--jobs", "1")
WITHIN_S = 400
RUNS = 5  # mesh, skywalker, two oracles, mesh-everywhere
NORMAL = Size(quick=False, full=False, seeds=2, traces=None)


@contextmanager
def study(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The study with its results in that folder; it is killed with its workers in the end."""
    one = subprocess.Popen(
        [sys.executable, "-m", "tests.programs.studies.mesh", *SMALL, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with one:
        try:
            yield one
        finally:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


def page_of(folder: Path, *more: str) -> tuple[str, int]:
    """What the study prints when it ends, and how many runs it played."""
    with study(folder, *more) as one:
        page, progress = one.communicate(timeout=WITHIN_S)
    assert page, progress
    return page, len(re.findall(r"^\[", progress, re.MULTILINE))


@pytest.mark.timeout(4 * WITHIN_S)
def test_a_study_that_is_killed_goes_on_where_it_stopped(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected, played = page_of(whole)
    assert played == RUNS
    assert f"| {CELL} | 1 |" in expected
    assert "Not played" not in expected

    with study(killed) as one:
        assert one.stderr is not None
        assert any(line.startswith("[1/") for line in one.stderr)
    kept = len(list((killed / FOLDER).glob("*.json")))
    assert kept >= 1
    partial, none = page_of(killed, "--page")
    assert none == 0
    assert (f"{CELL} ({kept} of {RUNS} runs)" in partial) == (kept < RUNS)
    page, rest = page_of(killed)
    assert kept + rest == RUNS
    assert page == expected


def run_of(ends: str, warm_up: int = 0) -> dict[str, object]:
    return {"end": ends, "measured_from": warm_up}


def test_a_run_is_saturated_if_it_loses_or_is_late():
    assert not is_saturated(run_of("+" * 99 + "x"))
    assert is_saturated(run_of("+" * 98 + "xx"))
    assert is_saturated(run_of("+" * 89 + "-" * 11))
    assert not is_saturated(run_of("x" * 50 + "+" * 50, warm_up=50))


def test_a_saturated_cell_is_played_with_four_seeds(tmp_path):
    matrix = Matrix(size=NORMAL, requests=40, only=[CELL], rivals=[])
    files = ResultFiles(tmp_path)
    first = list(matrix.wanted(files))
    assert {one.scenario.seed for one in first} == {0, 1}
    for one in first:
        files.put(one.key(), run_of("+" * 10))
    assert len(list(matrix.wanted(files))) == len(first)
    files.put(first[0].key(), run_of("+" * 8 + "xx"))
    assert {one.scenario.seed for one in matrix.wanted(files)} == {0, 1, 2, 3}


def test_a_search_names_the_best_setting_and_the_one_that_plays(tmp_path):
    rival = Rival(
        name="cache-aware",
        topology=CENTRAL,
        settings=(Setting("cache-aware"), Setting("cache-aware:0.3/64/1.5")),
    )
    matrix, files = Matrix(size=NORMAL, requests=40, rivals=[rival]), ResultFiles(tmp_path)
    runs = search.wanted(matrix)
    assert len(runs) == 2 * len(search.PLACES) * len(search.SEEDS)
    assert {run.scenario.seed for run in runs}.isdisjoint(range(4))
    assert "not played to the end" in search.written(matrix, files)
    for run in runs:
        factor = 0.5 if "0.3" in run.cell.policy else 1.0
        files.put(run.key(), result(run.scenario.seed, factor=factor, noise=0.0))
    text = search.written(matrix, files)
    assert "| cache-aware | cache-aware | 1.00× | 0.0% | plays |" in text
    assert "| cache-aware | cache-aware:0.3/64/1.5 | 0.50× | 0.0% | best |" in text


def test_the_page_of_nothing_names_every_cell(tmp_path):
    matrix = Matrix(size=NORMAL)
    page = written(matrix, ResultFiles(tmp_path))
    assert all(f"{name_of(place)} (0 of " in page for place in matrix.places())
    assert len(matrix.places()) == 66  # eleven workloads; four traces more make 90


def test_every_setting_of_every_rival_can_be_played():
    matrix = Matrix(size=NORMAL)
    for rival in RIVALS:
        assert 0 <= rival.chosen < len(rival.settings)
        for number, setting in enumerate(rival.settings):
            checked_twin_policy(setting.policy)
            parse_pushing(setting.pushing)
            matrix.runs(Place("chat", "L4", 0.6), 0, [rival.system(number)])
