"""The page of the mesh study: targets, all policies, the cold start, every cell, what is missing.

A cell is judged once `mesh` and every rival of every cell have been played with the same two seeds
or more. Runs that are still to be played are named at the end, so that a page can be written at any
time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.problems import counted
from tests.programs.studies.mesh.judge import (
    FULL_LOAD,
    GOODPUT,
    GOODPUT_EVERY_CELL,
    TARGETS,
    Against,
    Cell,
    Compared,
    Judged,
    Place,
    Target,
    Verdict,
    below_saturation,
    sample_of,
)
from tests.programs.studies.mesh.matrix import (
    EVERYWHERE,
    IN_TIME_LEAST,
    LOST_MOST,
    MESH,
    ORACLES,
    Matrix,
    is_saturated,
    name_of,
)
from tests.programs.studies.mesh.samples import (
    Interval,
    Rows,
    Sample,
    geomean,
    interval,
    percentile,
)
from tests.programs.studies.mesh.search import HELD_OUT
from tests.programs.studies.tables.client_view import (
    SLO_FIXED_S,
    SLO_PREFILLS,
    WARM_UP_PER_REPLICA,
)
from tests.programs.studies.tables.markdown import seconds, share, table, times
from tests.programs.studies.tables.result_files import Result, ResultFiles

NONE = "–"
RATIOS = "times: the best rival's over ours; goodput, throughput: ours over the best rival's"
TIMES: Mapping[str, Callable[[Sample], Rows]] = {
    "TTFT mean": lambda sample: sample.mean,
    "p50": percentile(0.5),
    "p90": percentile(0.9),
    "p99": percentile(0.99),
    "latency": lambda sample: sample.latency,
}


@dataclass(frozen=True, slots=True)
class PlayedCell:
    """A cell, its cold start, its number of seeds, and whether the study finds it saturated."""

    cell: Cell
    cold: Cell
    seeds: int
    is_saturated: bool


def written(matrix: Matrix, files: ResultFiles) -> str:
    """The page."""
    cells: list[PlayedCell] = []
    missing: list[str] = []
    for place in matrix.places():
        played, seeds = matrix.played(place, files), matrix.seeds(place, files)
        runs, wanted = sum(map(len, played.values())), len(seeds) * len(matrix.systems(place))
        if runs < wanted:
            missing.append(f"{name_of(place)} ({runs} of {wanted} runs)")
        found = _cell(matrix, place, played, seeds)
        if found is not None:
            cells.append(found)
    parts = [_head(matrix, cells)]
    if cells:
        targets = _targets([one.cell for one in cells])
        parts += [
            f"**Targets**, {counted(len(cells), 'cell')}\n\n{targets}\n\n{_by_saturation(cells)}",
            f"**All policies**, theirs over ours, geometric means\n\n{_policies(matrix, cells)}",
            f"**What placing can gain**, below saturation\n\n{_gains(cells)}",
            f"**Conversations and single requests**, {RATIOS}\n\n{_kinds(cells)}",
            f"**Cold start**, the best rival's mean TTFT over ours\n\n{_cold(cells)}",
            f"**Cells**, {RATIOS}; over oracle, federation: our mean over theirs"
            f"\n\n{_cells(cells)}",
        ]
    if missing:
        parts.append(f"**Not played to the end**: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def _head(matrix: Matrix, cells: Sequence[PlayedCell]) -> str:
    rivals = ", ".join(one.name for one in matrix.rivals)
    return f"""\
