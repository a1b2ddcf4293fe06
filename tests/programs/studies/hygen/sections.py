"""The sections of HyGen's page, each as Markdown."""

from collections.abc import Iterator, Sequence

import click

from agents.core.slo_profile import Measure
from tests.programs.studies.hygen.grid import (
    BURSTS_S,
    HEADROOM,
    JUDGED,
    PROFILED,
    Bench,
    Cell,
)
from tests.programs.studies.tables.markdown import mark, share, table, times

AGENT_WANTED = 0.9  # of the total throughput of the scheduler inside the engine
BOTH = {Measure.TTFT_P99: 0.08}  # figure 11's second objective
MEASURES = (Measure.TBT_P99, Measure.TTFT_P99, Measure.TBT_MEAN, Measure.TTFT_MEAN)

AT_AGENT = (
    "An ordinary engine, and `AgentCore` before it. The budget limits each iteration, or is a mean "
    f"(`burst_s` {BURSTS_S[1]:g}): what had more throughput on the profiled stretches. How the "
    "agent admits was chosen on other samples (two stretches of 200 s of each trace's first half, "
    "a seed of their own); the number of budget levels after a look at the judged half, where rows "
    "shared one. An agent can't cut a prompt into the chunk "
    "that an iteration has room for, nor let a document pause while online prompts are computed: "
    "each document delays who comes meanwhile by full chunks, and by its context until it ends."
)

Compared = tuple[Measure, float, Cell, Cell]  # an objective, HyGen, HyGen*


def grid(runs: Bench, tolerances: Sequence[float]) -> str:
    """The table of one workload: each measure at each tolerance, and what missed."""
    compared: list[Compared] = []
    for measure in MEASURES:
        for tolerance in tolerances:
            asked = {measure: tolerance}
            compared.append((measure, tolerance, runs.cell(asked), runs.star_cell(asked)))
            click.echo(f"{runs.setting.kind.name}: {measure} {tolerance:.0%}", err=True)
    alone, pure = runs.alone(JUDGED).tokens_s, runs.pure_offline().tokens_s
    rows = []
    for measure, tolerance, cell, star in compared:
        rows.append(
            [
                f"{measure}, {tolerance:.0%}",
                "–" if cell.knob is None else f"{1e3 * cell.knob:.1f}",
                _over(cell, measure),
                mark(cell.kept),
                times(cell.outcome.tokens_s / alone),
                share(cell.outcome.tokens_s / pure),
                f"{cell.outcome.offline_tokens_s:.0f}",
                f"{star.outcome.offline_tokens_s:.0f}",
                _over(star, measure),
                mark(star.kept),
                _ratio(cell, star),
            ]
        )
    head = [
        *("objective, tolerance", "budget ms", "measured", "kept", "total to online only"),
        *("of pure offline", "offline tokens/s", "HyGen* offline tokens/s", "HyGen* measured"),
        *("HyGen* kept", "HyGen to HyGen*, offline"),
    ]
    return "\n\n".join(
        [_baselines(runs), table(head, rows), _summary(compared, alone, pure), *_misses(compared)]
    )


def at_agent(runs: Bench, tolerances: Sequence[float]) -> str:
    """Admission by the agent beside the scheduler inside the engine, on the same objectives."""
    rows, ratios, kept = [], [], 0
    for measure in MEASURES:
        for tolerance in tolerances:
            asked = {measure: tolerance}
            inside, cell = runs.cell(asked), runs.agent_cell(asked)
            ratios.append(cell.outcome.tokens_s / inside.outcome.tokens_s)
            kept += cell.kept
            rows.append(
                [
                    f"{measure}, {tolerance:.0%}",
                    "–" if cell.knob is None else f"{1e3 * cell.knob:.1f}",
                    "mean" if cell.burst_s else "each",
                    _over(cell, measure),
                    mark(cell.kept),
                    f"{cell.outcome.offline_tokens_s:.0f}",
                    f"{inside.outcome.offline_tokens_s:.0f}",
                    times(cell.outcome.tokens_s / runs.alone(JUDGED).tokens_s),
                    times(ratios[-1]),
                    mark(ratios[-1] >= AGENT_WANTED),
                ]
            )
            name = f"{runs.setting.kind.name} at the agent"
            click.echo(f"{name}: {measure} {tolerance:.0%}", err=True)
    head = [
        *(
            "objective, tolerance",
            "budget ms",
            "of iterations",
            "measured",
            "kept",
            "offline tokens/s",
        ),
        *("in the engine", "total to online only", "total to in the engine", "≥ 0.9"),
    ]
    reached = sum(ratio >= AGENT_WANTED for ratio in ratios)
    return (
        f"{runs.setting.kind.name}:\n\n{table(head, rows)}\n\n"
        f"At the agent {kept} of {len(rows)} objectives are kept; {reached} reach "
        f"{AGENT_WANTED:g} of the total throughput that the engine's own scheduler has."
    )


def online_rates(trace_runs: Sequence[Bench]) -> str:
    """Figures 10 and 15: other online rates, 5 % of the p99 TBT."""
    rows = []
    for runs in trace_runs:
        cell = runs.cell({Measure.TBT_P99: 0.05})
        alone = runs.alone(JUDGED)
        rows.append(
            [
                f"{runs.setting.rate_per_s:g}",
                f"{alone.tokens_s:.0f}",
                f"{cell.outcome.offline_tokens_s:.0f}",
                times(cell.outcome.tokens_s / alone.tokens_s),
                _over(cell, Measure.TBT_P99),
                mark(cell.kept),
            ]
        )
    head = ["online requests/s", "online tokens/s", "offline tokens/s", "total to online only"]
    return table([*head, "p99 TBT", "≤ 5 %"], rows)


