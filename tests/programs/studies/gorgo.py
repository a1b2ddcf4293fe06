"""GORGO's claim that a central router is quicker, with the same policy and a fair queue at both.

    make study-gorgo

The paper measures a median TTFT 2.5 times lower with one proxy for all regions than with a
router in each, 10 requests in flight on three nodes of eight A100s, 57 to 141 samples. In its
published code the decentralised router serves the requests it has queued one after another, each
to its end, and the proxy all at once; here both have the same queue. Chat after WildChat, on the
time model that was fitted to the paper's own Table 1.
"""

from collections.abc import Sequence

from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import geomean, hit_ratio, throughput, ttft
from tests.programs.studies.tables.markdown import seconds, share, table, times
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

A100 = ("a100-mistral-7b",)
CENTRAL = "central:us"
GORGO = System(name="gorgo, a router in each region", policy="gorgo")
PROXY = System(name="gorgo-proxy, one in us", policy="gorgo-proxy", topology=CENTRAL)
SYSTEMS = (
    GORGO,
    PROXY,
    System(name="least-load, central", policy="least-load", topology=CENTRAL),
    System(name="prefix tree, central", policy="skywalker", topology=CENTRAL),
    System(name="mesh", policy="mesh"),
)
THEIRS = "10 in flight"
LOADS = (0.3, 0.6, 0.9, 1.1)
TOTAL = 6
POINTS = ("mean", "p50", "p90", "p99")


def declare(size: Size) -> list[Case]:
    """Ten clients as in the paper, and an open loop at several loads."""
    requests = size.pick(800, 3000, 10_000)
    cases = []
    for seed in range(size.seeds):
        common = {"workload": "chat", "profile": A100, "seed": seed}
        cases += [
            case(
                (THEIRS, system.name),
                system,
                fleet(TOTAL),
                clients={"us": 4, "eu": 3, "ap": 3},
                duration_s=size.pick(120, 600),
                **common,
            )
            for system in SYSTEMS
        ]
        cases += [
            case(
                (f"load {load:g}", system.name),
                system,
                fleet(TOTAL),
                load=load,
                rate_per_s=20.0,
                duration_s=requests / 20.0,
                **common,
            )
            for load in LOADS
            for system in SYSTEMS
        ]
    return cases


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """One table, and the verdict."""
    found = Results(cases, results)
    rows, ratios = [], []
    for label in (THEIRS, *(f"load {load:g}" for load in LOADS)):
        proxy = found.mean(ttft("p50"), label, PROXY.name)
        for system in SYSTEMS:
            points = [
                found.mean(ttft(p), label, system.name) for p in ("mean", "p50", "p90", "p99")
            ]
            rows.append(
                [
                    f"{label}: {system.name}",
                    *map(seconds, points),
                    times(proxy / points[1]),
                    f"{found.mean(throughput, label, system.name):.0f}",
                    share(found.mean(hit_ratio, label, system.name)),
                ]
            )
        ratios.append(proxy / found.mean(ttft("p50"), label, GORGO.name))
    head = ["router", "TTFT mean s", "p50", "p90", "p99", "proxy's p50 over it", "tokens/s", "hits"]
    text = (
        "The paper: the proxy's median is 2.5 times lower. Here it is "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the decentralised one's "
        f"(geometric mean {geomean(ratios):.2f})."
    )
    return f"{table(head, rows)}\n\n{text}"


main = command("gorgo", declare, write, "GORGO: central against decentralised.")

if __name__ == "__main__":
    main()
