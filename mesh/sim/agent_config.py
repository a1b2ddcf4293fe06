"""What the operator of a twin's agent has decided about it."""

from agents.core.known_speed import LONG_TOKENS, SHORT_TOKENS, KnownSpeed, of_last_run
from agents.core.offline_profile import OfflineProfile
from agents.core.prefill_speed import PrefillLine
from agents.core.replica_config import ReplicaConfig
from agents.sim.profiles import Profile
from mesh.sim.config import WorldConfig
from mesh.sim.engine import ReplicaEngine
from mesh.sim.offline.profiles import budget_s, offline_profile
from schemas.ids import RegionId, ReplicaId

ENGINE = "vllm"


def agent_config(
    config: WorldConfig,
    region: RegionId,
    name: ReplicaId,
    epoch: int,
    engine: ReplicaEngine,
    has_offline: bool,
) -> ReplicaConfig:
    """`has_offline`: whether the world has offline work."""
    adapters = config.adapters
    known = (known_speed(ENGINE, engine.profile),)
    return ReplicaConfig(
        region=region,
        replica=name,
        epoch=epoch,
        engine=ENGINE,
        outstanding_max=config.outstanding_max,
        heartbeat_s=config.heartbeat_s,
        batch_max=engine.profile.max_seqs if config.batch_max_known else None,
        offline=_offline_profile(config, engine) if has_offline else None,
        speeds=known if config.speeds_known else (),
        adapters={} if adapters is None else adapters.sources(),
        adapters_max=engine.adapters.most,
        kv=config.parts.get(name),
    )


def _offline_profile(config: WorldConfig, engine: ReplicaEngine) -> OfflineProfile | None:
    offline, profile = config.offline, engine.profile
    if offline is None:
        return None
    return offline_profile(profile, offline.budget_s or budget_s(profile), offline.burst_s)


def known_speed(engine: str, profile: Profile) -> KnownSpeed:
    """Of an engine of that kind with that profile."""
    slope = (profile.alone_s(LONG_TOKENS) - profile.alone_s(SHORT_TOKENS)) / (
        LONG_TOKENS - SHORT_TOKENS
    )
    base_s = profile.alone_s(SHORT_TOKENS) - slope * SHORT_TOKENS
    return of_last_run(engine, (), PrefillLine(slope, base_s))