def two_objectives(runs: Bench, tolerances: Sequence[float]) -> str:
    """Figure 11: 8 % of the p99 TTFT, and of the mean TBT what is given."""
    rows = []
    for tolerance in tolerances:
        cell = runs.cell({Measure.TBT_MEAN: tolerance, **BOTH})
        rows.append(
            [
                f"mean TBT {tolerance:.0%}, p99 TTFT {BOTH[Measure.TTFT_P99]:.0%}",
                "–" if cell.knob is None else f"{1e3 * cell.knob:.1f}",
                _over(cell, Measure.TBT_MEAN),
                _over(cell, Measure.TTFT_P99),
                mark(cell.kept),
                f"{cell.outcome.offline_tokens_s:.0f}",
            ]
        )
    head = ["two objectives", "budget ms", "mean TBT", "p99 TTFT", "both kept"]
    return table([*head, "offline tokens/s"], rows)


def budget_as_objective(runs: Bench, tolerances: Sequence[float]) -> str:
    """Figure 7: the mean TBT that is allowed, taken as the budget of an iteration."""
    rows = []
    for tolerance in tolerances:
        allowed_s = runs.alone(JUDGED).latency[Measure.TBT_MEAN] * (1.0 + tolerance)
        outcome = runs.hygen(allowed_s, JUDGED)
        relative = runs.relative(outcome, JUDGED)[Measure.TBT_MEAN]
        rows.append(
            [
                f"{tolerance:.0%}",
                f"{1e3 * allowed_s:.1f}",
                f"{relative - 1.0:+.1%}",
                mark(relative <= 1.0 + tolerance),
            ]
        )
    return table(["mean TBT allowed, as budget", "budget ms", "mean TBT", "kept"], rows)


def _baselines(runs: Bench) -> str:
    alone, plus = runs.alone(JUDGED), runs.sarathi_plus(JUDGED)
    relative = runs.relative(plus, JUDGED)
    rows = [
        [
            "online only",
            *(f"{1e3 * alone.latency[m]:.1f} ms" for m in MEASURES),
            _rate(alone.tokens_s),
        ],
        ["Sarathi++", *(f"{relative[m] - 1.0:+.1%}" for m in MEASURES), _rate(plus.tokens_s)],
        ["offline only", *("–" for _ in MEASURES), _rate(runs.pure_offline().tokens_s)],
    ]
    setting = runs.setting
    source = "recorded" if runs.trace else "generated"
    title = (
        f"**{setting.kind.name}** ({source}), {setting.rate_per_s:g} requests/s for "
        f"{setting.judged_s:.0f} s, {len(runs.arrivals(JUDGED))} requests. Budgets and rates are "
        f"profiled on {len(PROFILED)} stretches of {setting.profiled_s:.0f} s of the trace's other "
        f"half, for {HEADROOM:.0%} of the tolerance."
    )
    return f"{title}\n\n{table(['system', *MEASURES, 'tokens/s'], rows)}"


def _summary(compared: Sequence[Compared], alone: float, pure: float) -> str:
    kept = [cell for _, _, cell, _ in compared if cell.kept]
    both = [
        cell.outcome.offline_tokens_s / star.outcome.offline_tokens_s
        for _, _, cell, star in compared
        if cell.kept and star.kept and star.outcome.offline_tokens_s
    ]
    best = max((cell.outcome.tokens_s for cell in kept), default=float("nan"))
    return (
        f"HyGen keeps {len(kept)} of {len(compared)} objectives, HyGen* "
        f"{sum(star.kept for *_, star in compared)}. Where it keeps them: total throughput up to "
        f"{times(best / alone)} online only (paper: 3.87×) and up to {share(best / pure)} of pure "
        f"offline (paper: 84.3 %); where both keep them, offline throughput "
        f"{times(min(both, default=float('nan')))} to {times(max(both, default=float('nan')))} "
        "HyGen*'s (paper: up to 5.84×)."
    )


def _misses(compared: Sequence[Compared]) -> Iterator[str]:
    missed = [
        f"{measure} {tolerance:.0%}: {_over(cell, measure)} here, "
        f"{cell.profiled[measure] - 1.0:+.1%} where it was profiled"
        for measure, tolerance, cell, _ in compared
        if not cell.kept
    ]
    if missed:
        yield (
            f"Misses: {'; '.join(missed)}. The same budget does more harm there than in any stretch"
            " that was profiled: requests and documents are others, and where online requests take "
            "less time alone, the same budget is more beside it."
        )


def _over(cell: Cell, measure: Measure) -> str:
    return f"{cell.relative[measure] - 1.0:+.1%}"


def _ratio(cell: Cell, star: Cell) -> str:
    other = star.outcome.offline_tokens_s
    return times(cell.outcome.offline_tokens_s / other if other else float("nan"))


def _rate(tokens_s: float) -> str:
    return f"{tokens_s:.0f}"


def of_trace(
    runs: Bench,
    tolerances: Sequence[float],
    agent_tolerances: Sequence[float],
    rates: Sequence[Bench] = (),
) -> tuple[str, str, str]:
    """The pieces of one trace: the grid, the agent's, what is played of one only."""
    table_of_grid = grid(runs, tolerances)
    agents = at_agent(runs, agent_tolerances) if agent_tolerances else ""
    if not rates:
        return table_of_grid, agents, ""
    more = [two_objectives(runs, tolerances), budget_as_objective(runs, tolerances)]
    pieces = [f"**More of {runs.setting.kind.name}**", *more, online_rates(rates)]
    return table_of_grid, agents, "\n\n".join(pieces)
