"""Preble's figures 3 and 5 and its scheduler's speed in the twin: E2 against round-robin.

    make study-preble

Engines and fleets are the paper's (2 and 4 A6000s with Mistral 7B), prompts made after its Table
1, arrivals Poisson with Zipf 1.1 over contents. Rates are given as loads, because the paper's
axes belong to its own software; 0.9 is near where round-robin breaks down. Both policies push at
once, as Preble's scheduler does. Nobody sheds: a router may hold until the client hangs up, so that
all answer the same requests. Preble's priority groups are not here: no router has them.
"""

from collections.abc import Sequence

from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import e2e, hit_ratio, lost_ratio
from tests.programs.studies.tables.markdown import mark, seconds, share, table, times
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

A6000 = ("a6000-mistral-7b",)
CENTRAL = "central:us"
ROUND_ROBIN = System(name="round-robin", policy="round-robin", topology=CENTRAL, pushing="blind")
E2 = System(name="e2", policy="e2", topology=CENTRAL, pushing="blind")
MESH = System(name="mesh", policy="mesh", topology=CENTRAL)
SYSTEMS = (ROUND_ROBIN, E2, MESH)
# Requests a second while they are made; the load then sets the speed.
RATES_PER_S = {"toolbench": 8.0, "agent": 8.0, "programming": 8.0, "video-qa": 4.0, "loogle": 2.0}
LOADS = (0.3, 0.6, 0.9)
FLEETS = (2, 4)
ABLATION = (
    ROUND_ROBIN,
    System(name="+ E2", policy="e2-alone", topology=CENTRAL, pushing="blind"),
    System(
        name="+ rebalancing, autoscaling", policy="e2-balanced", topology=CENTRAL, pushing="blind"
    ),
    System(name="+ prefill/decode", policy="e2", topology=CENTRAL, pushing="blind"),
)
ABLATION_LOAD = 0.9
NO_SHEDDING = ("hold_s_max=600", "hold_max=100000")
PAPER_DECISIONS = {"toolbench": 245, "video-qa": 2931}
DECISIONS_TARGET = 10_000


def declare(size: Size) -> list[Case]:
    """Figure 3's cases and figure 5's."""
    requests = int(size.pick(400, 1500, 4000))
    fleets = [fleet(total, ("us",)) for total in ((4,) if size.quick else FLEETS)]
    four = fleets[-1]
    cases = []
    for seed in range(size.seeds):
        for workload, rate_per_s in RATES_PER_S.items():
            asked = {
                "workload": workload,
                "clients": {"us": 100},
                "rate_per_s": rate_per_s,
                "duration_s": requests / rate_per_s,
                "profile": A6000,
                "seed": seed,
                "setting": NO_SHEDDING,
            }
            cases += [
                case(
                    (workload, sum(replicas.values()), load, system.name),
                    system,
                    replicas,
                    load=load,
                    **asked,
                )
                for replicas in fleets
                for load in LOADS
                for system in SYSTEMS
            ]
            if workload == "toolbench":
                cases += [
                    case(("ablation", system.name), system, four, load=ABLATION_LOAD, **asked)
                    for system in ABLATION
                ]
    return cases


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """Figures 3 and 5 and the decisions."""
    found = Results(cases, results)
    return "\n\n".join([_figure_3(found), _figure_5(found), _decisions(found)])


def _figure_3(found: Results) -> str:
    rows = []
    for workload, total, load, name in (place for place in found.places() if len(place) == 4):
        if name != ROUND_ROBIN.name:
            continue
        cell = (workload, total, load)
        base = {p: found.mean(e2e(p), *cell, ROUND_ROBIN.name) for p in ("mean", "p99")}
        row = [f"{workload}, {total} GPUs, load {load:g}", *map(seconds, base.values())]
        for system in (E2, MESH):
            row += [times(base[p] / found.mean(e2e(p), *cell, system.name)) for p in base]
        row += [share(found.mean(hit_ratio, *cell, system.name)) for system in SYSTEMS]
        row.append(share(max(found.mean(lost_ratio, *cell, system.name) for system in SYSTEMS)))
        rows.append(row)
    head = ["end-to-end latency", "RR mean s", "RR p99 s", "e2 mean", "e2 p99", "mesh mean"]
    head += ["mesh p99", "hits RR", "hits e2", "hits mesh", "lost, at most"]
    paper = "The paper: 1.5–14.5× in the mean and 2–10× at p99."
    return f"**Figure 3: round-robin over each**\n\n{table(head, rows)}\n\n{paper}"


def _figure_5(found: Results) -> str:
    base = {p: found.mean(e2e(p), "ablation", ROUND_ROBIN.name) for p in ("mean", "p99")}
    rows = []
    for system in ABLATION:
        own = {p: found.mean(e2e(p), "ablation", system.name) for p in base}
        ratios = [times(base[p] / own[p]) for p in base]
        rows.append([system.name, *map(seconds, own.values()), *ratios])
    head = ["toolbench, 4 GPUs", "mean s", "p99 s", "mean over RR", "p99 over RR"]
    paper = "The paper: each line better than the one before."
    return f"**Figure 5, load {ABLATION_LOAD:g}**\n\n{table(head, rows)}\n\n{paper}"


def _decisions(found: Results) -> str:
    total, load = max(place[1] for place in found.places() if len(place) == 4), LOADS[-1]
    rows = []
    for workload, paper in PAPER_DECISIONS.items():
        per_s = found.mean(lambda result: result["decisions_per_s"], workload, total, load, E2.name)
        rows.append([workload, str(paper), f"{per_s:.0f}", mark(per_s >= DECISIONS_TARGET)])
    head = ["e2, decisions a second", "paper", "here, one core", f"≥ {DECISIONS_TARGET}"]
    return table(head, rows)


main = command("preble", declare, write, "Preble's latencies, ablation and decisions a second.")

if __name__ == "__main__":
    main()
