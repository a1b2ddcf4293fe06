"""What the twin's agents know of their engines: profiles for offline work, made in virtual time.

The coefficients are fitted to a profiling run of the engine's model of time, as `mesh-agent
profile` fits those of a real engine.
"""

from functools import cache

from agents.core.latency_predictor import BatchLoad, LatencyPredictor, mean_error
from agents.core.offline_profile import OfflineProfile
from agents.core.slo_profile import Measure
from agents.sim.profiles import Profile
from agents.sim.profiling_run import profiling_run

# Ours, as no online objective is given: so many times an iteration that decodes BATCH sequences.
# `make study-offline` measures what online requests then notice.
BUDGET_FACTOR = 1.5
BATCH, CONTEXT_TOKENS = 16, 1000


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
        engine="vllm",
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
