"""What the twin's agents know of their engines."""

import pytest

from agents.core.latency_predictor import BatchLoad
from agents.core.offline_profile import decode_profile, encode_profile
from agents.sim.profiles import PROFILES
from mesh.sim.agent_config import BATCH, CONTEXT_TOKENS, budget_s, offline_profile


@pytest.mark.parametrize("engine", PROFILES.values(), ids=PROFILES)
def test_every_engine_has_a_profile_that_a_file_may_hold(engine):
    profile = offline_profile(engine, budget_s(engine), 0.0)
    assert decode_profile(encode_profile(profile)) == profile
    assert profile.predictor_error < 0.1
    decoding = BatchLoad(0, BATCH * CONTEXT_TOKENS, 0, BATCH)
    assert profile.times.predict_s(decoding) < profile.latency_budget_s
    assert profile is offline_profile(engine, budget_s(engine), 0.0)


def test_prompts_under_computation_fit_the_budget():
    engine = PROFILES["h100-llama3.1-8b"]
    profile = offline_profile(engine, 0.02, 0.0)
    tokens = profile.prefill_tokens_max
    one = BatchLoad().with_prefill(tokens, 0)
    assert profile.times.predict_s(one) <= 0.02 < profile.times.predict_s(one.with_prefill(64, 0))
