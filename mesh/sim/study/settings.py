"""The settings of `mesh sim` and of `mesh plan`.

`mesh sim`: a scenario, and lists of what is compared in it. Every combination of policies,
topologies, pushing rules, loads and fleets is one run. `mesh plan`: a scenario, a target to meet,
and the price of a GPU.
"""

from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES
from mesh.replay.settings import CheckedRegion, Positive, one_of
from mesh.sim.config import CENTRAL, parse_topology
from mesh.sim.offline.config import SCOPES
from mesh.sim.study.cells import Cell
from mesh.sim.study.scenario import (
    REPLICAS_MAX,
    OutFile,
    RegionCounts,
    Scenario,
    ShareBelow1,
    TwinPolicy,
    TwinPushing,
    listed,
)
from mesh.sim.twin_policies import TWIN_ONLY
from schemas.ids import RegionId
from schemas.settings import Option

RUNS_MAX = 10_000
JOBS_MAX = 256
SIMULATIONS_MAX = 10_000


def _checked_topology(text: str) -> str:
    parse_topology(text)
    return text


def _checked_fleet(replicas: dict[str, int]) -> dict[str, int]:
    if not any(replicas.values()):
        raise ValueError("give at least one region a replica, as us=4,eu=4")
    return replicas


def _checked_folder(path: Path) -> Path:
    if not path.is_dir() and (path.exists() or not path.resolve().parent.is_dir()):
        raise ValueError(f"{path}: give a folder, or a new one in a folder that exists")
    return path


TopologyName = Annotated[str, AfterValidator(_checked_topology)]
FleetCounts = Annotated[RegionCounts, AfterValidator(_checked_fleet)]


class SimSettings(Scenario):
    policy: Annotated[
        tuple[TwinPolicy, ...],
        BeforeValidator(listed),
        Option(
            f"Policies to compare: {', '.join((*POLICIES, *TWIN_ONLY))}. Options follow a colon, "
            "as in cache-aware:0.3/64/1.5.",
            "POLICY,…",
            RouterSettings().policy,
        ),
    ] = (RouterSettings().policy,)
    topology: Annotated[
        tuple[TopologyName, ...],
        BeforeValidator(listed),
        Option(
            "Topologies to compare: mesh (a router in every region, all peers), region-local (no "
            "peers), central:REGION (one router for all).",
            "TOPOLOGY,…",
            "mesh",
        ),
    ] = ("mesh",)
    pushing: Annotated[
        tuple[TwinPushing, ...],
        BeforeValidator(listed),
        Option(
            "Pushing rules to compare, when a replica may be given more work: blind, "
            "outstanding:N, pending.",
            "PUSHING,…",
            "pending",
        ),
    ] = ("pending",)
    load: Annotated[
        tuple[Positive, ...],
        BeforeValidator(listed),
        Option(
            "Loads to compare, as shares of the fleet's capacity: 0.7,0.9. Sets the speed of a "
            "trace or an open loop.",
            "X,…",
        ),
    ] = ()
    offline_scope: Annotated[
        tuple[Annotated[str, one_of("offline scope", SCOPES)], ...],
        BeforeValidator(listed),
        Option(
            "Where batch jobs' lines may go, to compare: mesh (anywhere), region-local (where they "
            "were submitted), none (jobs are left out).",
            "SCOPE,…",
            "mesh",
        ),
    ] = ("mesh",)
    regions: Annotated[
        tuple[FleetCounts, ...],
        Field(min_length=1),
        Option(
            "Replicas per region. Repeat the option to compare fleets.",
            "REGION=N,…",
            "us=4,eu=4,ap=4",
            repeats=True,
        ),
    ] = ({"us": 4, "eu": 4, "ap": 4},)
    jobs: Annotated[
        Annotated[int, Field(ge=1, le=JOBS_MAX)],
        Option("Runs at a time, each in a process of its own.", "N"),
    ] = 1
    out: Annotated[OutFile | None, Option("Write the results as JSON to this file.", "PATH")] = None
    pictures: Annotated[
        Annotated[Path, AfterValidator(_checked_folder)] | None,
        Option("Draw the runs, as SVG files in this folder.", "DIR"),
    ] = None

    @property
    def region_names(self) -> tuple[RegionId, ...]:
        """Those of the first fleet; all have the same."""
        return tuple(RegionId(region) for region in self.regions[0])

    def cells(self) -> tuple[Cell, ...]:
        """Every combination, those with one workload beside each other."""
        return tuple(
            Cell(
                policy=policy,
                topology=topology,
                pushing=pushing,
                load=load,
                offline=offline if self.offline else None,
                replicas={RegionId(region): count for region, count in fleet.items()},
            )
            for fleet, load, topology, pushing, policy, offline in product(
                self.regions,
                self.load or (None,),
                self.topology,
                self.pushing,
                self.policy,
                self.offline_scope,
            )
        )

    @model_validator(mode="after")
    def _regions_agree(self) -> Self:
        for fleet in self.regions[1:]:
            if set(fleet) != set(self.region_names):
                raise ValueError(
                    f"--regions: every fleet names {', '.join(self.region_names)}; "
                    "give a region without replicas a 0"
                )
        for topology in self.topology:
            parse_topology(topology).check(self.region_names)
        self._check_regions()
        return self

    @model_validator(mode="after")
    def _scope_of_something(self) -> Self:
        if "offline_scope" in self.model_fields_set and not self.offline:
            raise ValueError("--offline-scope says where lines of --offline may go: give that too")
        return self

    @model_validator(mode="after")
    def _load_or_speed(self) -> Self:
        if self.load and self.speed is not None:
            raise ValueError("--load sets the speed: leave --speed out")
        return self

    @model_validator(mode="after")
    def _runs_are_bounded(self) -> Self:
        lists = (
            *(self.policy, self.topology, self.pushing, self.load or (None,), self.regions),
            self.offline_scope,
        )
        runs = prod(map(len, lists))
        if runs > RUNS_MAX:
            raise ValueError(f"{runs} runs are more than {RUNS_MAX}: shorten one of the lists")
        return self


