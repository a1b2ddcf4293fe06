"""What a twin is told: where replicas stand, how far regions are apart, what goes wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from agents.sim.profile import Profile
from agents.sim.profiles import PROFILES
from mesh.core.settings import RouterSettings
from mesh.sim.faults import Fault
from mesh.sim.rtt import RttTable
from mesh.sim.topology import Topology, parse_topology
from schemas.ids import RegionId

LIVE_HEARTBEAT_S = 0.1  # what the settings' limits were made for
ROUTERS_MAX = 16
AT_ONCE_S = 1e-9  # a cadence: every change is told when the core next looks


class WorldInvalid(ValueError):
    """A world that can't be; the message names the field and says what fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """One twin. Raises WorldInvalid, TopologyInvalid or RttInvalid at construction."""

    regions: Mapping[RegionId, Sequence[Profile | str]]  # one entry a replica: a profile
    rtt: RttTable = field(default_factory=RttTable)
    topology: str = "mesh"  # mesh, region-local, central:REGION
    routers: int = 1  # of each region that has any; clients come to them in turns
    settings: RouterSettings = field(default_factory=RouterSettings)
    seed: int = 0
    heartbeat_s: float = LIVE_HEARTBEAT_S  # the agents' default
    reading_s: float = 0.05  # the agents' default; an idle engine is looked at half as often
    # Digest cadence, and that of prefixes in proportion; 0: at once. None: as the settings say.
    gossip_s: float | None = None
    news_at_once: bool = True  # a changed verdict does not wait for its beat, as it does live
    loss: float = 0.0  # share of heartbeats, digests and pings that never arrive
    jitter_s: float = 0.0  # mean extra delay between regions, exponential
    token_error: float = 0.0  # routers' estimates of prompts: deviation of the logarithm
    batch_max_told: bool = False  # vLLM's metrics don't say it; operators may (--batch-max)
    outstanding_max: int = 256  # an agent's answers; its default for engines with a queue
    kv_tokens: int | None = None  # replaces the profiles' own
    faults: tuple[Fault, ...] = ()
    timeout_s: float = 600.0  # a client hangs up after this
    warmup_s: float = 0.0  # requests that begin earlier are played and not reported
    until_s: float = inf  # the world ends; what is open then has failed

    def __post_init__(self) -> None:
        if not self.regions or not any(self.regions.values()):
            raise WorldInvalid("regions: give at least one replica, as us=1")
        for name in ("heartbeat_s", "reading_s", "timeout_s", "until_s"):
            if not getattr(self, name) > 0:
                raise WorldInvalid(f"{name} must be more than 0")
        for name in ("gossip_s", "jitter_s", "token_error", "warmup_s"):
            if not 0 <= (getattr(self, name) or 0.0) < inf:
                raise WorldInvalid(f"{name} must be 0 or more")
        if not 0.0 <= self.loss < 1.0:
            raise WorldInvalid("loss is a share, from 0 to below 1")
        if not 1 <= self.routers <= ROUTERS_MAX:
            raise WorldInvalid(f"routers must be 1 to {ROUTERS_MAX}")
        self.shape.check(self.regions)
        self.rtt.check(self.regions)
        self.profiles()

    @property
    def shape(self) -> Topology:
        """The topology, read."""
        return parse_topology(self.topology)

    def profiles(self) -> dict[RegionId, list[Profile]]:
        """The engines of each region. Raises WorldInvalid for a profile that nobody knows."""
        return {
            region: [_profile(named) for named in fleet] for region, fleet in self.regions.items()
        }

    def router_settings(self) -> RouterSettings:
        """The settings, with what counts as late in proportion to the cadences.

        A router that calls a replica late after 0.3 s can't hear beats that are 1 s apart.
        """
        known = self.settings
        digest_s = known.digest_s if self.gossip_s is None else max(self.gossip_s, AT_ONCE_S)
        beats = max(1.0, self.heartbeat_s / LIVE_HEARTBEAT_S)
        digests = max(1.0, digest_s / known.digest_s)
        return replace(
            known,
            digest_s=digest_s,
            trie_s=known.trie_s * digest_s / known.digest_s,
            heartbeat_late_s=known.heartbeat_late_s * beats,
            heartbeat_lost_s=known.heartbeat_lost_s * beats,
            handoff_s_max=known.handoff_s_max * beats,
            digest_late_s=known.digest_late_s * digests,
            digest_lost_s=known.digest_lost_s * digests,
        )


def _profile(named: Profile | str) -> Profile:
    if isinstance(named, Profile):
        return named
    if named not in PROFILES:
        raise WorldInvalid(f"unknown profile {named!r}; one of {', '.join(PROFILES)}")
    return PROFILES[named]
