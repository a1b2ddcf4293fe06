"""Offline work of one twin: its jobs, where lines may go, agents' profiles."""

from dataclasses import dataclass, field

from mesh.core.offline.settings import OfflineSettings
from mesh.sim.offline.jobs import JOBS_MAX, SimJob
from schemas.problems import checked_choice

MESH, REGION_LOCAL, NONE = SCOPES = ("mesh", "region-local", "none")
BUDGET_S_MAX, BURST_S_MAX = 3600.0, 60.0
RUNNERS_MAX = 8  # of a region


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """Raises ValueError at construction.

    `scope`: whether lines may go to other regions. `budget_s`: the longest iteration that agents
    accept for offline work; None: by their engines. `burst_s`: by how much iterations may exceed
    it, all together, where shorter ones have made up for that. Without `by_prefix` lines go
    out in the order of their file, whatever beginning they share.
    """

    jobs: tuple[SimJob, ...]
    scope: str = MESH
    runners: int = 1  # of each region
    settings: OfflineSettings = field(default_factory=OfflineSettings)
    budget_s: float | None = None
    burst_s: float = 0.0
    by_prefix: bool = True

    def __post_init__(self) -> None:
        checked_choice("offline scope", self.scope, SCOPES)
        if len(self.jobs) > JOBS_MAX:
            raise ValueError(f"{len(self.jobs)} jobs are more than {JOBS_MAX}")
        if not 1 <= self.runners <= RUNNERS_MAX:
            raise ValueError(f"runners must be 1 to {RUNNERS_MAX}")
        if not 0 <= self.burst_s <= BURST_S_MAX:
            raise ValueError(f"burst_s is 0 to {BURST_S_MAX} s")
        if self.budget_s is not None and not 0 < self.budget_s <= BUDGET_S_MAX:
            raise ValueError(f"the budget of an iteration is above 0 and at most {BUDGET_S_MAX} s")
