"""The cells of the mesh study, and the runs that each of them needs.

Six replicas in three regions (L4s, H100s, or in each region one of both), requests as many in
every cell, half of them before the measurement. The default form has two seeds of every workload
and trace, from 60% of the load, where rivals come close, and four seeds of a cell in which anything
is saturated: if with one of the first two `mesh` or a rival loses over one request in a hundred, or
answers fewer than nine in ten within their service level (`tables.client_view`). The long form has
all loads and all rivals in every cell. Oracles play on mixed fleets, where a target asks for them,
and below saturation, where they show how much placing can gain; in the long form everywhere.

`Conditions` are what a world has beside all this; cells are played as it is by default.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.programs.studies.mesh.judge import FULL_LOAD, Place
from tests.programs.studies.mesh.rivals import RIVALS, Rival
from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.client_view import IN_TIME, LOST, PATIENCE_S
from tests.programs.studies.tables.command import Size
from tests.programs.studies.tables.result_files import Result, ResultFiles

MESH = System(name="mesh", policy="mesh")
EVERYWHERE = System(name="mesh-everywhere", policy="mesh-everywhere")
ORACLES = tuple(
    System(name=f"oracle {w}", policy=f"oracle:{w}", pushing="blind") for w in (0.02, 0.08)
)
L4, H100 = "l4-llama3.1-8b", "h100-llama3.1-8b"
FLEETS = {"L4": (L4,), "H100": (H100,), "mixed": (L4, H100)}
REPLICAS = fleet(6)
LOADS = (0.3, 0.6, 0.9, 1.0, 1.3)
OTHERS_LOAD = 0.6  # where all policies are compared by default
SEEDS, SEEDS_SATURATED = 2, 4
LOST_MOST, IN_TIME_LEAST = 0.01, 0.9  # beyond these a run is saturated


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """`scenario`: more of its fields. `world`: fields of WorldConfig that scenarios don't have."""

    scenario: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All runs of one form of the study.

    `requests`: of every run, the warm-up included; None: by the size. `only`: beginnings of the
    names of cells to play.
    """

    size: Size
    requests: int | None = None
    patience_s: float = PATIENCE_S
    only: Sequence[str] = ()
    rivals: Sequence[Rival] = RIVALS
    conditions: Conditions = field(default_factory=Conditions)

    def places(self) -> list[Place]:
        """Every cell."""
        found = [
            Place(name, engines, load)
            for name in self._sources()
            for engines in FLEETS
            for load in self._loads(engines)
        ]
        return [one for one in found if not self.only or name_of(one).startswith(tuple(self.only))]

    def has(self, workload: str) -> bool:
        """Whether it can be played: a trace needs its folder."""
        return workload in MADE or self.size.traces is not None

    def systems(self, place: Place) -> list[System]:
        """Everyone who plays that cell."""
        asked = place.engines == "mixed" or place.load < FULL_LOAD
        oracles = ORACLES if self.size.full or asked else ()
        return [MESH, *(one.system() for one in self.rivals_of(place)), *oracles, EVERYWHERE]

    def rivals_of(self, place: Place) -> list[Rival]:
        """The rivals in that cell."""
        size, (_, engines, load) = self.size, place
        more = size.full or (not size.quick and engines == "L4" and load == OTHERS_LOAD)
        return [one for one in self.rivals if one.everywhere or more]

    def runs(self, place: Place, seed: int, systems: Sequence[System]) -> list[Case]:
        """Those systems' runs of a cell with a seed."""
        # As many as the warm-up may take, and as many again (`tables.client_view`).
        requests = self.requests or int(self.size.pick(300, 600, 4000))
        source = self._sources()[place.workload]
        asked = source.asked(requests, place.engines, self.size)
        return [
            case(
                (*place, one.name, seed),
                one,
                REPLICAS,
                load=place.load,
                profile=("+".join(FLEETS[place.engines]),),
                world=self.conditions.world,
                patience_s=self.patience_s,
                seed=seed,
                **asked,
                **self.conditions.scenario,
            )
            for one in systems
        ]

    def wanted(self, files: ResultFiles) -> Iterator[Case]:
        """All runs; those with more seeds once it is known that a cell needs them."""
        for place in self.places():
            for seed in self.seeds(place, files):
                yield from self.runs(place, seed, self.systems(place))

    def seeds(self, place: Place, files: ResultFiles) -> range:
        """The seeds that the cell is to be played with, as far as it is known."""
        first = self.size.seeds
        if self.size.quick or first != SEEDS:
            return range(first)
        played = [
            files.get(one.key())
            for seed in range(first)
            for one in self.runs(place, seed, [MESH, *(r.system() for r in self.rivals_of(place))])
        ]
        known = [one for one in played if one is not None]
        more = len(known) == len(played) and any(map(is_saturated, known))
        return range(SEEDS_SATURATED if more else first)

    def played(self, place: Place, files: ResultFiles) -> dict[str, dict[int, Result]]:
        """Each system's results by seed, as far as they are there."""
        found: dict[str, dict[int, Result]] = {}
        for seed in self.seeds(place, files):
            for one in self.runs(place, seed, self.systems(place)):
                result = files.get(one.key())
                if result is not None:
                    found.setdefault(one.tags[3], {})[seed] = result
        return found

    def _sources(self) -> Mapping[str, Source]:
        if self.size.quick:
            names: Sequence[str] = ("chat", "mixed-tree", "toolbench", "mooncake chat")
        else:
            names = (*MADE, *RECORDED)
        known = MADE | (RECORDED if self.size.traces is not None else {})
        return {name: known[name] for name in names if name in known}

    def _loads(self, engines: str) -> Sequence[float]:
        if self.size.full:
            return LOADS
        if self.size.quick:
            return (0.6, 1.0)
        return (0.6, 1.0, 1.3) if engines == "L4" else (1.0,)


def name_of(place: Place) -> str:
    """As the page and `--cell` write it."""
    return f"{place.workload}, {place.engines}, {place.load:g}"


def is_saturated(result: Result) -> bool:
    """Whether a run loses requests or keeps many waiting; see above."""
    ends = result["end"][result["measured_from"] :]
    lost, in_time = ends.count(LOST), ends.count(IN_TIME)
    return lost > LOST_MOST * len(ends) or in_time < IN_TIME_LEAST * len(ends)
