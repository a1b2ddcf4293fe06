"""SkyWalker's figures 8, 9 and 10 in the twin, with `mesh` as a row of our own.

    make study-skywalker

Engines are the paper's (one L4 each, Llama-3.1-8B), clients its counts, workloads made after its
own description. Its GKE Gateway can't be run here; `nearest region` is what the paper
describes: each region's clients on that region's replicas, in turn, no prefixes, no queue.
"""

from collections.abc import Sequence
from typing import Any

from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import (
    e2e,
    geomean,
    hit_ratio,
    lost_ratio,
    throughput,
    ttft,
)
from tests.programs.studies.tables.markdown import seconds, share, table, times
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

L4 = ("l4-llama3.1-8b",)
CENTRAL = "central:us"
BASELINES = (
    System(name="nearest region", policy="round-robin", topology="region-local", pushing="blind"),
    System(name="RR", policy="round-robin", topology=CENTRAL, pushing="blind"),
    System(name="LL", policy="least-load", topology=CENTRAL, pushing="blind"),
    System(name="CH", policy="consistent-hash", topology=CENTRAL, pushing="blind"),
    System(name="SGL", policy="cache-aware", topology=CENTRAL, pushing="blind"),
)
SKYWALKER_CH = System(name="SkyWalker-CH", policy="skywalker-ch")
SKYWALKER = System(name="SkyWalker", policy="skywalker")
MESH = System(name="mesh", policy="mesh")
SYSTEMS = (*BASELINES, SKYWALKER_CH, SKYWALKER, MESH)
WORKLOADS = {"ChatBot Arena": "arena", "WildChat": "chat", "ToT": "tot", "Mixed Tree": "mixed-tree"}
PUSHING = ("blind", "outstanding:10", "outstanding:20", "outstanding:30", "pending")
REGION_LOCAL = System(name="region-local", policy="region-local", topology="region-local")
FLEETS = (6, 9, 12)


def declare(size: Size) -> list[Case]:
    """Every run of the three figures."""
    duration_s = size.pick(120, 300, 600)
    cases = []
    for seed in range(size.seeds):
        asked: dict[str, Any] = {"seed": seed, "duration_s": duration_s, "profile": L4}
        cases += [
            case(("8", label, system.name), system, fleet(12), workload=workload, **asked)
            for label, workload in WORKLOADS.items()
            for system in SYSTEMS
        ]
        cases += [
            case(
                ("9", pushing),
                System(name=pushing, policy="cache-aware", topology=CENTRAL, pushing=pushing),
                fleet(4, ("us",)),
                workload="tot",
                clients={"us": 30},
                **asked,
            )
            for pushing in PUSHING
        ]
        cases += [
            case(("10", total, system.name), system, fleet(total), workload="diurnal", **asked)
            for total in FLEETS
            for system in (REGION_LOCAL, SKYWALKER, MESH)
        ]
    return cases


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """All three figures as text."""
    found = Results(cases, results)
    return "\n\n".join([_figure_8(found), _claims(found), _figure_9(found), _figure_10(found)])


def _figure_8(found: Results) -> str:
    parts = []
    for label in WORKLOADS:
        best = found.mean(throughput, "8", label, SKYWALKER.name)
        rows = []
        for system in SYSTEMS:
            at = ("8", label, system.name)
            tokens = found.mean(throughput, *at)
            points = [seconds(found.mean(ttft(point), *at)) for point in ("mean", "p50", "p90")]
            rows.append(
                [
                    system.name,
                    f"{tokens:.0f}",
                    times(tokens / best),
                    share(found.mean(hit_ratio, *at)),
                    *points,
                    seconds(found.mean(e2e("p50"), *at)),
                    share(found.mean(lost_ratio, *at)),
                ]
            )
        head = ["system", "tokens/s", "of SkyWalker", "hits"]
        head += ["TTFT mean s", "p50", "p90", "end to end p50 s", "lost"]
        parts.append(f"**Figure 8, {label}**\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _claims(found: Results) -> str:
    """The paper's figures of SkyWalker, beside SkyWalker here and `mesh`."""
    central = [system.name for system in BASELINES[1:]]
    chats, trees = ("ChatBot Arena", "WildChat"), ("ToT", "Mixed Tree")
    gateway = BASELINES[0].name
    claims = [
        ("throughput / single balancers, chat", throughput, chats, central, "1.12–1.20×"),
        ("throughput / single balancers, trees", throughput, trees, central, "0.98–1.4×"),
        ("throughput / GKE, all four", throughput, (*chats, *trees), [gateway], "1.43–2.06×"),
        ("TTFT p50, part of theirs", ttft("p50"), (*chats, *trees), central, "0.16–0.58×"),
        ("TTFT p90, part of theirs", ttft("p90"), (*chats, *trees), central, "0.10–0.23×"),
    ]
    rows = []
    for claim, figure, labels, names, paper in claims:
        row = [claim, paper]
        for system in (SKYWALKER, MESH):
            ratios = [
                found.mean(figure, "8", label, system.name) / found.mean(figure, "8", label, name)
                for label in labels
                for name in names
            ]
            row += [f"{min(ratios):.2f}–{max(ratios):.2f}×", times(geomean(ratios))]
        rows.append(row)
    head = ["claim", "paper", "SkyWalker here", "mean", "mesh", "mean"]
    return f"**Figure 8, claims**\n\n{table(head, rows)}"


def _figure_9(found: Results) -> str:
    pending = found.mean(throughput, "9", "pending")
    names = {"blind": "BP", "pending": "SP-P"}
    rows = [
        [
            names.get(pushing, f"SP-O, {pushing.partition(':')[2]}"),
            f"{found.mean(throughput, '9', pushing):.0f}",
            times(pending / found.mean(throughput, "9", pushing)),
            share(found.mean(hit_ratio, "9", pushing)),
            *(seconds(found.mean(ttft(point), "9", pushing)) for point in ("p50", "p90")),
            times(found.mean(ttft("p90"), "9", pushing) / found.mean(ttft("p90"), "9", "pending")),
        ]
        for pushing in PUSHING
    ]
    head = ["pushing", "tokens/s", "SP-P over it", "hits", "TTFT p50 s", "p90", "p90 of SP-P's"]
    paper = "The paper: SP-P 1.27× BP and 1.4× SP-O in throughput, p90 18.5× below BP's."
    return f"**Figure 9**\n\n{table(head, rows)}\n\n{paper}"


def _figure_10(found: Results) -> str:
    twelve = found.mean(throughput, "10", 12, REGION_LOCAL.name)
    rows = []
    for total in FLEETS:
        local = found.mean(throughput, "10", total, REGION_LOCAL.name)
        for system in (REGION_LOCAL, SKYWALKER, MESH):
            at = ("10", total, system.name)
            tokens = found.mean(throughput, *at)
            rows.append(
                [
                    f"{total} {system.name}",
                    f"{tokens:.0f}",
                    times(tokens / local),
                    times(tokens / twelve),
                    seconds(found.mean(ttft("mean"), *at)),
                    seconds(found.mean(ttft("p90"), *at)),
                ]
            )
    head = ["replicas", "tokens/s", "of as many local", "of 12 local", "TTFT mean s", "p90"]
    paper = "The paper: 1.07–1.18× as many region-local replicas; 9 replicas as good as 12."
    return f"**Figure 10**\n\n{table(head, rows)}\n\n{paper}"


main = command("skywalker", declare, write, "SkyWalker's figures 8, 9 and 10, and mesh.")

if __name__ == "__main__":
    main()
