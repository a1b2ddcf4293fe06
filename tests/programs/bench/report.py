"""A run as Markdown: targets first, then every cell, then how it was made."""

import math
from collections.abc import Sequence

from tests.programs.bench.results import Results
from tests.programs.bench.spread import Spread, differences, ratios, spread
from tests.programs.bench.systems import dynamo
from tests.programs.bench.targets import DIRECT, OURS, TargetResult, lost_share, target_results
from tests.programs.studies.tables.markdown import table, times

CPU = ("front_cpu_us", "path_cpu_us")
TIMES = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")
NAMES = {
    "requests_per_s": "requests/s",
    "latency_p50_ms": "answer p50, ms",
    "latency_p99_ms": "answer p99, ms",
    "front_cpu_us": "router CPU, µs",
    "bus_cpu_us": "bus CPU, µs",
    "agents_cpu_us": "agents' CPU, µs",
    "path_cpu_us": "whole path's CPU, µs",
    "frontends_cpu_us": "engines' frontends' CPU, µs",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "gap_p50_ms": "inter-token p50, ms",
    "gap_p99_ms": "inter-token p99, ms",
    "router_peak_mb": "router's peak memory, MB",
    "path_peak_mb": "whole path's peak memory, MB",
}
# What can be compared of two systems over engines that are alike, though others' are not.
OVER_SAME = (*CPU, "latency_p50_ms", "latency_p99_ms", "ttft_p50_ms", "ttft_p99_ms")


def markdown(found: Results) -> str:
    """The whole report."""
    parts = [_targets(target_results(found)), *(_cell(found, cell) for cell in found.cells)]
    return "\n\n".join([*parts, _conditions(found)]) + "\n"


def number(value: float) -> str:
    """Three digits, more only before the point."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def shown(values: Spread | None, unit: str = "") -> str:
    """Median and, in brackets, lowest and highest."""
    if values is None:
        return "–"
    return f"{number(values.median)}{unit} ({number(values.low)}–{number(values.high)})"


def _targets(rows: Sequence[TargetResult]) -> str:
    def cells(row: TargetResult) -> list[str]:
        limit = f"{row.target.at_most:g}{row.target.unit}"
        verdict = str(row.verdict) if row.verdict else f"not measured: {row.why}"
        return [row.target.text, limit, shown(row.seen, row.target.unit), verdict]

    return table(("target", "at most", "measured", ""), map(cells, rows))


def _cell(found: Results, cell: str) -> str:
    systems = [name for name in found.settings if found.has(cell, name)]
    figures = [f for f in NAMES if any(spread(found.values(cell, s, f)) for s in systems)]
    rows = [
        [NAMES[f], *(shown(spread(found.values(cell, s, f))) for s in systems)] for f in figures
    ]
    rows += [row for f in figures if f in TIMES for row in _added(found, cell, f, systems)]
    rows += _ratios(found, cell, CPU, OURS, systems)
    rows += _ratios(found, cell, OVER_SAME, dynamo.OVER_SAME, systems)
    if any(lost_share(found, cell, s) for s in systems):
        rows.append(["failed", *(f"{lost_share(found, cell, s):.2%}" for s in systems)])
    return f"**{found.cells[cell]}**\n\n{table(('', *systems), rows)}"


def _added(found: Results, cell: str, figure: str, systems: Sequence[str]) -> list[list[str]]:
    if DIRECT not in systems:
        return []

    def of(system: str) -> str:
        if system == DIRECT or system in found.apart:
            return ""
        direct = found.values(cell, DIRECT, figure)
        return shown(spread(differences(found.values(cell, system, figure), direct)))

    return [[f"{NAMES[figure]}: added", *map(of, systems)]]


def _ratios(
    found: Results, cell: str, figures: Sequence[str], of: str, systems: Sequence[str]
) -> list[list[str]]:
    """Rows of one of ours; over Dynamo's engines it is compared with Dynamo alone."""
    beside = {dynamo.NAME} if of == dynamo.OVER_SAME else {*systems} - {of, dynamo.OVER_SAME}
    rows = []
    for figure in figures:
        shown_to = [_ratio(found, cell, figure, of, s) if s in beside else "" for s in systems]
        if any(shown_to):
            rows.append([f"{NAMES[figure]}: {of} to this", *shown_to])
    return rows


def _ratio(found: Results, cell: str, figure: str, of: str, system: str) -> str:
    """One to the system's; called inconclusive if 1 lies inside the spread."""
    theirs, ours = found.values(cell, system, figure), found.values(cell, of, figure)
    seen = spread(ratios(ours, theirs)) if len(ours) == len(theirs) else None
    if seen is None:
        return ""
    known = f"{times(seen.median)} ({seen.low:.2f}–{seen.high:.2f})"
    return f"{known}, inconclusive" if seen.low <= 1.0 <= seen.high else known


def _conditions(found: Results) -> str:
    lines = [f"- {name}: {text}" for name, text in found.settings.items()]
    lines += [f"- {name}: **absent**, {why}" for name, why in found.absent.items()]
    machine = ", ".join(f"{key} {value}" for key, value in found.machine.items())
    return "\n".join([*lines, f"- machine: {machine}"])
