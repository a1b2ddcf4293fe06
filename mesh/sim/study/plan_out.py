"""What a plan hands over: fleets beside each other, and what the mesh saves."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from mesh.replay.report import Report, known, plain_table, seconds
from mesh.sim.study.plan import Plan
from mesh.sim.study.plan_settings import PlanSettings
from mesh.sim.study.target import throughput_per_s
from mesh.sim.topology import MESH

HOURS_A_YEAR = 8766  # 365.25 days
_NOT_ABOUT_RESULTS = {"out"}


def plan_file(settings: PlanSettings, plans: Sequence[Plan], simulations: int) -> dict[str, Any]:
    """The JSON file's content: a fleet for each topology, and what the mesh saves against it."""
    return {
        "plans": {plan.topology: _plan(settings, plan) for plan in plans},
        "saved": {
            plan.topology: saved for plan in plans if (saved := saving(settings, plans, plan))
        },
        "simulations": simulations,
        "study": settings.model_dump(mode="json", exclude=_NOT_ABOUT_RESULTS),
    }


def saving(
    settings: PlanSettings, plans: Sequence[Plan], other: Plan
) -> dict[str, float | int | None] | None:
    """What the mesh's fleet saves against another's; None where there is nothing to compare."""
    mesh = next((plan for plan in plans if plan.topology == MESH), None)
    if mesh is None or mesh is other or mesh.total is None or other.total is None:
        return None
    replicas = other.total - mesh.total
    per_hour = _per_hour(settings, replicas)
    return {
        "replicas": replicas,
        "share": replicas / other.total,
        "per_hour": per_hour,
        "per_year": None if per_hour is None else per_hour * HOURS_A_YEAR,
    }


def print_plan(
    settings: PlanSettings, plans: Sequence[Plan], simulations: int, console: Console
) -> None:
    """The fleets in a table, then what they save and what to know."""
    columns = (*settings.region_names, "replicas", "an hour", "worst TTFT p90", "answers/s")
    table = plain_table(("fleet", *columns), left=1, console=console)
    for plan in plans:
        table.add_row(plan.topology, *_cells(settings, plan))
    console.print(table)
    for line in _remarks(settings, plans, simulations):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def worst_ttft_p90_s(report: Report) -> float | None:
    """Of the region that waits longest; the target counts for every region."""
    found = [figures["ttft_s"]["p90"] for figures in report["regions"].values()]
    return max((p90 for p90 in found if p90 is not None), default=None)


def _plan(settings: PlanSettings, plan: Plan) -> dict[str, Any]:
    return {
        "replicas": plan.replicas,
        "total": plan.total,
        "per_hour": None if plan.total is None else _per_hour(settings, plan.total),
        "is_least": plan.is_least,
        "why_not": plan.why_not,
        "report": plan.report,
    }


def _per_hour(settings: PlanSettings, replicas: int) -> float | None:
    price = settings.gpu_hour_price
    return None if price is None else replicas * settings.gpus_per_replica * price


def _cells(settings: PlanSettings, plan: Plan) -> list[str]:
    if plan.replicas is None or plan.report is None or plan.total is None:
        return ["-"] * (len(settings.region_names) + 4)
    return [
        *(str(count) for count in plan.replicas.values()),
        str(plan.total),
        known(_per_hour(settings, plan.total), "{:.2f}"),
        seconds(worst_ttft_p90_s(plan.report)),
        f"{throughput_per_s(plan.report):.2f}",
    ]


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
        if saved is not None:
            lines.append(_saved_line(plan, saved))
    return [*lines, f"{simulations} simulations"]


def _saved_line(other: Plan, saved: Mapping[str, float | int | None]) -> str:
    line = (
        f"against {other.topology} the mesh saves {saved['replicas']} of {other.total} replicas "
        f"({saved['share']:.1%})"
    )
    if saved["per_hour"] is not None:
        line += f", {saved['per_hour']:.2f} an hour, {saved['per_year']:,.0f} a year"
    return line
