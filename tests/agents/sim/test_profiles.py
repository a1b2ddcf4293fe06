"""Each profile gives back the numbers of its source."""

import pytest

from agents.sim.engine import EngineSim
from agents.sim.events import PrefillFinished, SimRequest
from agents.sim.profiles import (
    A100_MISTRAL,
    A6000_MISTRAL,
    CHAPTER,
    H100_LLAMA,
    L4_LLAMA,
    PROFILES,
    Profile,
)


def ttft_s(profile: Profile, prompt_tokens: int) -> float:
    engine = EngineSim(profile)
    engine.submit(SimRequest(1, prompt_tokens, 2), now=0.0)
    while engine.wake_at is not None:
        for event in engine.step(engine.wake_at).events:
            if isinstance(event, PrefillFinished):
                return event.at
    raise AssertionError("no first token")


def outstanding_at_most(profile: Profile, tokens: int) -> int:
    engine = EngineSim(profile)
    for request_id in range(200):
        engine.submit(SimRequest(request_id, tokens - 100, 100), now=0.0)
    most = 0
    for _ in range(400):
        most = max(most, engine.stats(engine.wake_at).running)
        engine.step(engine.wake_at)
    return most


def test_l4_prefills_512_tokens_in_about_300_ms():
    assert ttft_s(L4_LLAMA, 512) == pytest.approx(0.300, rel=0.01)


def test_l4_decodes_in_45_ms_alone_and_66_ms_with_thirty():
    assert L4_LLAMA.decode_s(1, 500) == pytest.approx(0.045, rel=0.02)
    assert L4_LLAMA.decode_s(30, 15_000) == pytest.approx(0.066, rel=0.01)


def test_l4_has_20_to_50_requests_in_its_batch():
    assert 18 <= outstanding_at_most(L4_LLAMA, 1900) <= 21
    assert 45 <= outstanding_at_most(L4_LLAMA, 760) <= 53


@pytest.mark.parametrize("tokens", [64, 100, 1000, 4000, 8000])
def test_a100_is_the_line_of_gorgo_table_1(tokens):
    assert ttft_s(A100_MISTRAL, tokens) * 1e3 == pytest.approx(150.72 + 0.0938 * tokens, abs=0.001)


def test_a100_decodes_as_preble_measured():
    assert A100_MISTRAL.decode_s(1, 1000) * 1e3 == pytest.approx(
        (8.96 + 0.159 + 0.186) / 0.85, abs=0.01
    )


@pytest.mark.parametrize(
    ("tokens", "linear_ms"), [(1, 22.0), (191, 22.0), (384, 45.845), (512, 59.724)]
)
def test_a6000_is_prebles_regression(tokens, linear_ms):
    expected = (linear_ms + 1.86e-4 * tokens + 0.159) / 0.9
    assert A6000_MISTRAL.iteration_s(((tokens, tokens),), 0, 0) * 1e3 == pytest.approx(
        expected, abs=0.01
    )


def test_a6000_pays_for_long_context_in_prefill():
    e, s = 512, 4097
    expected = 0.10842571 * e + 4.209777 + 1.86e-4 * s + 0.159
    expected += 1.13e-3 * e + 1.75e-3 * s + 2.19e-6 * e * s
    assert A6000_MISTRAL.iteration_s(((e, s),), 0, 0) * 1e3 == pytest.approx(expected / 0.9)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_more_work_never_takes_less_time(profile):
    times = [profile.iteration_s(((tokens, tokens),), 0, 0) for tokens in range(1, 1200)]
    assert times == sorted(times)
    assert profile.decode_s(1, 1) <= profile.decode_s(2, 5000)


def test_h100_is_its_roofline():
    # 16.06 GB at 2.68 TB/s and a millisecond; 34,000 tokens/s of prefill above the ridge.
    assert H100_LLAMA.decode_s(1, 100) == pytest.approx(7.0e-3, rel=0.01)
    assert H100_LLAMA.decode_s(32, 32_000) == pytest.approx(8.6e-3, rel=0.01)
    assert 1 / H100_LLAMA.token_s == pytest.approx(33_900, rel=0.01)
    assert ttft_s(H100_LLAMA, 2000) == pytest.approx(0.062, rel=0.05)


def chapter_step_s(keys: list[range]) -> tuple[float, list[int]]:
    """When a batch of one-token requests with these prefixes is done, and what each hit."""
    engine = EngineSim(CHAPTER)
    for prefix in range(12):  # the cache holds all twelve
        engine.submit(SimRequest(prefix, 4112, 1, range(prefix * 1000, prefix * 1000 + 256)), 0.0)
    while engine.wake_at is not None:
        engine.step(engine.wake_at)
    start_s = 100.0
    for number, blocks in enumerate(keys, start=100):
        engine.submit(SimRequest(number, 4112, 1, blocks), start_s)
    hits: list[int] = []
    while engine.wake_at is not None:
        for event in engine.step(engine.wake_at).events:
            if isinstance(event, PrefillFinished):
                hits.append(event.cached_tokens)
                last_s = event.at
    return last_s - start_s, hits


@pytest.mark.parametrize("fill", [2, 5, 8])
@pytest.mark.parametrize("misses", [0, 1, 2])
def test_a_chapter_step_is_40_ms_and_3_ms_a_miss(fill, misses):
    # The first request runs alone in the engine's idle moment; the others share the next step.
    cached = [range(prefix * 1000, prefix * 1000 + 256) for prefix in range(fill)]
    missing = [range(50_000 + n * 1000, 50_000 + n * 1000 + 256) for n in range(misses)]
    took_s, hits = chapter_step_s([cached[0], *missing, *cached[misses + 1 :]])
    assert hits.count(0) == misses
    assert took_s * 1e3 == pytest.approx(2 * 40 + 3 * misses, abs=0.15)
