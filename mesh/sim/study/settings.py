"""What `mesh sim` is told: a scenario, and lists of what is compared in it.

Every combination of policies, topologies, pushing rules, loads and fleets is one run.
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mesh.core.settings import RouterSettings
from mesh.replay.settings import Positive
from mesh.sim.study.cells import Cell
from mesh.sim.study.scenario import Counts, OutFile, Policy, Pushing, Scenario
from mesh.sim.study.written import listed
from mesh.sim.topology import parse_topology
from schemas.ids import RegionId

RUNS_MAX = 10_000
JOBS_MAX = 256


def _checked_topology(text: str) -> str:
    parse_topology(text)
    return text


def _checked_fleet(replicas: dict[str, int]) -> dict[str, int]:
    if not any(replicas.values()):
        raise ValueError("give at least one region a replica, as us=4,eu=4")
    return replicas


Topology = Annotated[str, AfterValidator(_checked_topology)]
Fleet = Annotated[Counts, AfterValidator(_checked_fleet)]


class SimSettings(Scenario):
    """One use of `mesh sim`."""

    policy: Annotated[tuple[Policy, ...], BeforeValidator(listed)] = (RouterSettings().policy,)
    topology: Annotated[tuple[Topology, ...], BeforeValidator(listed)] = ("mesh",)
    pushing: Annotated[tuple[Pushing, ...], BeforeValidator(listed)] = ("pending",)
    load: Annotated[tuple[Positive, ...], BeforeValidator(listed)] = ()
    regions: Annotated[tuple[Fleet, ...], Field(min_length=1)] = ({"us": 4, "eu": 4, "ap": 4},)
    jobs: Annotated[int, Field(ge=1, le=JOBS_MAX)] = 1
    out: OutFile | None = None
    csv: OutFile | None = None
    pictures: Annotated[Path, AfterValidator(lambda path: _checked_folder(path))] | None = None

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
                replicas={RegionId(region): count for region, count in fleet.items()},
            )
            for fleet, load, topology, pushing, policy in product(
                self.regions, self.load or (None,), self.topology, self.pushing, self.policy
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
    def _load_or_speed(self) -> Self:
        if self.load and self.speed is not None:
            raise ValueError("--load sets the speed: leave --speed out")
        return self

    @model_validator(mode="after")
    def _runs_are_bounded(self) -> Self:
        lists = (self.policy, self.topology, self.pushing, self.load or (None,), self.regions)
        runs = 1
        for values in lists:
            runs *= len(values)
        if runs > RUNS_MAX:
            raise ValueError(f"{runs} runs are more than {RUNS_MAX}: shorten one of the lists")
        return self


def _checked_folder(path: Path) -> Path:
    if not path.is_dir() and (path.exists() or not path.resolve().parent.is_dir()):
        raise ValueError(f"{path}: give a folder, or a new one in a folder that exists")
    return path
