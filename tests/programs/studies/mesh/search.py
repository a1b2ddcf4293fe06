"""Which setting of each rival plays the reported cells: the best of those that `rivals` lists.

Every setting plays the same sample of cells, `PLACES`, with seeds that no reported cell has. The
best has the least geometric mean of mean times to first token, lost requests counted with the
patience. Nothing is searched on the workloads in `HELD_OUT`, nor on any recorded trace. The short
form has one seed of the places in `PLACES_QUICK`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.programs.studies.mesh.judge import Place
from tests.programs.studies.mesh.matrix import Matrix
from tests.programs.studies.mesh.rivals import Rival
from tests.programs.studies.mesh.samples import Sample, geomean
from tests.programs.studies.tables.case import Case
from tests.programs.studies.tables.markdown import share, table, times
from tests.programs.studies.tables.result_files import ResultFiles

SEEDS = (11, 12)
REQUESTS_QUICK = 240
PLACES = (
    *(Place("chat", "L4", 0.6), Place("mixed-tree", "H100", 1.0), Place("toolbench", "L4", 1.0)),
    *(Place("programming", "mixed", 1.0), Place("loogle", "L4", 0.3)),
    *(Place("video-qa", "H100", 1.0), Place("short", "L4", 1.3)),
)
PLACES_QUICK = (
    *(Place("chat", "L4", 1.0), Place("mixed-tree", "H100", 1.0), Place("toolbench", "L4", 1.0)),
    Place("programming", "L4", 1.0),
)
HELD_OUT = ("arena", "agent")


def wanted(matrix: Matrix) -> list[Case]:
    """Every run of the search. A rival with a single setting plays none."""
    return [
        run
        for rival in _searched(matrix)
        for setting in range(len(rival.settings))
        for run in _runs(matrix, rival, setting)
    ]


def written(matrix: Matrix, files: ResultFiles) -> str:
    """A table: each setting's mean TTFT, the rival's first setting being 1; less is better."""
    rows: list[list[str]] = []
    for rival in _searched(matrix):
        found = [list(_samples(matrix, rival, at, files)) for at in range(len(rival.settings))]
        if not all(len(samples) == len(_places(matrix)) for samples in found):
            rows.append([rival.name, "", "", "", "not played to the end"])
            continue
        means = [
            float(geomean([a.mean / b.mean for a, b in zip(one, found[0], strict=True)])[0])
            for one in found
        ]
        for at, (setting, samples) in enumerate(zip(rival.settings, found, strict=True)):
            lost = sum(float(sample.lost[0]) for sample in samples) / len(samples)
            notes = ["best"] if means[at] == min(means) else []
            notes += ["plays"] if at == rival.chosen else []
            rows.append([rival.name, setting.text, times(means[at]), share(lost), ", ".join(notes)])
    head = ["rival", "setting", "TTFT mean", "lost", ""]
    seeds = ", ".join(map(str, _seeds(matrix)))
    return f"**Settings**, {len(_places(matrix))} cells, seeds {seeds}\n\n{table(head, rows)}"


def _places(matrix: Matrix) -> Sequence[Place]:
    return PLACES_QUICK if matrix.size.quick else PLACES


def _seeds(matrix: Matrix) -> Sequence[int]:
    return SEEDS[:1] if matrix.size.quick else SEEDS


def _searched(matrix: Matrix) -> list[Rival]:
    return [rival for rival in matrix.rivals if len(rival.settings) > 1]


def _runs(matrix: Matrix, rival: Rival, setting: int) -> Iterator[Case]:
    for place in _places(matrix):
        yield from _place(matrix, rival, setting, place)


def _place(matrix: Matrix, rival: Rival, setting: int, place: Place) -> list[Case]:
    # The short form of the study has few workloads, and its few requests.
    requests = matrix.requests or (REQUESTS_QUICK if matrix.size.quick else None)
    whole = replace(matrix, size=replace(matrix.size, quick=False), requests=requests)
    runs = [whole.runs(place, seed, [rival.system(setting)]) for seed in _seeds(matrix)]
    return [run for one in runs for run in one]


def _samples(matrix: Matrix, rival: Rival, setting: int, files: ResultFiles) -> Iterator[Sample]:
    for place in _places(matrix):
        results = [files.get(run.key()) for run in _place(matrix, rival, setting, place)]
        whole = {at: one for at, one in enumerate(results) if one is not None}
        if len(whole) == len(_seeds(matrix)):
            yield Sample(whole)
