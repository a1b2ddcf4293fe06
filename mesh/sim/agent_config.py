"""What the operator of a twin's agent has decided about it, and its engine's offline profile.

The coefficients of that are fitted to a profiling run of the engine's model of time, as
`mesh-agent profile` fits those of a real engine.
"""

from functools import cache

from agents.core.known_speed import LONG_TOKENS, SHORT_TOKENS, KnownSpeed, of_last_run
from agents.core.latency_predictor import BatchLoad, LatencyPredictor, mean_error
from agents.core.offline_profile import OfflineProfile
from agents.core.prefill_speed import PrefillLine
from agents.core.replica_config import ReplicaConfig
from agents.core.slo_profile import Measure
from agents.sim.profiles import Profile
from agents.sim.profiling_run import profiling_run
from mesh.sim.config import WorldConfig
from mesh.sim.engine import ReplicaEngine
from schemas.ids import RegionId, ReplicaId

ENGINE = "vllm"
# Ours, as no online objective is given: so many times an iteration that decodes BATCH sequences.
# `make study-offline` measures what online requests then notice.
BUDGET_FACTOR = 1.5
BATCH, CONTEXT_TOKENS = 16, 1000


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


def budget_s(engine: Profile) -> float:
    """The seconds of an iteration that its agent keeps to, unless a run says otherwise."""
    decode_s = engine.decode_s(BATCH, BATCH * CONTEXT_TOKENS)
    return BUDGET_FACTOR * decode_s


@cache
def offline_profile(engine: Profile, latency_budget_s: float, burst_s: float) -> OfflineProfile:
    """The profile of such an engine with that budget."""
    samples = profiling_run(engine)
    predictor = LatencyPredictor(samples)
    computing, waiting = map(tuple, predictor.coefficients)
    # An online request that comes waits for the prompts in that iteration.
    in_budget = predictor.longest_prefill(latency_budget_s, engine.batch_tokens, BatchLoad(), 0)
    return OfflineProfile(
        engine=ENGINE,
        model=engine.model or engine.name,
        measured_at=0,
        computing=computing,
        waiting=waiting,
        latency_budget_s=latency_budget_s,
        burst_s=burst_s,
        limits_s={Measure.TTFT_P99: 1.0},
        chunk_tokens=engine.batch_tokens,
        prefill_tokens_max=max(1, in_budget),
        predictor_error=mean_error(predictor, samples),
    )
