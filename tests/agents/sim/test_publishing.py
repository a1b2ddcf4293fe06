"""When a prompt's blocks can be found by other prompts: as in vLLM V1, and as in SGLang."""

from dataclasses import replace

import pytest

from agents.sim.engine import EngineSim
from agents.sim.events import PrefillFinished, SimRequest
from agents.sim.profiles import PROFILES, Profile, Publishing
from tests.agents.sim.test_engine import PLAIN, drain, of, request

WAITING = replace(PLAIN, arrival_s=0.5)  # requests of one moment are scheduled together
VLLM = replace(WAITING, publishing=Publishing.SCHEDULED)
SGLANG = replace(WAITING, publishing=Publishing.COMPUTED)


def cached(profile: Profile, *requests: SimRequest, at: tuple[float, ...] = ()) -> dict[int, int]:
    """Each request's cached tokens, in the order in which their first tokens came."""
    engine = EngineSim(profile)
    for number, one in enumerate(requests):
        engine.submit(one, now=at[number] if at else 0.0)
    ends = of(PrefillFinished, drain(engine))
    return {number: end.cached_tokens for number, end in ends.items()}


@pytest.mark.parametrize(("prompt", "hit"), [(64, 48), (70, 64), (80, 64), (640, 624)])
def test_equal_prompts_of_one_step_are_computed_once_on_vllm(prompt, hit):
    two = [request(number, prompt, 1, family=5) for number in (1, 2)]
    assert cached(VLLM, *two) == {1: 0, 2: hit}


def test_equal_prompts_of_one_step_are_computed_twice_on_sglang():
    two = [request(number, 64, 1, family=5) for number in (1, 2)]
    assert cached(SGLANG, *two) == {1: 0, 2: 0}


def test_on_sglang_another_prompt_goes_before_a_duplicate():
    three = [request(1, 96, 1, family=5), request(2, 96, 1, family=5), request(3, 96, 1, family=6)]
    assert list(cached(SGLANG, *three).items()) == [(1, 0), (3, 0), (2, 80)]
    assert list(cached(VLLM, *three).items()) == [(1, 0), (2, 80), (3, 0)]


@pytest.mark.parametrize(("profile", "hit"), [(VLLM, 624), (SGLANG, 480)])
def test_a_prompt_that_is_half_computed_is_found_as_far_as_it_is_published(profile, hit):
    two = [request(number, 640, 1, family=5) for number in (1, 2)]
    # Request 2 joins when request 1's last chunk leaves room in the budget: four chunks of 164
    # tokens cover 640, and the third ends in the 31st block.
    assert cached(profile, *two, at=(0.0, 0.1)) == {1: 0, 2: hit}


def test_a_chunk_that_is_aborted_stays_in_the_cache():
    engine = EngineSim(PLAIN)
    engine.submit(request(1, 160, 1, family=5), now=0.0)
    assert engine.abort(1, 0.5)
    assert (engine.cache.used, engine.cache.idle) == (0, 10)
    engine.submit(request(2, 160, 1, family=5), now=0.6)
    assert of(PrefillFinished, drain(engine))[2].cached_tokens == 144


def test_every_gpu_has_a_profile_of_each_engine():
    named = {name: profile.publishing for name, profile in PROFILES.items()}
    for name in ("l4-llama3.1-8b", "a100-mistral-7b", "a6000-mistral-7b", "h100-llama3.1-8b"):
        assert named[name] is Publishing.SCHEDULED
        assert named[f"{name}-sglang"] is Publishing.COMPUTED