A request whose first token has not come after {matrix.patience_s:g} s is lost, as is one that is
refused, fails, or follows a lost one; it counts with that time. No rival is compared in a cell
where it loses over one point more than `mesh`; "left out" says how often that happens, "all rivals"
is the same ratio without that rule, since lost requests count in it anyway. Where more than one in
a hundred is lost, p99 is the patience times the percentage. What follows in a conversation is sent
when the answer before it ends, as a user does: inside conversations the loop is closed, and a slow
policy is asked for less a second. The first {WARM_UP_PER_REPLICA} requests
a replica (at most half) are the cold start. Goodput: first tokens within {SLO_FIXED_S:g} s and
{SLO_PREFILLS:g} times the request's own prefill on the fleet's slowest GPU. Intervals hold 95% of
a block bootstrap over requests, with the best rival found again in each draw, and the value of
every seed. A cell is inconclusive if the target is inside its interval, or if nobody may be
compared in it: each rival is left out, or those that the target asks for were not played. A target
of every cell has the worst verdict of any, and shows the worst cell with that verdict; a mean that
is not missed is inconclusive if the target is inside its interval, or if nobody may be compared in
one of its cells. {_held_out()}
The load is the one asked for, so cells below saturation are those under 1.
{len(cells)} of {counted(len(matrix.places()), "cell")}; rivals: {rivals}."""


def _cell(
    matrix: Matrix, place: Place, played: Mapping[str, Mapping[int, Result]], wanted: Sequence[int]
) -> PlayedCell | None:
    """None if it has too few seeds that `mesh` and all of its rivals have played."""
    needed = [MESH.name, *(one.name for one in matrix.rivals_of(place) if one.everywhere)]
    seeds = [seed for seed in wanted if all(seed in played.get(name, {}) for name in needed)]
    if len(seeds) < matrix.size.seeds:
        return None
    whole = {name: found for name, found in played.items() if all(seed in found for seed in seeds)}
    return PlayedCell(
        _judged_cell(matrix, place, whole, seeds, cold=False),
        _judged_cell(matrix, place, whole, seeds, cold=True),
        len(seeds),
        _is_saturated(matrix, place, played),
    )


def _is_saturated(matrix: Matrix, place: Place, played: Mapping[str, Mapping[int, Result]]) -> bool:
    """By the rule of `Matrix.seeds`; with `--seeds` or `--quick` the number would not tell."""
    names = [MESH.name, *(one.name for one in matrix.rivals_of(place))]
    first = range(matrix.size.seeds)
    found = [played[name][seed] for name in names for seed in first if seed in played.get(name, {})]
    return any(map(is_saturated, found))


def _judged_cell(
    matrix: Matrix,
    place: Place,
    played: Mapping[str, Mapping[int, Result]],
    seeds: Sequence[int],
    *,
    cold: bool,
) -> Cell:
    samples = {
        name: sample_of(place, {seed: found[seed] for seed in seeds}, cold=cold)
        for name, found in played.items()
    }
    rivals = [one for one in matrix.rivals_of(place) if one.name in samples]
    return Cell(
        place,
        samples[MESH.name],
        {one.name: samples[one.name] for one in rivals},
        frozenset(one.name for one in rivals if one.is_central),
        {one.name: samples[one.name] for one in ORACLES if one.name in samples},
        samples.get(EVERYWHERE.name),
    )


def _held_out() -> str:
    return f"No rival's settings were searched on {', '.join(HELD_OUT)}."


def _targets(cells: Sequence[Cell]) -> str:
    head = ["target", "wanted", "value", "interval", "in", "hit", "inconclusive", "miss", "worst"]
    more = ["verdict", "left out", "all rivals", ""]
    return table([*head, *more], [_target(target, cells) for target in TARGETS])


def _target(target: Target, cells: Sequence[Cell]) -> list[str]:
    one, all_rivals = target.judged(cells), target.judged_over_everyone(cells)
    return [
        target.text,
        f"{'≤' if target.at_most else '≥'} {times(target.wanted)}",
        *_value(one),
        _number(len(one.found), one.without),
        *([NONE] * 3 if target.is_mean else [str(one.verdicts.count(each)) for each in Verdict]),
        *(name_of(one.worst) if one.found else NONE, _verdict(one), _left_out(one)),
        *_over_all(all_rivals),
    ]


def _by_saturation(cells: Sequence[PlayedCell]) -> str:
    """What the targets at and above saturation are made of."""
    judged = GOODPUT_EVERY_CELL.judged([one.cell for one in cells])
    hits = counted(judged.verdicts.count(Verdict.HIT), "hit")
    saturated = [one.cell for one in cells if one.is_saturated]
    full = [one.cell for one in cells if not one.is_saturated and one.cell.place.load >= FULL_LOAD]
    rows = [
        [
            *(name, _number(len(those) - without, without)),
            *map(_geomean, (map(_mean, those), map(_goodput, those))),
        ]
        for name, those in (("saturated", saturated), ("others at loads of 1 and more", full))
        for without in [sum(not one.eligible for one in those)]
    ]
    return f"""\
Ties among the {hits} of "{judged.target.text}", with 1.00 as value and at both ends: {judged.ties}.

A cell is found saturated, whatever its load, if with one of the first seeds `mesh` or a rival loses
over {LOST_MOST:.0%} or answers under {IN_TIME_LEAST:.0%} in time. Geometric means; {RATIOS}:

