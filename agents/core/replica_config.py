"""Which replica an agent serves, and what its operator decided about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.core.known_speed import KnownSpeed
from agents.core.offline_profile import OfflineProfile
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.kv_transfer import KvRole, KvTransfer, TransferKind
from schemas.residency import Label, Labels
from schemas.state import PrefillPrior


@dataclass(frozen=True, slots=True)
class KvPart:
    """The engine's part in pairs. `address`: where the other one finds it, host:port."""

    kind: TransferKind
    role: KvRole
    address: str | None = None

    @property
    def takes_whole(self) -> bool:
        """Whether it also answers requests alone."""
        return self.role is KvRole.DECODE and self.kind.decodes_whole

    def report(self, models: tuple[ModelId, ...]) -> KvTransfer:
        """For the heartbeat of an engine with these models."""
        return KvTransfer(
            kind=self.kind, role=self.role, models=models, whole=self.takes_whole,
            address=self.address,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an engine finds an adapter, and the model that it was made for; None: its first."""

    path: str
    base: ModelId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Which replica this is and what its operator decided about it.

    `epoch` must differ from that of every earlier start of this replica's agent.
    """

    region: RegionId
    replica: ReplicaId
    epoch: int
    engine: str  # kind
    outstanding_max: int
    heartbeat_s: float
    batch_max: int | None = None  # where the engine's metrics don't show it
    residency: tuple[Label, ...] | None = None  # labels that hold here; None: all of its region's
    counts_own: bool = False  # the engine shows no counts: it runs what this agent sent to it
    offline: OfflineProfile | None = None  # how it takes offline work; None: not at all
    offline_priority: int | None = None  # the engine's own, for offline requests
    speeds: tuple[KnownSpeed, ...] = ()  # of its engine, perhaps; the first that fits it counts
    probes_speed: bool = False  # measure it while the engine is idle where none of these fits
    adapters: Mapping[ModelId, AdapterSource] = field(default_factory=dict)  # that it may load
    load_s: float | None = None  # patience before the engine's first answer; None: the default
    adapters_max: int = 0  # adapters that its engine may have at once
    kv: KvPart | None = None  # in pairs; None: it answers alone

    def fits_residency(self, requested: Labels) -> bool:
        """Whether one of these labels holds here. Routers check it first, but a label may have
        been removed since. Without labels of its own the agent has all of its region's, which only
        mesh.toml lists."""
        labels = self.residency
        return not requested or labels is None or any(label in requested for label in labels)

    def computes(self, stage: KvRole | None) -> bool:
        """Whether its engine computes that stage of requests; None: all of them."""
        if self.kv is None:
            return stage is None
        return self.kv.takes_whole if stage is None else stage is self.kv.role

    def prior(self, models: tuple[ModelId, ...]) -> PrefillPrior | None:
        """By what is known of an engine of this kind with these models."""
        fitting = (speed.prior for speed in self.speeds if speed.is_of(self.engine, models))
        return next(fitting, None) if models else None
