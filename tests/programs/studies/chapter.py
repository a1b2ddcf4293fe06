"""Output 23.2.1 of "Batch-aware routing" in the twin, with `mesh` as a fourth row.

    make study-chapter

The chapter's fleet: 4 replicas, batches of 8, 300 requests a second over 50 prefixes, steps of
40 ms and 3 ms more for a prefix that is not cached. Its replicas wait up to 25 ms to fill a batch
before they start one; engines here start at once, so the router waits in their place.

Its prefixes are pinned to replicas and its caches hold 12 of them, so the router's index is bound
to 12 prefixes a replica: unbound, everybody is believed to hold everything after a while. Without
affinity it is bound to nothing.

Fill is requests over steps times eight, and a request's wait its TTFT less one step of 40 ms: the
twin counts busy seconds and tokens, not steps.
"""

from collections.abc import Sequence

from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import hit_ratio, throughput, ttft
from tests.programs.studies.tables.markdown import share, table
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

REPLICAS, BATCH = 4, 8
STEP_S, MISS_S = 0.040, 0.003
INDEX_BLOCKS = 12 * 4096 // 64
BATCH_AWARE = System(
    name="batch_aware", policy="batch-aware", topology="central:us", pushing="blind"
)
SYSTEMS = (
    System(name="round_robin", policy="round-robin", topology="central:us", pushing="blind"),
    BATCH_AWARE,
    System(name="prefix_affinity", policy="batch-aware", topology="central:us", pushing="blind"),
    System(name="mesh", policy="mesh", topology="central:us", pushing="blind"),
)
PAPER = {
    "round_robin": ("45%", "240", "49"),
    "batch_aware": ("71%", "165", "80"),
    "prefix_affinity": ("61%", "150", "64"),
}


def declare(size: Size) -> list[Case]:
    """Four rows."""
    return [
        case(
            (system.name,),
            system,
            fleet(REPLICAS, ("us",)),
            workload="chapter",
            profile=("chapter-23.2",),
            duration_s=size.pick(15, 60),
            seed=seed,
            setting=(f"index_blocks_max={1 if system is BATCH_AWARE else INDEX_BLOCKS}",),
            world={"batch_max_known": True},
        )
        for seed in range(size.seeds)
        for system in SYSTEMS
    ]


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """The chapter's columns, its own numbers in brackets."""
    found = Results(cases, results)
    rows = []
    for system in SYSTEMS:
        answers_per_s = found.mean(throughput, system.name)  # an answer has one token
        busy_s = found.mean(lambda result: result["gpu_busy_s"], system.name)
        fill_ratio = found.mean(_fill, system.name)
        wait_ms = (found.mean(ttft("p99"), system.name) - STEP_S) * 1000
        fill, busy, p99 = PAPER.get(system.name, ("", "", ""))
        rows.append(
            [
                system.name,
                f"{answers_per_s:.0f}",
                f"{share(fill_ratio)}{_beside(fill)}",
                f"{busy_s:.0f}{_beside(busy)}",
                f"{wait_ms:.0f}{_beside(p99)}",
                share(found.mean(hit_ratio, system.name)),
            ]
        )
    head = ["policy", "requests/s", "GPU fill", "GPU busy s", "p99 wait ms", "hits"]
    return table(head, rows)


def _fill(result: Result) -> float:
    misses = result["ok"] * (1.0 - hit_ratio(result))
    steps = (result["gpu_busy_s"] - misses * MISS_S) / STEP_S
    return float(result["ok"] / steps / BATCH)


def _beside(paper: str) -> str:
    return f" ({paper})" if paper else ""


main = command("chapter", declare, write, "The chapter's fleet, and mesh.")

if __name__ == "__main__":
    main()
