"""A study's results: JSON for scripts, CSV for spreadsheets, tables for people.

JSON: `policies` holds one report for each run, under the run's name: its policy and, in a sweep,
what else varies. `study` holds the scenario. CSV: a line for each run and region, the region `all`
first, so that a spreadsheet filters instead of parsing; what only a whole run has is empty in a
region's line. Tables: a line for each run; a study of a single run is shown as `mesh replay` shows
one, with its regions.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from mesh.replay.report import (
    COUNTS,
    POINTS,
    Column,
    RunReport,
    or_dash,
    print_line,
    print_report,
    print_table,
    readable_time,
    remarks,
    write_whole,
)
from mesh.sim.study.scenario import Scenario

ALL = "all"
_NOT_ABOUT_RESULTS = {"out", "csv", "pictures", "jobs"}
_OF_RUN = ("policy", "topology", "pushing", "load", "speed", "seed")
_TIMES = ("ttft_s", "e2e_s", "itl_s")
_RATES = ("output_tokens_per_s", "cached_token_ratio")
_WHOLE = (
    *("duration_s", "forwarded", "decisions", "decisions_per_s"),
    *("gpu_busy_s", "batch_occupancy", "digest"),
)
COLUMNS = (
    *("run", *_OF_RUN, "replicas", "region"),
    *COUNTS,
    *(f"{time[:-2]}_{point}_s" for time in _TIMES for point in POINTS),
    *_RATES,
    *_WHOLE,
)
NAME = Column("run", is_text=True)


def out_file(scenario: Scenario, reports: Mapping[str, RunReport]) -> dict[str, Any]:
    """The JSON file's content."""
    study = scenario.model_dump(mode="json", exclude=_NOT_ABOUT_RESULTS)
    return {"policies": dict(reports), "study": study}


def csv_rows(reports: Mapping[str, RunReport]) -> Iterator[dict[str, Any]]:
    """The CSV file's lines, by column."""
    for name, report in reports.items():
        replicas = report["replicas"]
        for region, figures in {ALL: report, **report["regions"]}.items():
            yield {
                "run": name,
                **{key: report[key] for key in _OF_RUN},
                "replicas": sum(replicas.values()) if region == ALL else replicas[region],
                "region": region,
                **{key: figures[key] for key in (*COUNTS, *_RATES)},
                **{f"{t[:-2]}_{point}_s": figures[t][point] for t in _TIMES for point in POINTS},
                **({key: report[key] for key in _WHOLE} if region == ALL else {}),
            }


def write_csv(path: Path, reports: Mapping[str, RunReport]) -> None:
    """Write the file whole or not at all. Raises OSError."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_rows(reports))
    write_whole(path, text.getvalue().encode())


def print_study(reports: Mapping[str, RunReport], console: Console) -> None:
    """The runs beside each other, or one run in full."""
    if len(reports) == 1:
        (report,) = reports.values()
        print_report(report, console)
    else:
        _print_counts_and_times(reports, console)
        for name, report in reports.items():
            for remark in remarks(report):
                print_line(f"{name}: {remark}", console)
    heads = ("GPU busy", "batch full", "decisions", "decisions/s")
    rows = [
        (
            name,
            str(sum(report["replicas"].values())),
            readable_time(report["gpu_busy_s"]),
            or_dash(report["batch_occupancy"], "{:.1%}"),
            str(report["decisions"]),
            or_dash(report["decisions_per_s"], "{:.0f}"),
        )
        for name, report in reports.items()
    ]
    extras = (Column(head, is_extra=True) for head in heads)
    print_table((NAME, Column("replicas"), *extras), rows, console)


def _print_counts_and_times(reports: Mapping[str, RunReport], console: Console) -> None:
    counts, times = [], []
    for name, report in reports.items():
        rate = or_dash(report["output_tokens_per_s"], "{:.1f}")
        cached = or_dash(report["cached_token_ratio"], "{:.1%}")
        numbers = (str(report[key]) for key in COUNTS)
        counts.append((name, *numbers, rate, cached, str(report["forwarded"])))
        ttft_s, e2e_s = report["ttft_s"], report["e2e_s"]
        shown = [ttft_s[point] for point in POINTS] + [e2e_s["mean"], e2e_s["p90"]]
        times.append((name, *map(readable_time, shown)))
    extras = (Column(head, is_extra=True) for head in ("output tok/s", "cached", "forwarded"))
    print_table((NAME, *map(Column, COUNTS), *extras), counts, console)
    ttft = (Column(f"TTFT {POINTS[0]}"), *map(Column, POINTS[1:]))
    whole = Column("answer mean"), Column("answer p90", is_extra=True)
    print_table((NAME, *ttft, *whole), times, console)
