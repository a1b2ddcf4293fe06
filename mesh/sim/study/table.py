"""A study for people: one line for each run, so that policies stand below each other.

A study of a single run is shown as `mesh replay` shows one, with its regions.
"""

from collections.abc import Mapping

from rich.console import Console

from mesh.replay.report import Report, known, plain_table, print_report, remarks, seconds

_COUNTS = ("requests", "ok", "shed", "failed")
_POINTS = ("mean", "p50", "p90", "p99")


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
    columns = (*_COUNTS, "output tok/s", "cached", "forwarded")
    table = plain_table(("run", *columns), left=1, console=console)
    for name, report in reports.items():
        table.add_row(
            name,
            *(str(report[key]) for key in _COUNTS),
            known(report["output_tokens_per_s"], "{:.1f}"),
            known(report["cached_token_ratio"], "{:.1%}"),
            str(report["forwarded"]),
        )
    console.print(table)


def _print_times(reports: Mapping[str, Report], console: Console) -> None:
    table = plain_table(("TTFT", *_POINTS, "end-to-end", "p90"), left=1, console=console)
    for name, report in reports.items():
        ttft_s, e2e_s = report["ttft_s"], report["e2e_s"]
        times = [ttft_s[point] for point in _POINTS] + [e2e_s["mean"], e2e_s["p90"]]
        table.add_row(name, *map(seconds, times))
    console.print(table)


def _print_fleets(reports: Mapping[str, Report], console: Console) -> None:
    columns = ("replicas", "GPU busy", "batch", "decisions", "a second")
    table = plain_table(("fleet", *columns), left=1, console=console)
    for name, report in reports.items():
        table.add_row(
            name,
            str(sum(report["replicas"].values())),
            seconds(report["gpu_busy_s"]),
            known(report["batch_occupancy"], "{:.1%}"),
            str(report["decisions"]),
            known(report["decisions_per_s"], "{:.0f}"),
        )
    console.print(table)


def _print_remarks(reports: Mapping[str, Report], console: Console) -> None:
    for name, report in reports.items():
        for remark in remarks(report):
            console.print(f"{name}: {remark}", highlight=False, soft_wrap=True, markup=False)
