"""What is left of a lead where the router knows less: estimates wrong, messages late or lost.

`mesh` and a few strong rivals, or those of `--rival`, play a few cells as they are, with each of
`CONDITIONS` alone, and with all of them together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.programs.studies.mesh.judge import MEAN, Cell, Place, sample_of
from tests.programs.studies.mesh.matrix import MESH, Conditions, Matrix, name_of
from tests.programs.studies.mesh.rivals import RIVALS, Rival
from tests.programs.studies.mesh.samples import interval
from tests.programs.studies.tables.case import Case
from tests.programs.studies.tables.markdown import seconds, share, table, times
from tests.programs.studies.tables.result_files import Result, ResultFiles

PLACES = (
    *(Place("chat", "L4", 0.6), Place("programming", "L4", 1.0), Place("mooncake chat", "L4", 1.0)),
)
NAMES = ("llm-d precise", "dynamo", "skywalker-ch")
AS_IT_IS = "as it is"
ALONE: Mapping[str, Conditions] = {
    "estimates of prompts off by a fifth": Conditions(world={"token_error": 0.2}),
    "jitter of 5 ms": Conditions(scenario={"jitter_ms": 5.0}),
    "1% of messages lost": Conditions(scenario={"loss": 0.01}),
    "speeds of engines unknown": Conditions(world={"speeds_known": False}),
}
CONDITIONS: Mapping[str, Conditions] = {
    AS_IT_IS: Conditions(),
    **ALONE,
    "all of these": Conditions(
        scenario={name: value for one in ALONE.values() for name, value in one.scenario.items()},
        world={name: value for one in ALONE.values() for name, value in one.world.items()},
    ),
}


def wanted(matrix: Matrix) -> list[Case]:
    """Every run. Without traces the cell of a trace is left out."""
    return [
        run
        for place in _places(matrix)
        for conditions in CONDITIONS.values()
        for seed in range(matrix.size.seeds)
        for run in _runs(matrix, place, conditions, seed)
    ]


def written(matrix: Matrix, files: ResultFiles) -> str:
    """A table: the mean times, theirs over ours."""
    names = [MESH.name, *(one.name for one in _rivals(matrix))]
    head = ["cell", "conditions", "TTFT mean s", *names[1:], "lost"]
    rows = [
        [name_of(place), text, *_row(matrix, place, conditions, names, files)]
        for place in _places(matrix)
        for text, conditions in CONDITIONS.items()
    ]
    return f"**Conditions**, mean TTFT, theirs over ours\n\n{table(head, rows)}"


def _row(
    matrix: Matrix,
    place: Place,
    conditions: Conditions,
    names: Sequence[str],
    files: ResultFiles,
) -> list[str]:
    found: dict[str, dict[int, Result]] = {name: {} for name in names}
    for seed in range(matrix.size.seeds):
        for run in _runs(matrix, place, conditions, seed):
            result = files.get(run.key())
            if result is None:
                return ["not played to the end", *[""] * len(names)]
            found[run.tags[3]][seed] = result
    samples = {name: sample_of(place, by_seed) for name, by_seed in found.items()}
    ours = samples.pop(MESH.name)
    ratios = []
    for name, one in samples.items():
        ratio = Cell(place, ours, {name: one}, frozenset(), {}).time(MEAN, everyone=True)
        assert ratio is not None
        width = interval(ratio.rows)
        ratios.append(f"{times(width.value)} ({width.low:.2f}–{width.high:.2f})")
    return [seconds(float(ours.mean[0])), *ratios, share(float(ours.lost[0]))]


def _places(matrix: Matrix) -> list[Place]:
    return [one for one in PLACES if matrix.has(one.workload)]


def _rivals(matrix: Matrix) -> list[Rival]:
    chosen = [one for one in matrix.rivals if one.name in NAMES]
    return list(matrix.rivals) if len(matrix.rivals) < len(RIVALS) else chosen


def _runs(matrix: Matrix, place: Place, conditions: Conditions, seed: int) -> list[Case]:
    systems = [MESH, *(one.system() for one in _rivals(matrix))]
    whole = replace(matrix, size=replace(matrix.size, quick=False), conditions=conditions)
    return whole.runs(place, seed, systems)
