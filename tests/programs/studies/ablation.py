"""`mesh` with each term of its price and each rule taken out, one at a time, in every cell.

    make study-ablation [QUICK=1 | FULL=1] [TRACES=folder]

The cells are those of `make study-mesh` (`mesh.matrix`), by default with two seeds and half as many
requests. A ratio is of the mean time to the first token without the part to that with it, lost
requests counted with the patience: over 1, the part pays. Cells below saturation are those with a
load under 1.
"""

from collections.abc import Callable, Mapping, Sequence

from tests.programs.studies.mesh.judge import FULL_LOAD, GOODPUT, MEAN, P99, Place, sample_of
from tests.programs.studies.mesh.matrix import MESH, Matrix, name_of
from tests.programs.studies.mesh.samples import Figure, Sample, geomean, interval
from tests.programs.studies.tables.case import Case, System
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.markdown import table, times
from tests.programs.studies.tables.result_files import Result

ENDS = ("pays most in", "costs most in")
PARTS: Mapping[str, tuple[str, str]] = {
    "rtt": ("mesh-without-rtt", "round trips to peers"),
    "line": ("mesh-without-line", "requests held there: before ours, and behind it"),
    "queue": ("mesh-without-queue", "prompts computed before ours; nothing is held for a queue"),
    "prefill": ("mesh-without-prefill", "the prompt's own tokens, so what is cached"),
    "base": ("mesh-without-base", "what every first token costs there"),
    "memory": ("mesh-without-memory", "until memory is released; nothing is held for memory"),
    "others": ("mesh-without-others", "what others pay, in all"),
    "others: stalls": ("mesh:/0", "decodes that our prefill stalls"),
    "others: work": ("mesh-without-work", "those that come while replicas are busy with ours"),
    "others: returns": ("mesh-without-returns", "round trips of the conversation's next turns"),
    "hold": ("mesh:60", "nothing is held for a queue, which is priced"),
    "misses": ("mesh-without-misses", "correction of what a replica holds by what was cached"),
    "names": ("mesh-without-names", "which replica of a peer holds the prompt"),
    "delays": ("mesh-without-delays", "how late peers' first tokens come"),
}


def _matrix(size: Size) -> Matrix:
    return Matrix(size=size, requests=int(size.pick(300, 300, 600)))


def declare(size: Size) -> list[Case]:
    """Every cell whole, and without each part."""
    matrix = _matrix(size)
    systems = [MESH, *(System(name=name, policy=policy) for name, (policy, _) in PARTS.items())]
    return [
        run
        for place in matrix.places()
        for seed in range(size.seeds)
        for run in matrix.runs(place, seed, systems)
    ]


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """One table: a row for each part."""
    played: dict[Place, dict[str, dict[int, Result]]] = {}
    for one, result in zip(cases, results, strict=True):
        *place, name, seed = one.tags
        played.setdefault(Place(*place), {}).setdefault(name, {})[seed] = result
    samples = {
        place: {name: sample_of(place, by_seed) for name, by_seed in found.items()}
        for place, found in played.items()
    }
    head = ["without", "what", "mean, load < 1", "load ≥ 1", "p99", "goodput", "lost", *ENDS]
    return table(head, [_row(name, samples) for name in PARTS])


def _row(name: str, samples: Mapping[Place, Mapping[str, Sample]]) -> list[str]:
    below = [place for place in samples if place.load < FULL_LOAD]
    above = [place for place in samples if place.load >= FULL_LOAD]
    means = {
        place: float((MEAN(found[name]) / MEAN(found[MESH.name]))[0])
        for place, found in samples.items()
    }
    lost = [float((found[name].lost - found[MESH.name].lost)[0]) for found in samples.values()]
    return [
        name,
        PARTS[name][1],
        *(_ratio(name, MEAN, samples, among) for among in (below, above)),
        _ratio(name, P99, samples, [*samples]),
        _ratio(name, GOODPUT, samples, [*samples]),
        f"{100 * sum(lost) / len(lost):+.1f} points",
        *(f"{name_of(one)} {times(means[one])}" for one in (_most(means, max), _most(means, min))),
    ]


def _most(means: Mapping[Place, float], which: Callable[..., Place]) -> Place:
    return which(means, key=lambda place: means[place])


def _ratio(
    name: str, figure: Figure, samples: Mapping[Place, Mapping[str, Sample]], among: Sequence[Place]
) -> str:
    if not among:
        return "–"
    rows = [figure(samples[place][name]) / figure(samples[place][MESH.name]) for place in among]
    width = interval(geomean(rows))
    return f"{times(width.value)} ({width.low:.2f}–{width.high:.2f})"


main = command(
    "ablation", declare, write, "`mesh` without each term of its price and each of its rules."
)

if __name__ == "__main__":
    main()
