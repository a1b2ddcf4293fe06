"""The program: killed and started again, in pieces, with more seeds where a cell is saturated."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.studies.mesh import search, sensitivity
from tests.programs.studies.mesh.judge import Verdict
from tests.programs.studies.mesh.matrix import (
    MADE,
    SEEDS_SATURATED,
    Matrix,
    Place,
    is_saturated,
    name_of,
)
from tests.programs.studies.mesh.page import written
from tests.programs.studies.mesh.rivals import CENTRAL, RIVALS, Rival, Setting
from tests.programs.studies.mesh.test_judge import result
from tests.programs.studies.tables.command import FOLDER, Size
from tests.programs.studies.tables.result_files import ResultFiles
from tests.support.result_page import ROOT

CELL = "short, L4, 1.3"
SMALL = ("--requests", "40", "--cell", CELL, "--rival", "skywalker", "--seeds", "1", "--jobs", "1")
WITHIN_S = 400
RUNS = 3  # mesh, skywalker, mesh-everywhere
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
    assert f"| {CELL} | 0.0% | 1 |" in expected
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


@pytest.mark.parametrize("full", [False, True])
def test_a_saturated_cell_is_played_with_four_seeds(tmp_path, full):
    matrix = Matrix(size=replace(NORMAL, full=full), requests=40, only=[CELL], rivals=[])
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
    assert len(matrix.places()) == 55  # eleven workloads; four traces more make 75


@pytest.mark.parametrize("quick", [False, True])
def test_nothing_is_searched_on_what_is_held_out_or_with_a_seed_that_is_reported(quick):
    size = Size(quick=quick, full=False, seeds=2, traces=None)
    runs = search.wanted(Matrix(size=size, rivals=RIVALS))
    assert {run.scenario.workload for run in runs}.isdisjoint({*search.HELD_OUT, None})
    assert set(search.HELD_OUT) <= set(MADE)
    assert {run.scenario.seed for run in runs}.isdisjoint(range(SEEDS_SATURATED))
    assert {run.cell.policy for run in runs} >= {one.policy for one in RIVALS[4].settings}


def test_oracles_play_on_mixed_fleets_and_below_saturation():
    matrix = Matrix(size=NORMAL, rivals=[])
    oracles = ["oracle 0.02", "oracle 0.08"]
    for engines, load, wanted in (("L4", 1.0, []), ("mixed", 1.0, oracles), ("L4", 0.6, oracles)):
        names = [one.name for one in matrix.systems(Place("chat", engines, load))]
        assert names == ["mesh", *wanted, "mesh-everywhere"]


def test_conditions_are_played_alone_and_together(tmp_path):
    matrix, files = Matrix(size=NORMAL, requests=40, rivals=RIVALS[:1]), ResultFiles(tmp_path)
    runs = sensitivity.wanted(matrix)
    assert len(runs) == 2 * 6 * 2 * 2  # cells without the trace's, conditions, seeds, systems
    assert len({run.key() for run in runs}) == len(runs)
    assert "not played to the end" in sensitivity.written(matrix, files)
    *_, last = runs
    assert (last.scenario.loss, last.scenario.jitter_ms) == (0.01, 5.0)
    assert last.world == {"token_error": 0.2, "speeds_known": False}
    for run in runs:
        ours = run.cell.policy == "mesh"
        factor = 2.0 if ours and run.world.get("token_error") else 1.0 if ours else 3.0
        files.put(run.key(), result(run.scenario.seed, factor=factor, noise=0.0))
    text = sensitivity.written(matrix, files)
    assert "3.00× (3.00–3.00)" in _line(text, "chat, L4, 0.6 | as it is")
    assert "1.50× (1.50–1.50)" in _line(text, "chat, L4, 0.6 | estimates of prompts")
    assert "1.50× (1.50–1.50)" in _line(text, "programming, L4, 1 | all of these")


def test_the_page_says_who_was_left_out_and_judges_all_rivals_too(tmp_path):
    matrix = Matrix(size=NORMAL, requests=40, only=[CELL], rivals=RIVALS[1:3])
    files = ResultFiles(tmp_path)
    for run in matrix.wanted(files):
        facts = {"factor": 0.1, "lost": 0.02} if run.tags[3] == "smg" else {"factor": 3.6}
        own = {"factor": 3.0} if run.cell.policy.startswith("mesh") else facts
        found = result(run.scenario.seed, noise=0.0, **own) | {"measured_from": 100}
        files.put(run.key(), found)
    page = written(matrix, files)
    line = _line(page, "TTFT mean at and above saturation, every cell")
    assert "| hit | 1 rival in 1 cell |" in line
    assert "| 1.20× |" in line
    assert line.endswith(f"| {Verdict.MISS} |")
    assert "| conversations | 1 | 1.20× (1.20–1.20) |" in page
    assert "| single requests | 0 | – | – | – |" in page
    assert "50.0% | 2 |" in _line(page, CELL)


def test_the_page_counts_ties_and_tells_saturated_cells_from_others(tmp_path):
    only = ["short, L4", "tot, L4, 0.6"]
    matrix = Matrix(size=NORMAL, requests=40, only=only, rivals=RIVALS[1:2])
    files = ResultFiles(tmp_path)
    lates = {("short", 1.3): (0.2, 0.6), ("tot", 0.6): (0.2, 0.6)}
    factors = {("short", 1.0): 3.3, ("short", 0.6): 9.0}
    for _ in range(2):  # more seeds once it is known that a cell is saturated
        for run in matrix.wanted(files):
            at = run.tags[0], run.tags[2]
            ours, theirs = lates.get(at, (0.0, 0.0))
            is_rival = run.tags[3] == "cache-aware"
            factor, late = (factors.get(at, 6.0), theirs) if is_rival else (3.0, ours)
            found = result(run.scenario.seed, noise=0.0, factor=factor, late=late)
            files.put(run.key(), found | {"measured_from": 100})
    page = written(matrix, files)
    assert 'Ties among the 2 hits of "goodput at and above saturation, every cell"' in page
    assert "with 1.00 as value and at both ends: 1." in page
    assert "| saturated | 2 | 2.00× (2.00–2.00) | 2.00× (" in page
    assert "| others at loads of 1 and more | 1 | 1.10× (1.10–1.10) | 1.00× (1.00–1.00) |" in page
    ratios = "times: the best rival's over ours; goodput, throughput: ours over the best rival's"
    assert f"**Conversations and single requests**, {ratios}\n" in page
    assert f"**Cells**, {ratios}; over oracle, federation: our mean over theirs\n" in page
    rule = " ".join(page.split())
    assert "A cell is inconclusive if the target is inside its interval, or if nobody may" in rule
    once = replace(matrix, size=replace(NORMAL, seeds=1))
    assert "| saturated | 2 |" in written(once, files), "whatever the number of seeds"


def _line(page: str, start: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| {start}"))
