"""The price of federation: what `mesh` loses by hearing late, little, and not always.

    make study-federation

The reference is `mesh-everywhere`: the same policy with every replica of every region before its
eyes at once (`mesh.sim.twin_policies`), heartbeats of 10 ms. Compared with it is `mesh` as it runs,
and then with one thing worse at a time: heartbeats, digests, and lost updates.
"""

from collections.abc import Sequence
from typing import Any

from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import Figure, geomean, hit_ratio, throughput, ttft
from tests.programs.studies.tables.markdown import mark, seconds, share, table, times
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

MESH = System(name="mesh", policy="mesh")
EVERYWHERE = System(name="mesh-everywhere", policy="mesh-everywhere")
WORKLOADS = {"chat": 10.0, "mixed-tree": 10.0, "toolbench": 10.0, "diurnal": 10.0}
LOAD = 0.9
REFERENCE, AS_IT_IS = "one view, 10 ms", "as it runs: 100 ms, 100 ms, 0%"
SLOWER: dict[str, dict[str, float]] = {
    **{f"heartbeats {ms:g} ms": {"heartbeat_ms": ms} for ms in (10, 1000, 10_000)},
    **{f"digests {ms / 1000:g} s": {"gossip_ms": ms} for ms in (10, 1000, 10_000, 60_000)},
    **{f"lost updates {loss:.0%}": {"loss": loss} for loss in (0.01, 0.1, 0.3)},
}
PRICE_MAX = 1.05
MIX = "l4-llama3.1-8b+h100-llama3.1-8b"
ENGINES = {"L4": "l4-llama3.1-8b", "mixed": MIX}


def declare(size: Size) -> list[Case]:
    """The reference, the mesh as it runs, and each thing worse."""
    requests = size.pick(300, 600, 3000)
    systems: dict[str, tuple[System, dict[str, Any]]] = {
        REFERENCE: (EVERYWHERE, {"heartbeat_ms": 10.0}),
        AS_IT_IS: (MESH, {}),
        **{name: (MESH, fields) for name, fields in SLOWER.items()},
    }
    return [
        case(
            (workload, engines, load, name),
            system,
            fleet(6),
            load=load,
            workload=workload,
            rate_per_s=rate_per_s,
            duration_s=requests / rate_per_s,
            profile=(profile,),
            seed=seed,
            **fields,
        )
        for seed in range(size.seeds)
        for workload, rate_per_s in WORKLOADS.items()
        for engines, profile in ENGINES.items()
        for load in ((LOAD, 0.6) if size.full else (LOAD,))
        for name, (system, fields) in systems.items()
    ]


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """The curve over all cells, then the mesh as it runs in each."""
    found = Results(cases, results)
    places = list(dict.fromkeys(place[:3] for place in found.places()))
    return "\n\n".join([_curve(found, places), _cells(found, places)])


def _curve(found: Results, places: Sequence[tuple[Any, ...]]) -> str:
    def over(figure: Figure, name: str) -> float:
        return geomean(
            found.mean(figure, *place, name) / found.mean(figure, *place, REFERENCE)
            for place in places
        )

    rows = []
    for name in (REFERENCE, AS_IT_IS, *SLOWER):
        prices = [over(ttft(point), name) for point in ("mean", "p50", "p90", "p99")]
        hits = sum(found.mean(hit_ratio, *place, name) for place in places) / len(places)
        met = mark(round(prices[0], 2) <= PRICE_MAX) if name == AS_IT_IS else ""
        rows.append([name, *map(times, prices), times(over(throughput, name)), share(hits), met])
    head = ["mesh with", "TTFT mean", "p50", "p90", "p99", "throughput", "hits", "≤ 1.05×"]
    return f"**Over one view without delay, geometric means**\n\n{table(head, rows)}"


def _cells(found: Results, places: Sequence[tuple[Any, ...]]) -> str:
    rows = []
    for place in places:
        known = found.mean(ttft("mean"), *place, REFERENCE)
        ours = found.mean(ttft("mean"), *place, AS_IT_IS)
        workload, engines, load = place
        cell = f"{workload}, {engines}, {load:g}"
        rows.append([cell, seconds(known), seconds(ours), times(ours / known)])
    return table(["cell, TTFT mean", "one view s", "as it runs s", "price"], rows)


main = command("federation", declare, write, "The price of federation, and of staleness.")

if __name__ == "__main__":
    main()
