"""The results of a study and of a plan: JSON for scripts, tables for people.

JSON: `policies` holds one report for each run, under the run's name: its policy and, in a sweep,
what else varies. `study` holds the scenario. Tables: a line for each run; a study of a single run
is shown as `mesh replay` shows one, with its regions.

A plan's results: the fleets beside each other, what the mesh saves, and at what price. A smaller
fleet may answer fewer requests a second and still meet its target: without a target for throughput,
users of a closed loop wait a little longer and so send less. A note gives the option that
plans for as many.
"""

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any, TypedDict

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
)
from mesh.sim.config import MESH
from mesh.sim.study.plan import Plan, throughput_per_s
from mesh.sim.study.scenario import Scenario
from mesh.sim.study.settings import PlanSettings
from schemas.problems import counted

_NOT_ABOUT_RESULTS = {"out", "pictures", "jobs"}
OFFLINE_COUNTS = ("lines", "answered", "failed", "expired", "preempted")
NAME = Column("run", is_text=True)
HOURS_A_YEAR = 8766  # 365.25 days
FEWER_ANSWERS = 0.99  # of another fleet's answers a second: less is worth a word


def out_file(scenario: Scenario, reports: Mapping[str, RunReport]) -> dict[str, Any]:
    """The JSON file's content."""
    study = scenario.model_dump(mode="json", exclude=_NOT_ABOUT_RESULTS)
    return {"policies": dict(reports), "study": study}


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
    _print_offline(reports, console)
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


def _print_offline(reports: Mapping[str, RunReport], console: Console) -> None:
    """What became of batch jobs' lines, where there were any."""
    rows = []
    for name, report in reports.items():
        if (offline := report.get("offline")) is None:
            continue
        tokens = offline["tokens"]
        rows.append(
            (
                name,
                *(str(offline[key]) for key in OFFLINE_COUNTS),
                str(tokens["prompt"] + tokens["output"]),
                or_dash(offline["tokens_per_gpu_hour"], "{:.0f}"),
                str(offline["elsewhere"]),
                f"{sum(offline['control_bytes_per_s'].values()):.0f}",
            )
        )
    extras = (Column("elsewhere", is_extra=True), Column("control B/s", is_extra=True))
    heads = (*OFFLINE_COUNTS, "tokens", "tokens/GPU hour")
    if rows:
        print_table((NAME._replace(head="offline"), *map(Column, heads), *extras), rows, console)


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


class Saved(TypedDict):
    """Savings of the mesh's fleet against another's, negative where it has more."""

    replicas: int
    share: float  # of the other's replicas
    per_hour: float | None
    per_year: float | None
    throughput_ratio: float | None  # answers a second, ours by theirs


def plan_file(settings: PlanSettings, plans: Sequence[Plan], simulations: int) -> dict[str, Any]:
    """The JSON file's content: a fleet for each topology, and what the mesh saves against it."""
    return {
        "target": {
            "ttft_p90_s": settings.ttft_p90,
            "throughput_per_s": settings.throughput,
            "lost_max": settings.lost_max,
        },
        "plans": {plan.topology: _plan(settings, plan) for plan in plans},
        "saved": {
            plan.topology: saved for plan in plans if (saved := saving(settings, plans, plan))
        },
        "simulations": simulations,
        "study": settings.model_dump(mode="json", exclude={"out"}),
    }


def saving(settings: PlanSettings, plans: Sequence[Plan], other: Plan) -> Saved | None:
    """Savings of the mesh's fleet against another's; None where there is nothing to compare."""
    mesh = next((plan for plan in plans if plan.topology == MESH), None)
    if mesh is None or mesh is other or mesh.report is None or other.report is None:
        return None
    assert mesh.total is not None and other.total is not None, "a fleet that was played"
    replicas = other.total - mesh.total
    per_hour = _per_hour(settings, replicas)
    ours_per_s, others_per_s = throughput_per_s(mesh.report), throughput_per_s(other.report)
    return {
        "replicas": replicas,
        "share": replicas / other.total,
        "per_hour": per_hour,
        "per_year": None if per_hour is None else per_hour * HOURS_A_YEAR,
        "throughput_ratio": ours_per_s / others_per_s if others_per_s else None,
    }


