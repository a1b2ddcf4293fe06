"""A study as a terminal shows it: whole at any width, nothing cut at 80 columns."""

import io

import pytest
from rich.console import Console

from mesh.core.policies import POLICIES
from mesh.replay.report import RunReport
from mesh.sim.study.results import print_study

TIMES = {"mean": 123.45, "p50": 0.9994, "p90": 345.67, "p99": 599.99}
REPORT: RunReport = {
    "requests": 1_000_000,
    "ok": 987_654,
    "shed": 12_000,
    "failed": 346,
    "ttft_s": TIMES,
    "e2e_s": TIMES,
    "itl_s": TIMES,
    "late_s": dict.fromkeys(TIMES),
    "output_tokens_per_s": 123_456.7,
    "cached_token_ratio": 0.456,
    "forwarded": 123_456,
    "gpu_busy_s": 1_234_567.8,
    "batch_occupancy": 0.87,
    "decisions": 1_111_111,
    "decisions_per_s": 12345.6,
    "failures": {},
    "replicas": {"us": 500, "eu": 500},
    "prompt_tokens": {"asked": None, "reported": None},
}
HEADS = ("requests", "failed", "output tok/s", "TTFT mean", "p99", "answer mean", "GPU busy")


def shown(reports: dict[str, RunReport], width: int) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    print_study(reports, console)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("suffix", ["", " central:us outstanding:24 load 0.9 us=500,eu=500"])
def test_every_policy_fits_80_columns_with_numbers_of_a_million_requests(suffix: str) -> None:
    reports = {f"{policy}{suffix}": REPORT for policy in POLICIES}
    lines = shown(reports, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for policy in POLICIES:
        assert sum(policy in line.split() for line in lines) == 3, "in each of three tables"
    for number in ("1000000", "987654", "346", "123.45 s", "599.99 s"):
        assert text.count(number) >= len(POLICIES)


def test_a_wide_terminal_shows_every_column_on_one_line_each() -> None:
    lines = shown({"mesh-everywhere load 0.9": REPORT, "mesh load 0.9": REPORT}, 140)
    text = "\n".join(lines)
    assert all(head in text for head in (*HEADS, "forwarded", "decisions/s"))
    assert sum("mesh-everywhere load 0.9" in line for line in lines) == 3
    assert "no room" not in text


def test_a_single_run_with_long_region_names_fits_too() -> None:
    regions = {f"a-region-of-some-continent-{n}": REPORT for n in range(3)}
    lines = shown({"mesh": {**REPORT, "regions": regions}}, 80)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert all(any(name in line for line in lines) for name in regions)
