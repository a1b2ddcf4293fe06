"""What `mesh plan` is told: a scenario, a target to meet, and what a GPU costs."""

from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mesh.core.settings import RouterSettings
from mesh.replay.settings import Positive, Region
from mesh.sim.study.fleet import REPLICAS_MAX
from mesh.sim.study.scenario import OutFile, Policy, Pushing, Scenario
from mesh.sim.study.written import listed
from mesh.sim.topology import CENTRAL, parse_topology
from schemas.ids import RegionId

SIMULATIONS_MAX = 10_000


def checked_central(region: str) -> str:
    """The topology of a single router in that region, by region or already written out."""
    return str(parse_topology(f"{CENTRAL}:{region.removeprefix(f'{CENTRAL}:')}").centre)


class PlanSettings(Scenario):
    """One use of `mesh plan`."""

    ttft_p90: Positive
    throughput: Positive | None = None
    lost_max: Annotated[float, Field(ge=0, lt=1)] = 0.01
    regions: Annotated[tuple[Region, ...], BeforeValidator(listed), Field(min_length=1)] = (
        *("us", "eu", "ap"),
    )
    central: Annotated[str, AfterValidator(checked_central)] | None = None
    policy: Policy = RouterSettings().policy
    pushing: Pushing = "pending"
    gpu_hour_price: Positive | None = None
    gpus_per_replica: Annotated[int, Field(ge=1, le=1024)] = 1
    replicas_max: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 64
    simulations_max: Annotated[int, Field(ge=1, le=SIMULATIONS_MAX)] = 200
    out: OutFile | None = None

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
