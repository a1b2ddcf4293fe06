"""What a study hands over to scripts and spreadsheets.

JSON: `policies` holds one report for each run, under the run's name: its policy and, in a sweep,
what else varies. `study` is how it was asked. CSV: a line for each run and region, the region
`all` first, so that a spreadsheet filters instead of parsing; what only a whole run has is empty
in a region's line.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh.replay.report import Report, write_whole
from mesh.sim.study.scenario import Scenario

ALL = "all"
_NOT_ABOUT_RESULTS = {"out", "csv", "pictures", "jobs"}
_OF_RUN = ("policy", "topology", "pushing", "load", "speed", "seed")
_COUNTS = ("requests", "ok", "shed", "failed")
_TIMES = ("ttft_s", "e2e_s", "itl_s")
_POINTS = ("mean", "p50", "p90", "p99")
_RATES = ("output_tokens_per_s", "cached_token_ratio")
_WHOLE = (
    *("duration_s", "forwarded", "decisions", "decisions_per_s"),
    *("gpu_busy_s", "batch_occupancy", "digest"),
)
COLUMNS = (
    *("run", *_OF_RUN, "replicas", "region"),
    *_COUNTS,
    *(f"{time[:-2]}_{point}_s" for time in _TIMES for point in _POINTS),
    *_RATES,
    *_WHOLE,
)


def out_file(scenario: Scenario, reports: Mapping[str, Report]) -> dict[str, Any]:
    """The JSON file's content."""
    study = scenario.model_dump(mode="json", exclude=_NOT_ABOUT_RESULTS)
    return {"policies": dict(reports), "study": study}


def csv_rows(reports: Mapping[str, Report]) -> Iterator[dict[str, Any]]:
    """The CSV file's lines, by column."""
    for name, report in reports.items():
        facts = {key: report[key] for key in _OF_RUN}
        replicas = report["replicas"]
        whole = {key: report[key] for key in _WHOLE}
        for region, figures in {ALL: report, **report["regions"]}.items():
            yield {
                "run": name,
                **facts,
                "replicas": sum(replicas.values()) if region == ALL else replicas[region],
                "region": region,
                **_measures(figures),
                **(whole if region == ALL else {}),
            }


def write_csv(path: Path, reports: Mapping[str, Report]) -> None:
    """Write the file whole or not at all. Raises OSError."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_rows(reports))
    write_whole(path, text.getvalue().encode())


def _measures(figures: Report) -> dict[str, Any]:
    times = {f"{time[:-2]}_{point}_s": figures[time][point] for time in _TIMES for point in _POINTS}
    return {**{key: figures[key] for key in (*_COUNTS, *_RATES)}, **times}
