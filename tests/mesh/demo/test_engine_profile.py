"""The profile that a demo gives to the agents of its simulated engines."""

import pytest

from agents.core.known_speed import LAST_RUN_ERROR, of_profile
from agents.core.offline_profile import decode_profile
from agents.sim.profile_files import find_profile
from mesh.demo.engine_profile import simulated_profile


@pytest.mark.parametrize(
    ("name", "scale", "base_s"), [("a100-mistral-7b", 1.0, 0.15), ("l4-llama3.1-8b", 10.0, 0.0024)]
)
def test_agents_know_when_first_tokens_come(name, scale, base_s):
    """Not only what iterations take: an A100's requests cost 150 ms before the scheduler."""
    engine, known = find_profile(name), of_profile(decode_profile(simulated_profile(name, scale)))
    prior = known.prior
    assert prior.error == LAST_RUN_ERROR
    assert prior.short_s == pytest.approx(engine.alone_s(256) / scale, rel=1e-3)
    assert prior.short_s + prior.more_s == pytest.approx(engine.alone_s(4096) / scale, rel=1e-3)
    assert prior.base_s == pytest.approx(base_s, rel=0.03)
