import pytest

from tests.programs.bench.cells import CELLS
from tests.programs.bench.results import Results
from tests.programs.bench.spread import Verdict
from tests.programs.bench.targets import TARGETS, lost_share, target_results

SYSTEMS = ("direct", "mesh", "last-release", "sglang-router", "vllm-router")


def played(**mesh):
    """Two rounds in which every system has the same figures, but for those of the mesh."""
    found = Results(settings=dict.fromkeys(SYSTEMS, "as they are"))
    usual = {
        "front_cpu_us": 100.0,
        "agents_cpu_us": 50.0,
        "path_cpu_us": 200.0,
        "router_peak_mb": 300.0,
        "ttft_p50_ms": 6.0,
        "ttft_p99_ms": 9.0,
        "gap_p99_ms": 50.0,
        "answered": 100.0,
        "failed": 0.0,
    }
    for cell in CELLS:
        found.cells[cell.name] = cell.title()
        for system in SYSTEMS:
            for _ in range(2):
                found.add(cell.name, system, usual | (mesh if system == "mesh" else {}))
    return found


def verdicts(found):
    return {row.target.text: row.verdict for row in target_results(found)}


def test_every_target_is_of_a_cell_that_is_played():
    assert {target.cell for target in TARGETS} <= {cell.name for cell in CELLS}
    assert len({target.text for target in TARGETS}) == len(TARGETS)


def test_a_quick_run_plays_every_target():
    assert {target.cell for target in TARGETS} <= {cell.name for cell in CELLS if cell.is_quick}


def test_a_router_like_the_others_meets_every_target():
    missed = [text for text, verdict in verdicts(played()).items() if verdict is not Verdict.HIT]
    assert missed == []


@pytest.mark.parametrize(
    ("figure", "value", "count"),
    [
        ("front_cpu_us", 151.0, 4),
        ("agents_cpu_us", 51.0, 2),
        ("path_cpu_us", 201.0, 1),
        ("gap_p99_ms", 76.0, 1),
        ("router_peak_mb", 401.0, 1),
        ("ttft_p50_ms", 17.0, 7),
    ],
)
def test_what_is_beyond_its_limit_is_missed(figure, value, count):
    missed = [v for v in verdicts(played(**{figure: value})).values() if v is Verdict.MISS]
    assert len(missed) == count


def test_a_cell_that_lost_requests_shows_nothing():
    found = played(failed=2.0)
    assert {row.verdict for row in target_results(found)} == {None}
    assert all("failed requests" in row.why for row in target_results(found))
    assert lost_share(found, "plain", "mesh") == pytest.approx(2 / 102)


def test_an_absent_system_is_named():
    found = played()
    found.absent["sglang-router"] = "no network"
    rows = [row for row in target_results(found) if row.target.against == "sglang-router"]
    assert rows
    assert {(row.verdict, row.why) for row in rows} == {(None, "sglang-router is absent")}


def test_a_cell_that_was_not_played_is_named():
    whys = {row.why for row in target_results(Results())}
    assert all("was not played" in why for why in whys)
