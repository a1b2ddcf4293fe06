"""Configuration of one twin: replicas per region, topology, network, faults.

Topologies. `mesh`: every region has a router, and they are peers. `region-local`: the same without
peers. `central:us`: one router, in region us, for all replicas and clients; requests of other
regions cross the wide area to it, its work crosses it again to far replicas, and every token passes
through it. On the bus all replicas then belong to that one region; only the network knows where
they are.

Faults are a schedule, so that a run with faults is repeatable too. Their times are seconds after
the first client may send; `until_s` may be infinite.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from agents.core.replica_config import AdapterSource
from agents.sim.profile_files import find_profile
from agents.sim.profiles import Profile
from mesh.core.model.settings import RouterSettings
from mesh.sim.offline.config import OfflineConfig
from mesh.sim.rtt import RttTable
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId

ROUTER = RouterId("r1")  # every region has this one
MODEL = ModelId("twin")
MESH, REGION_LOCAL, CENTRAL = "mesh", "region-local", "central"


class WorldInvalid(ValueError):
    """An invalid configuration; the message names the field and the valid values."""


@dataclass(frozen=True, slots=True)
class SimTopology:
    """One of the three kinds. `centre` is set for `central`."""

    kind: str
    centre: RegionId | None = None

    def router_of(self, region: RegionId) -> RegionId:
        """The region whose router serves a region's clients and replicas."""
        return self.centre or region

    def peers_of(self, region: RegionId, regions: Collection[RegionId]) -> tuple[RegionId, ...]:
        """The regions whose routers are peers of this one's."""
        if self.kind != MESH:
            return ()
        return tuple(other for other in regions if other != region)

    def check(self, regions: Collection[RegionId]) -> None:
        """Raises WorldInvalid if the centre is no region of this world."""
        if self.centre is not None and self.centre not in regions:
            raise WorldInvalid(f"topology: {self.centre} is none of {', '.join(regions)}")


def parse_topology(text: str) -> SimTopology:
    """The topology of that name. Raises WorldInvalid and names the known ones."""
    if text in (MESH, REGION_LOCAL):
        return SimTopology(text)
    kind, _, centre = text.partition(":")
    if kind != CENTRAL or not centre:
        raise WorldInvalid(f"topology {text!r}: use mesh, region-local or central:REGION")
    return SimTopology(CENTRAL, RegionId(centre))


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


class RunnerCrash(RegionFault):
    """A region's batch runners are killed; they come back empty, with a new epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing passes between two regions."""

    one: RegionId
    other: RegionId
    at_s: float
    until_s: float = inf


SimFault = ReplicaFault | RegionFault | Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class SimAdapters:
    """LoRA adapters that each replica's agent may load."""

    names: tuple[str, ...]
    most: int  # at one replica at once
    load_s: float

    def __post_init__(self) -> None:
        if not self.names or not self.most > 0 or not 0.0 <= self.load_s < inf:
            raise WorldInvalid("adapters: give names, how many at once, and seconds of a load")

    def sources(self) -> dict[ModelId, AdapterSource]:
        """As an agent's operator gives them."""
        return {ModelId(name): AdapterSource(name) for name in self.names}


LIVE_HEARTBEAT_S = 0.1  # the interval that the settings' limits are made for
ROUTERS_MAX = 16
AT_ONCE_S = 1e-9  # an interval: every change is published at the core's next tick


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """One twin. Raises ValueError at construction."""

    regions: Mapping[RegionId, Sequence[Profile | str]]  # one entry a replica: a profile
    rtt: RttTable = field(default_factory=RttTable)
    topology: str = "mesh"  # mesh, region-local, central:REGION
    routers: int = 1  # of each region that has any; its requests are spread over them
    settings: RouterSettings = field(default_factory=RouterSettings)
    seed: int = 0
    heartbeat_s: float = LIVE_HEARTBEAT_S  # the agents' default
    # Interval of digests, and of prefixes in proportion; 0: at once. None: from the settings.
    gossip_s: float | None = None
    state_at_once: bool = True  # as live: a change of state is published before the next heartbeat
    loss: float = 0.0  # share of heartbeats, digests and pings that never arrive
    decides_after_s: float = 0.0  # a router asks its engines this long before it places a request
    jitter_s: float = 0.0  # mean extra delay between regions, exponential
    token_error: float = 0.0  # routers' estimates of prompts: deviation of the logarithm
    batch_max_known: bool = False  # vLLM's metrics lack it; operators may give --batch-max
    outstanding_max: int = 256  # an agent's answers; its default for engines with a queue
    speeds_known: bool = True  # agents know their engines' speeds, of a run before
    kv_tokens: int | None = None  # replaces the profiles' own
    adapters: SimAdapters | None = None
    kv_events: bool = False  # agents follow their engines' KV events
    faults: tuple[SimFault, ...] = ()
    timeout_s: float = 600.0  # a client hangs up after this
    patience_s: float = inf  # a client hangs up after this if it has no first token
    warmup_s: float = 0.0  # requests that begin earlier are played and not reported
    until_s: float = inf  # the world ends; what is open then has failed
    offline: OfflineConfig | None = None  # batch jobs and who does them; None: nobody

    def __post_init__(self) -> None:
        if not self.regions or not any(self.regions.values()):
            raise WorldInvalid("regions: give at least one replica, as us=1")
        for name in ("heartbeat_s", "timeout_s", "patience_s", "until_s"):
            if not getattr(self, name) > 0:
                raise WorldInvalid(f"{name} must be more than 0")
        for name in ("gossip_s", "decides_after_s", "jitter_s", "token_error", "warmup_s"):
            if not 0 <= (getattr(self, name) or 0.0) < inf:
                raise WorldInvalid(f"{name} must be 0 or more")
        if not 0.0 <= self.loss < 1.0:
            raise WorldInvalid("loss is a share, from 0 to below 1")
        if not 1 <= self.routers <= ROUTERS_MAX:
            raise WorldInvalid(f"routers must be 1 to {ROUTERS_MAX}")
        if self.offline is None and any(isinstance(one, RunnerCrash) for one in self.faults):
            raise WorldInvalid("faults: without offline work there is no batch runner to crash")
        self.shape.check(self.regions)
        self.rtt.check(self.regions)
        self.profiles()

    @property
    def shape(self) -> SimTopology:
        return parse_topology(self.topology)

    def profiles(self) -> dict[RegionId, list[Profile]]:
        """The engines of each region. Raises ValueError for an unknown profile."""
        return {
            region: [one if isinstance(one, Profile) else find_profile(one) for one in fleet]
            for region, fleet in self.regions.items()
        }

    def router_settings(self) -> RouterSettings:
        """The settings, with the limits of lateness in proportion to the intervals."""
        known = self.settings
        digest_s = known.digest_s if self.gossip_s is None else max(self.gossip_s, AT_ONCE_S)
        heartbeat_factor = max(1.0, self.heartbeat_s / LIVE_HEARTBEAT_S)
        digest_factor = max(1.0, digest_s / known.digest_s)
        return replace(
            known,
            digest_s=digest_s,
            digest_rest_s=digest_s,  # fewer would change nothing but chance in the network
            trie_s=known.trie_s * digest_s / known.digest_s,
            heartbeat_late_s=known.heartbeat_late_s * heartbeat_factor,
            heartbeat_lost_s=known.heartbeat_lost_s * heartbeat_factor,
            handoff_s_max=known.handoff_s_max * heartbeat_factor,
            digest_late_s=known.digest_late_s * digest_factor,
            digest_lost_s=known.digest_lost_s * digest_factor,
        )