def checked_central(region: str) -> str:
    """The topology of a single router in that region, by region or already written out."""
    return str(parse_topology(f"{CENTRAL}:{region.removeprefix(f'{CENTRAL}:')}").centre)


class PlanSettings(Scenario):
    ttft_p90: Annotated[
        Positive,
        Option("The target: in every region, nine in ten first tokens come within this time.", "S"),
    ]
    throughput: Annotated[
        Positive | None,
        Option("The target, too: answers per second, over all regions.", "X", "any"),
    ] = None
    lost_max: Annotated[
        ShareBelow1,
        Option("The target, too: the share of a region's requests that may be shed or fail.", "X"),
    ] = 0.01
    regions: Annotated[
        tuple[CheckedRegion, ...],
        BeforeValidator(listed),
        Field(min_length=1),
        Option("Regions that have clients and may have replicas.", "REGION,…", "us,eu,ap"),
    ] = ("us", "eu", "ap")
    central: Annotated[
        Annotated[str, AfterValidator(checked_central)] | None,
        Option("Plan for a single router in this region, too.", "REGION"),
    ] = None
    policy: Annotated[
        TwinPolicy,
        Option(
            f"One of {', '.join(POLICIES)}; options follow a colon, as in cache-aware:0.3/64/1.5.",
            "POLICY",
        ),
    ] = RouterSettings().policy
    pushing: Annotated[
        TwinPushing,
        Option("When a replica may be given more work: blind, pending or outstanding:N.", "RULE"),
    ] = "pending"
    gpu_hour_price: Annotated[
        Positive | None,
        Option("Price of one GPU per hour, in any currency; the plan then has costs.", "X"),
    ] = None
    gpus_per_replica: Annotated[int, Field(ge=1, le=1024), Option("GPUs of one engine.", "N")] = 1
    replicas_max: Annotated[
        int, Field(ge=1, le=REPLICAS_MAX), Option("Most replicas in one region.", "N")
    ] = 64
    simulations_max: Annotated[
        int, Field(ge=1, le=SIMULATIONS_MAX), Option("Most simulations to play.", "N")
    ] = 200
    out: Annotated[OutFile | None, Option("Write the plan as JSON to this file.", "PATH")] = None

    @property
    def region_names(self) -> tuple[RegionId, ...]:
        """The regions that may have replicas."""
        return tuple(RegionId(region) for region in self.regions)

    @model_validator(mode="after")
    def _regions_agree(self) -> Self:
        if self.central is not None:
            parse_topology(f"{CENTRAL}:{self.central}").check(self.region_names)
        self._check_regions()
        return self
