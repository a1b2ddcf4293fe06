"""`mesh` against every other policy, on every workload and trace, at loads from 30% to 130%.

    make study-mesh [QUICK=1 | FULL=1] [TRACES=folder]

Six replicas in three regions (L4s, H100s, or in each region one of both), requests as many in
every cell. A *cell* is a workload, a fleet and a load, over all seeds. The central routers push
blindly, as they are published; `mesh` and `skywalker` have a router in every region.

Targets compare with the best central prefix router *of each metric*, so with four at once, and
with `skywalker`. `oracle` is the better of two weights in each cell (`mesh.sim.oracle`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.programs.studies.mesh.rivals import RIVALS
from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.comparison import compared
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

MESH = System(name="mesh", policy="mesh")
ORACLES = tuple(
    System(name=f"oracle {w}", policy=f"oracle:{w}", pushing="blind") for w in (0.02, 0.08)
)
MAIN = (*(rival.system() for rival in RIVALS if rival.everywhere), MESH, *ORACLES)
OTHERS = tuple(rival.system() for rival in RIVALS if not rival.everywhere)
L4, H100 = "l4-llama3.1-8b", "h100-llama3.1-8b"
FLEETS = {"L4": (L4,), "H100": (H100,), "mixed": (L4, H100)}
REPLICAS = fleet(6)
LOADS = (0.3, 0.6, 0.9, 1.0, 1.3)
OTHERS_LOAD = 0.6  # where all policies are compared by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is asked. `scale`: of a trace's lengths, for fleets with an L4 and for H100s alone."""

    workload: str | None = None
    rate_per_s: float = 10.0
    trace: str | None = None
    format: str = "mooncake"
    scale: tuple[float, float] = (1.0, 1.0)

    def asked(self, requests: int, engines: str, size: Size) -> dict[str, Any]:
        """The scenario's fields."""
        if self.workload is not None:
            duration_s = requests / self.rate_per_s
            return {
                "workload": self.workload,
                "rate_per_s": self.rate_per_s,
                "duration_s": duration_s,
            }
        assert size.traces is not None and self.trace is not None
        return {
            "trace": size.traces / self.trace,
            "format": self.format,
            "limit": requests,
            "scale_lengths": self.scale[engines == "H100"],
        }


MADE = {
    name: Source(workload=name)
    for name in (
        *("chat", "arena", "tot", "mixed-tree", "diurnal", "short"),
        *("toolbench", "agent", "programming", "video-qa", "loogle"),
    )
}
# An L4 has memory for 38,000 tokens: Mooncake's longest prompts have 120,000, agents' 200,000.
RECORDED = {
    "mooncake chat": Source(trace="mooncake/conversation_first30min.jsonl", scale=(0.125, 1.0)),
    "mooncake mixed": Source(trace="mooncake/arxiv_mixed_first1000.jsonl", scale=(0.125, 1.0)),
    "azure chat": Source(trace="azure/AzureLLMInferenceTrace_conv.csv", format="azure"),
    "coding agents": Source(
        trace="agent_traces/kv-cache-tester/dev.jsonl",
        format="kv-cache-tester",
        scale=(0.03, 0.25),
    ),
}


def declare(size: Size) -> list[Case]:
    """Every cell of the matrix at this size."""
    requests = int(size.pick(300, 600, 2000))
    cases: list[Case] = []
    for seed in range(size.seeds):
        for name, source in _sources(size).items():
            for engines, profiles in FLEETS.items():
                asked = source.asked(requests, engines, size) | {"seed": seed}
                cases += [
                    case(
                        (name, engines, load, system.name),
                        system,
                        REPLICAS,
                        load=load,
                        profile=("+".join(profiles),),
                        **asked,
                    )
                    for load in _loads(size, engines)
                    for system in _systems(size, engines, load)
                ]
    return cases


def _sources(size: Size) -> dict[str, Source]:
    if size.quick:
        names = ("chat", "mixed-tree", "toolbench", "mooncake chat")
    else:
        names = (*MADE, *RECORDED)
    known = MADE | (RECORDED if size.traces is not None else {})
    return {name: known[name] for name in names if name in known}


def _loads(size: Size, engines: str) -> Sequence[float]:
    if size.full:
        return LOADS
    if size.quick:
        return (0.6, 1.0)
    return (0.3, 0.6, 1.0, 1.3) if engines == "L4" else (1.0,)


def _systems(size: Size, engines: str, load: float) -> Sequence[System]:
    more = size.full or (not size.quick and engines == "L4" and load == OTHERS_LOAD)
    return (*MAIN, *OTHERS) if more else MAIN


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """Standings, then every cell."""
    return compared(
        Results(cases, results),
        ours=MESH.name,
        rivals=[rival.name for rival in RIVALS if rival.everywhere],
        skywalker="skywalker",
        oracles=[system.name for system in ORACLES],
    )


main = command("mesh", declare, write, "mesh against every other policy.")

if __name__ == "__main__":
    main()