{table(["cells", "in", "TTFT mean", "goodput"], rows)}"""


def _number(found: int, without: int) -> str:
    return f"{found}, {without} without" if without else str(found)


def _value(one: Judged) -> list[str]:
    return [times(one.summary.value), _range(one.summary)] if one.found else [NONE, NONE]


def _verdict(one: Judged) -> str:
    return str(one.verdict) if one.found or one.without else "not played"


def _over_all(one: Judged | None) -> list[str]:
    if one is None or not one.found:
        return [NONE, ""]
    value, width = _value(one)
    return [f"{value} ({width})", _verdict(one)]


def _left_out(one: Judged) -> str:
    if one.target.against is Against.OURSELVES:
        return NONE
    return f"{counted(len(one.times_left_out), 'rival')} in {counted(len(one.left_out), 'cell')}"


def _policies(matrix: Matrix, cells: Sequence[PlayedCell]) -> str:
    settings = {one.name: one.settings[one.chosen].text for one in matrix.rivals}
    names = [*settings, MESH.name, EVERYWHERE.name, *(one.name for one in ORACLES)]
    rows = [
        [name, settings.get(name, ""), *_policy(name, [one.cell for one in cells])]
        for name in names
        if any(_sample(one.cell, name) for one in cells)
    ]
    head = ["policy", "setting", "cells", *TIMES, "goodput", "throughput", "lost", "left out in"]
    return table(head, rows)


def _policy(name: str, cells: Sequence[Cell]) -> list[str]:
    found = [(one, sample) for one in cells if (sample := _sample(one, name)) is not None]
    ratios = [
        float(geomean([figure(theirs) / figure(one.ours) for one, theirs in found])[0])
        for figure in (*TIMES.values(), GOODPUT, lambda sample: sample.throughput)
    ]
    lost = sum(float(theirs.lost[0]) for _, theirs in found) / len(found)
    left_out = sum(name in one.rivals and name not in one.eligible for one, _ in found)
    return [str(len(found)), *map(times, ratios), share(lost), str(left_out)]


def _sample(cell: Cell, name: str) -> Sample | None:
    if name == MESH.name:
        return cell.ours
    if name == EVERYWHERE.name:
        return cell.everywhere
    return cell.rivals.get(name) or cell.oracles.get(name)


def _kinds(cells: Sequence[PlayedCell]) -> str:
    rows = []
    for name, kind in (("conversations", True), ("single requests", False)):
        of_kind = [one.cell for one in cells if one.cell.is_conversation is kind]
        p99 = [cell.time(TIMES["p99"]) for cell in of_kind]
        found = map(_mean, of_kind), p99, map(_goodput, of_kind)
        rows.append([name, str(len(of_kind)), *map(_geomean, found)])
    return table(["cells in which there are", "cells", "TTFT mean", "p99", "goodput"], rows)


def _gains(cells: Sequence[PlayedCell]) -> str:
    rows = []
    for against in (Against.RIVALS, Against.CENTRAL):
        compared = [
            (one.time(TIMES["TTFT mean"], against), gain)
            for one in (played.cell for played in cells)
            if below_saturation(one) and (gain := one.oracles_gain(against)) is not None
        ]
        ours, oracles = zip(*compared, strict=True) if compared else ((), ())
        rows.append([f"the best of {against}", str(len(compared)), *map(_geomean, (ours, oracles))])
    return table(["TTFT mean", "cells", "over the mesh's", "over the better oracle's"], rows)


def _mean(cell: Cell) -> Compared | None:
    return cell.time(TIMES["TTFT mean"])


def _goodput(cell: Cell) -> Compared | None:
    return cell.rate(GOODPUT)


def _geomean(found: Iterable[Compared | None]) -> str:
    rows = [one.rows for one in found if one is not None]
    return _ratio(Compared("", geomean(rows))) if rows else NONE


def _cold(cells: Sequence[PlayedCell]) -> str:
    by_workload: dict[str, list[Cell]] = {}
    for one in cells:
        by_workload.setdefault(one.cell.place.workload, []).append(one.cold)
    rows = []
    for workload, colds in by_workload.items():
        found = [one for cold in colds if (one := _mean(cold)) is not None]
        ours = sum(float(cold.ours.mean[0]) for cold in colds) / len(colds)
        lost = sum(float(cold.ours.lost[0]) for cold in colds) / len(colds)
        ratio = interval(geomean([one.rows for one in found])) if found else None
        least = min((float(one.rows[0]) for one in found), default=None)
        rows.append(
            [
                *(workload, str(len(colds)), seconds(ours)),
                *((times(ratio.value), _range(ratio)) if ratio else (NONE, NONE)),
                *(NONE if least is None else times(least), share(lost)),
            ]
        )
    head = ["workload", "cells", "TTFT mean s", "geometric mean", "interval", "least", "lost"]
    return table(head, rows)


def _cells(cells: Sequence[PlayedCell]) -> str:
    head = ["cell", "follow", "seeds", "TTFT mean s", "mean", "by", "p99", "goodput /s", "goodput"]
    more = ["throughput", "over oracle", "federation", "lost", "left out"]
    return table([*head, *more], [_row(one) for one in cells])


def _row(played: PlayedCell) -> list[str]:
    cell = played.cell
    mean = _mean(cell)
    left_out = [
        f"{name} {share(float(one.lost[0]))}"
        for name, one in cell.rivals.items()
        if name not in cell.eligible
    ]
    return [
        *(name_of(cell.place), share(cell.ours.follow), str(played.seeds)),
        seconds(float(cell.ours.mean[0])),
        *(_ratio(mean), mean.name if mean else NONE, _ratio(cell.time(TIMES["p99"]))),
        *(f"{cell.ours.goodput[0]:.2f}", _ratio(_goodput(cell))),
        *(_ratio(cell.rate(lambda sample: sample.throughput)), _ratio(cell.over_oracle())),
        *(_ratio(cell.federation()), share(float(cell.ours.lost[0])), ", ".join(left_out) or NONE),
    ]


def _ratio(found: Compared | None) -> str:
    if found is None:
        return NONE
    one = interval(found.rows)
    return f"{times(one.value)} ({_range(one)})"


def _range(one: Interval) -> str:
    return f"{one.low:.2f}–{one.high:.2f}"
