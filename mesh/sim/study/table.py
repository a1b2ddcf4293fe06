"""A study for people: one line for each run, so that policies stand below each other.

A study of a single run is shown as `mesh replay` shows one, with its regions.
"""

from collections.abc import Mapping

from rich.console import Console

from mesh.replay.report import COUNTS, POINTS, Report, known, print_report, remarks, seconds
from mesh.replay.tables import Column, print_table, say

NAME = Column("run", is_text=True)


def print_study(reports: Mapping[str, Report], console: Console) -> None:
    """The runs beside each other, or one run in full."""
    if len(reports) == 1:
        (report,) = reports.values()
        print_report(report, console)
    else:
        _print_outcomes(reports, console)
        _print_times(reports, console)
        _print_remarks(reports, console)
    _print_fleets(reports, console)


def _print_outcomes(reports: Mapping[str, Report], console: Console) -> None:
    rows = [
        (
            name,
            *(str(report[key]) for key in COUNTS),
            known(report["output_tokens_per_s"], "{:.1f}"),
            known(report["cached_token_ratio"], "{:.1%}"),
            str(report["forwarded"]),
        )
        for name, report in reports.items()
    ]
    extras = (Column(head, is_extra=True) for head in ("output tok/s", "cached", "forwarded"))
    print_table((NAME, *map(Column, COUNTS), *extras), rows, console)


def _print_times(reports: Mapping[str, Report], console: Console) -> None:
    rows = []
    for name, report in reports.items():
        ttft_s, e2e_s = report["ttft_s"], report["e2e_s"]
        times = [ttft_s[point] for point in POINTS] + [e2e_s["mean"], e2e_s["p90"]]
        rows.append((name, *map(seconds, times)))
    ttft = (Column(f"TTFT {POINTS[0]}"), *map(Column, POINTS[1:]))
    whole = Column("answer mean"), Column("answer p90", is_extra=True)
    print_table((NAME, *ttft, *whole), rows, console)


def _print_fleets(reports: Mapping[str, Report], console: Console) -> None:
    heads = ("GPU busy", "batch full", "decisions", "decisions/s")
    rows = [
        (
            name,
            str(sum(report["replicas"].values())),
            seconds(report["gpu_busy_s"]),
            known(report["batch_occupancy"], "{:.1%}"),
            str(report["decisions"]),
            known(report["decisions_per_s"], "{:.0f}"),
        )
        for name, report in reports.items()
    ]
    extras = (Column(head, is_extra=True) for head in heads)
    print_table((NAME, Column("replicas"), *extras), rows, console)


def _print_remarks(reports: Mapping[str, Report], console: Console) -> None:
    for name, report in reports.items():
        for remark in remarks(report):
            say(f"{name}: {remark}", console)
