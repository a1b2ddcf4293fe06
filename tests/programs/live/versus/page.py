"""The tables: what each system's clients got, and how near the twin's prediction was."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.programs.bench.spread import Spread, ratios, spread
from tests.programs.live.versus.judge import CACHED, FIGURES, GOODPUT, LOST, MEAN, P50, P90
from tests.programs.live.versus.machine import WAIT_MAX_S, MachineUse
from tests.programs.live.versus.systems import MESH
from tests.programs.studies.tables.markdown import mark, table

PREDICTED = (P50, P90, MEAN, CACHED)
APART_MAX = 0.10
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Played:
    """One system in one round."""

    figures: Figures
    use: MachineUse
    late_p99_s: float
    lost: str  # why, with numbers


@dataclass(frozen=True, slots=True)
class Results:
    """`live`: each system's rounds, in their order; `twin`: its seeds. `settings`: how it ran."""

    live: Mapping[str, Sequence[Played]]
    twin: Mapping[str, Sequence[Figures]]
    settings: Mapping[str, str]


def page(results: Results, about: str) -> str:
    """Everything, as Markdown."""
    settings = "\n".join(f"- {name}: {how}" for name, how in results.settings.items())
    return "\n\n".join((about, _live(results), _beside_twin(results), _machine(results), settings))


def apart(live: Sequence[float], twin: Sequence[float]) -> float:
    """The twin's median over the live one's, less 1; NaN where there is none of it."""
    measured, predicted = _spread(live).median, _spread(twin).median
    return predicted / measured - 1.0 if measured else math.nan


def _live(results: Results) -> str:
    rows = [
        [
            name,
            *(_cell(figure, _rounds(played, figure)) for figure in FIGURES),
            _mean_ratio(results, name),
        ]
        for name, played in results.live.items()
    ]
    return table(("live", *FIGURES, "TTFT mean, to the mesh's"), rows)


def _mean_ratio(results: Results, name: str) -> str:
    """Round by round: the rival's mean over the mesh's."""
    if MESH not in results.live or name == MESH:
        return ""
    theirs, ours = (_rounds(results.live[one], MEAN) for one in (name, MESH))
    return _shown(ratios(theirs, ours), "×")


def _beside_twin(results: Results) -> str:
    rows = [
        [
            f"{name}: {figure}",
            _cell(figure, live := _rounds(played, figure)),
            _cell(figure, twin := [one[figure] for one in results.twin[name]]),
            _apart(figure, live, twin),
        ]
        for name, played in results.live.items()
        for figure in PREDICTED
    ]
    return table(("the twin beside it", "live", "twin", "apart"), rows)


def _apart(figure: str, live: Sequence[float], twin: Sequence[float]) -> str:
    if figure == CACHED:
        points = _spread(twin).median - _spread(live).median
        return f"{100 * points:+.1f} points"
    share = apart(live, twin)
    return f"{share:+.1%}, {mark(abs(share) <= APART_MAX)}"


def _machine(results: Results) -> str:
    rows = []
    for name, played in results.live.items():
        lost = "; ".join(one.lost for one in played if one.lost) or "none"
        busy, ours = [one.use.busy for one in played], [one.use.ours for one in played]
        waits_ms = [1000 * one.use.wait_s for one in played]
        late_ms = [1000 * one.late_p99_s for one in played]
        too_busy = sum(one.use.is_too_busy for one in played)
        numbers = map(_shown, (busy, ours, waits_ms, late_ms))
        rows.append([name, *numbers, str(too_busy), lost])
    head = ("the machine", "cores in use", "of them ours", "a turn waited for a core, ms")
    more = ("requests left late p99, ms", "rounds not to be believed", "lost")
    limit = f"{1000 * WAIT_MAX_S:.0f} ms"
    return (
        f"{table((*head, *more), rows)}\n\nWhere our processes waited more than {limit} for a core "
        "each time in the mean, a round says more of the machine than of the systems."
    )


def _rounds(played: Sequence[Played], figure: str) -> list[float]:
    return [one.figures[figure] for one in played]


def _cell(figure: str, values: Sequence[float]) -> str:
    if figure == LOST:
        return _shown(values, digits=0)
    return _shown(values, digits=2 if figure == GOODPUT else 3)


def _shown(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    seen = _spread(values)
    median, low, high = (f"{value:.{digits}f}" for value in (seen.median, seen.low, seen.high))
    return f"{median}{unit}" if len(values) == 1 else f"{median}{unit} ({low}–{high})"


def _spread(values: Sequence[float]) -> Spread:
    found = spread(values)
    assert found is not None, "a figure of no round"
    return found
