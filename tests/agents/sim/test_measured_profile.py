"""An engine that is measured and played again takes as long as it did."""

from dataclasses import replace

import pytest

from agents.core.engine_curves import (
    CachedPoint,
    CalibratedEngine,
    DecodePoint,
    EngineCurves,
    PrefillPoint,
)
from agents.sim.engine import EngineSim
from agents.sim.events import PrefillFinished, SimRequest
from agents.sim.measured_profile import measured_profile
from agents.sim.profiles import PROFILES, LongPrefill, Profile, Publishing

PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LOADS = [(requests, context) for requests in (1, 2, 8, 32) for context in (64, 512, 2048)]
OF_GPUS = [name for name in PROFILES if not name.startswith("chapter")]


def first_token_s(profile: Profile, tokens: int) -> float:
    """Of the simulated engine itself."""
    engine = EngineSim(profile)
    engine.submit(SimRequest(1, tokens, 2, ()), 0.0)
    while engine.wake_at is not None:
        for event in engine.step(engine.wake_at).events:
            if isinstance(event, PrefillFinished):
                return event.at
    raise AssertionError(tokens)


def curves_of(profile: Profile) -> EngineCurves:
    return EngineCurves(
        prefill=tuple(
            PrefillPoint(tokens=tokens, ttft_s=first_token_s(profile, tokens)) for tokens in PROMPTS
        ),
        decode=tuple(
            DecodePoint(
                requests=requests,
                context_tokens=requests * context,
                tbt_s=profile.decode_s(requests, requests * context),
            )
            for requests, context in LOADS
        ),
        chunk_tokens=profile.batch_tokens,
        kv_tokens=profile.kv_tokens,
        batch_max=profile.max_seqs,
    )


def again(profile: Profile, kind: str = "vllm", **changed: object) -> Profile:
    curves = replace(curves_of(profile), **changed)
    measured = CalibratedEngine(engine=kind, model="a model", measured_at=1, curves=curves)
    return measured_profile(measured, "again")


@pytest.mark.parametrize("name", OF_GPUS)
def test_every_profile_is_found_again_from_its_times(name):
    profile = PROFILES[name]
    found = again(profile)
    for tokens in (*PROMPTS, 700, 3000, 6000):
        assert found.alone_s(tokens) == pytest.approx(first_token_s(profile, tokens), rel=0.1)
    for requests, context in (*LOADS, (4, 1000), (16, 300)):
        was_s = profile.decode_s(requests, requests * context)
        assert found.decode_s(requests, requests * context) == pytest.approx(was_s, rel=0.1)
    sizes = found.batch_tokens, found.kv_tokens, found.max_seqs, found.model
    assert sizes == (profile.batch_tokens, profile.kv_tokens, profile.max_seqs, "a model")


def test_the_seconds_of_a_prompt_alone_are_the_engines():
    profile = PROFILES["a6000-mistral-7b"]
    for tokens in (1, 500, 513, 5000):
        assert profile.alone_s(tokens) == pytest.approx(first_token_s(profile, tokens))


def test_sglang_publishes_after_a_chunk():
    profile = PROFILES["l4-llama3.1-8b"]
    assert again(profile).publishing is Publishing.SCHEDULED
    assert again(profile, "sglang").publishing is Publishing.COMPUTED


def test_noise_makes_no_prompt_cheaper_than_a_shorter_one():
    profile = PROFILES["l4-llama3.1-8b"]
    noisy = tuple(
        replace(point, ttft_s=point.ttft_s * (0.7 if at % 2 else 1.3))
        for at, point in enumerate(curves_of(profile).prefill)
    )
    found = again(profile, prefill=noisy)
    times = [found.alone_s(tokens) for tokens in range(1, profile.batch_tokens, 7)]
    assert times == sorted(times)
    assert found.token_s > 0


# What a CPU may be like: it cuts a text into tokens itself, and attention counts.
BUSY = Profile(
    name="busy",
    knots=((1, 0.004), (64, 0.020), (512, 0.150), (2048, 0.700)),
    token_s=0.0004,
    sequence_s=0.0001,
    context_s=1e-6,
    arrival_s=0.006,
    arrival_token_s=8e-6,
    batch_tokens=2048,
    kv_tokens=20_000,
    max_seqs=8,
    long_prefill=LongPrefill(0, 0.0, 0.0, 4e-8),
)
CACHED = [(size, more) for size in (256, 1024, 2048) for more in (1, 128, 512)]


def cached_s(profile: Profile, cached: int, computed: int) -> float:
    """Until the first token of a prompt that is cached but for its end."""
    tokens = cached + computed
    return profile.arriving_s(tokens) + profile.iteration_s(((computed, tokens),), 0, 0)


def cached_points(profile: Profile) -> tuple[CachedPoint, ...]:
    return tuple(
        CachedPoint(tokens=size + more, cached_tokens=size, ttft_s=cached_s(profile, size, more))
        for size, more in CACHED
    )


def test_cached_tokens_take_their_time_before_the_scheduler_and_in_attention():
    found = again(BUSY, cached=cached_points(BUSY))
    for size, more in (*CACHED, (700, 300), (3000, 40)):
        assert cached_s(found, size, more) == pytest.approx(cached_s(BUSY, size, more), rel=0.1)
    for tokens in (*PROMPTS, 700, 3000, 6000):
        assert found.alone_s(tokens) == pytest.approx(BUSY.alone_s(tokens), rel=0.1)
    assert found.arrival_s == pytest.approx(BUSY.arrival_s, rel=0.2)
    assert found.arrival_token_s == pytest.approx(BUSY.arrival_token_s, rel=0.3)


def test_without_cached_prompts_what_a_token_takes_to_arrive_counts_as_its_computation():
    found = again(BUSY)
    assert found.arrival_token_s == 0.0
    for tokens in PROMPTS:
        assert found.alone_s(tokens) == pytest.approx(BUSY.alone_s(tokens), rel=0.1)


def test_two_prompts_and_one_load_are_enough():
    curves = curves_of(PROFILES["l4-llama3.1-8b"])
    found = again(PROFILES["l4-llama3.1-8b"], prefill=curves.prefill[:2], decode=curves.decode[:1])
    assert found.decode_s(1, 64) == pytest.approx(curves.decode[0].tbt_s, rel=0.01)
