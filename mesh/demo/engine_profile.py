"""The profile by which a demo's agents take offline work for their simulated engines.

`mesh-agent profile` searches the latency budget by test runs; a demo that starts in seconds has no
time for them. The model of time is known, so its coefficients are fitted to that, and the budget is
an iteration that computes a sixteenth of a full chunk beside a few decoding requests: far shorter
than those that online prompts cause themselves.
"""

import time
from functools import cache

from agents.core.engine_curves import DecodePoint, EngineCurves, PrefillPoint
from agents.core.latency_predictor import LatencyPredictor, Sample
from agents.core.offline_profile import OfflineProfile, encode_profile
from agents.core.slo_profile import Measure
from agents.sim.profile_files import find_profile
from agents.sim.profiles import Profile
from agents.sim.profiling_run import profiling_run
from agents.simserver.command import DEFAULT_PROFILE

BUDGET_CHUNK_PART = 16
DECODES, CONTEXT_TOKENS = 16, 1024  # of the iteration that is the budget
PROMPTS_TOKENS = 16, 256, 4096


@cache
def simulated_profile(name: str | None, time_scale: float) -> bytes:
    """The file, for an engine of that profile, or of its default one, which runs `time_scale` times
    faster. Raises agents.sim.profile_files.ProfileInvalid."""
    profile = find_profile(name or DEFAULT_PROFILE)
    samples = [Sample(load, seconds / time_scale) for load, seconds in profiling_run(profile)]
    chunk = max(1, profile.batch_tokens // BUDGET_CHUNK_PART)
    decodes = min(DECODES, profile.max_seqs - 1)
    context_tokens = min(CONTEXT_TOKENS, profile.kv_tokens // (decodes + 1))
    budget_s = profile.iteration_s(((chunk, chunk),), decodes, decodes * context_tokens)
    budget_s /= time_scale
    computing, waiting = LatencyPredictor(samples).coefficients
    return encode_profile(
        OfflineProfile(
            engine="vllm",
            model=profile.model or profile.name,
            measured_at=int(time.time()),
            computing=computing,
            waiting=waiting,
            latency_budget_s=budget_s,
            limits_s={Measure.TBT_P99: budget_s},
            chunk_tokens=profile.batch_tokens,
            prefill_tokens_max=chunk,
            curves=_curves(profile, time_scale),
        )
    )


def _curves(profile: Profile, time_scale: float) -> EngineCurves:
    """That engine's times to first token, by which its agent knows them, and between tokens."""
    sizes = sorted({min(tokens, profile.kv_tokens) for tokens in PROMPTS_TOKENS})
    decodes = min(DECODES, profile.max_seqs)
    context_tokens = decodes * CONTEXT_TOKENS
    tbt_s = profile.decode_s(decodes, context_tokens) / time_scale
    return EngineCurves(
        prefill=tuple(
            PrefillPoint(tokens=tokens, ttft_s=profile.alone_s(tokens) / time_scale)
            for tokens in sizes
        ),
        decode=(DecodePoint(requests=decodes, context_tokens=context_tokens, tbt_s=tbt_s),),
        chunk_tokens=profile.batch_tokens,
        kv_tokens=profile.kv_tokens,
        batch_max=profile.max_seqs,
    )
