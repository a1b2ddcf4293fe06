"""Faults of a run and their times: a schedule, so that a run with faults is repeatable too.

Times are seconds after the first client may send. `until_s` may be infinite.
"""

from dataclasses import dataclass
from math import inf

from schemas.ids import RegionId, ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFault:
    replica: ReplicaId
    at_s: float
    until_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFault:
    region: RegionId
    at_s: float
    until_s: float = inf


class ReplicaCrash(ReplicaFault):
    """Engine and agent are gone without a message; they come back empty, with a new epoch."""


class EngineCrash(ReplicaFault):
    """The engine's process is gone and its agent is not; it comes back empty."""


class EngineHang(ReplicaFault):
    """No tokens any more, also in running answers; the metrics page still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlow(ReplicaFault):
    """Everything takes `factor` times as long."""

    factor: float


class RouterCrash(RegionFault):
    """A region's routers are gone, with their clients' connections; they come back empty."""


class LeaseStreamDown(RegionFault):
    """JetStream has stopped in a region; all else there goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing passes between two regions."""

    one: RegionId
    other: RegionId
    at_s: float
    until_s: float = inf


SimFault = ReplicaFault | RegionFault | Cut