def print_plan(
    settings: PlanSettings, plans: Sequence[Plan], simulations: int, console: Console
) -> None:
    """The fleets in a table, then savings and remarks."""
    print_line(_target_line(settings), console)
    columns = [
        *(Column("fleet", is_text=True), Column("replicas"), Column("by region", is_text=True)),
        *(Column("TTFT p90"), Column("answers/s")),
        *([Column("an hour", is_extra=True)] if settings.gpu_hour_price is not None else []),
    ]
    rows = [[plan.topology, *_cells(settings, plan)][: len(columns)] for plan in plans]
    print_table(columns, rows, console)
    for line in _remarks(settings, plans, simulations):
        print_line(line, console)


def worst_ttft_p90_s(report: RunReport) -> float | None:
    """The slowest region's; the target counts for every region."""
    found = [figures["ttft_s"]["p90"] for figures in report["regions"].values()]
    return max((p90 for p90 in found if p90 is not None), default=None)


def _plan(settings: PlanSettings, plan: Plan) -> dict[str, Any]:
    return {
        "replicas": plan.replicas,
        "total": plan.total,
        "per_hour": None if plan.total is None else _per_hour(settings, plan.total),
        "ttft_p90_s": None if plan.report is None else worst_ttft_p90_s(plan.report),
        "throughput_per_s": None if plan.report is None else throughput_per_s(plan.report),
        "is_least": plan.is_least,
        "why_not": plan.why_not,
        "report": plan.report,
    }


def _per_hour(settings: PlanSettings, replicas: int) -> float | None:
    price = settings.gpu_hour_price
    return None if price is None else replicas * settings.gpus_per_replica * price


def _target_line(settings: PlanSettings) -> str:
    parts = [f"TTFT p90 of every region at most {settings.ttft_p90:g} s"]
    if settings.throughput is not None:
        parts.append(f"at least {settings.throughput:g} answers/s over all regions")
    parts.append(f"at most {100 * settings.lost_max:.3g}% of a region's requests lost")
    return f"target: {', '.join(parts)}"


def _cells(settings: PlanSettings, plan: Plan) -> list[str]:
    if plan.replicas is None or plan.report is None or plan.total is None:
        return ["-"] * 5
    return [
        str(plan.total),
        " ".join(f"{region}={count}" for region, count in plan.replicas.items()),
        readable_time(worst_ttft_p90_s(plan.report)),
        _rate(throughput_per_s(plan.report)),
        or_dash(_per_hour(settings, plan.total), "{:.2f}"),
    ]


def _rate(per_s: float) -> str:
    return f"{per_s:.2f}" if per_s >= 1 else f"{per_s:.3g}"


def _remarks(settings: PlanSettings, plans: Sequence[Plan], simulations: int) -> list[str]:
    lines = []
    for plan in plans:
        if plan.replicas is None:
            lines.append(f"{plan.topology}: {plan.why_not}")
        elif not plan.is_least:
            lines.append(
                f"{plan.topology}: meets the target, but the search ran out of simulations: "
                "fewer replicas might do; raise --simulations-max"
            )
        saved = saving(settings, plans, plan)
        if saved is not None and plan.report is not None:
            lines.append(_saved_line(plan, saved))
            lines += _fewer_answers(settings, plan.topology, plan.report, saved)
    return [*lines, counted(simulations, "simulation")]


def _fewer_answers(
    settings: PlanSettings, other: str, report: RunReport, saved: Saved
) -> list[str]:
    ratio = saved["throughput_ratio"]
    if ratio is None or ratio >= FEWER_ANSWERS:
        return []
    per_s = throughput_per_s(report)
    line = (
        f"note: the mesh's fleet answers {_rate(ratio * per_s)} requests a second, "
        f"{1 - ratio:.1%} fewer than {other}'s {_rate(per_s)}"
    )
    if settings.throughput is None:
        suggested_per_s = floor(1000 * per_s) / 1000  # rounded up, its own fleet would miss it
        return [f"{line}; to plan for as many, add --throughput {suggested_per_s:g}"]
    return [f"{line}; both reach the target of {settings.throughput:g}"]


def _saved_line(other: Plan, saved: Saved) -> str:
    assert other.total is not None, "a fleet that was played"
    fewer, share = saved["replicas"], abs(saved["share"])
    if not fewer:
        enough = counted(other.total, "replica")
        return f"against {other.topology} the mesh saves nothing: {enough} will do for either"
    if fewer > 0:
        words = f"saves {fewer} of {counted(other.total, 'replica')}"
    else:
        words = f"needs {counted(-fewer, 'replica')} more than {other.total}"
    line = f"against {other.topology} the mesh {words} ({share:.1%})"
    if saved["per_hour"] is not None and saved["per_year"] is not None:
        line += f", {abs(saved['per_hour']):.2f} an hour, {abs(saved['per_year']):,.0f} a year"
    return line
