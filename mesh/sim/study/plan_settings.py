"""The settings of `mesh plan`: a scenario, a target to meet, and the price of a GPU."""

from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES
from mesh.replay.settings import CheckedRegion, Positive
from mesh.sim.config import CENTRAL, parse_topology
from mesh.sim.study.fleet import REPLICAS_MAX
from mesh.sim.study.scenario import OutFile, Scenario, ShareBelow1, TwinPolicy, TwinPushing
from mesh.sim.study.written import listed
from schemas.ids import RegionId
from schemas.settings import Option

SIMULATIONS_MAX = 10_000


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
