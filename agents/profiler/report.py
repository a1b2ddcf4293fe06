"""The search as a table for a terminal."""

from rich.table import Table

from agents.core.slo_profile import Limits
from agents.profiler.run import Found
from agents.profiler.trial import TrialResult


def table_of(found: Found) -> Table:
    """One row for each run, by budget; measures beside their limits."""
    table = Table(
        title="Test runs",
        title_justify="left",
        caption="TTFT: time to first token; TBT: time between tokens. Aborted: offline requests "
        "taken out of the engine for online ones.",
        caption_justify="left",
    )
    table.add_column("budget ms", justify="right")
    for measure, limit_s in found.limits.items():
        table.add_column(f"{measure} ms\n(limit {limit_s * 1000:.1f})", justify="right")
    for name in ("offline tokens/s", "offline\naborted"):
        table.add_column(name, justify="right")
    table.add_column("kept")
    table.add_row("no offline", *_latencies(found.alone, found.limits), "–", "–", "")
    chosen = None if found.profile is None else found.profile.latency_budget_s
    for trial in sorted(found.trials, key=lambda each: each.budget_s):
        kept = "yes" if trial.kept else "no"
        if trial.result.failed or trial.result.unanswered:
            kept = f"no: {trial.result.failed} failed, {trial.result.unanswered} late"
        table.add_row(
            f"{trial.budget_s * 1000:.1f}",
            *_latencies(trial.result, found.limits),
            f"{trial.result.offline_tokens_per_s:.0f}",
            str(trial.result.aborted),
            kept,
            style="bold" if trial.budget_s == chosen else "",
        )
    return table


def _latencies(result: TrialResult, limits: Limits) -> list[str]:
    cells = []
    for measure, limit_s in limits.items():
        seen_s = result.latency_s.get(measure)
        mark = " !" if seen_s is not None and seen_s > limit_s else ""
        cells.append("–" if seen_s is None else f"{seen_s * 1000:.1f}{mark}")
    return cells
