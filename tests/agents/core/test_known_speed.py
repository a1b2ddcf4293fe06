"""What an agent knows of its engine's speed from before: of its last run, or by a profile."""

import pytest

from agents.core.engine_curves import PrefillPoint
from agents.core.known_speed import (
    ERROR_MAX,
    PROBE_ERROR,
    PROBE_TOKENS_MAX,
    PROFILE_ERROR,
    SPEED_BYTES_MAX,
    FirstToken,
    KnownSpeed,
    _measured_s,
    decode_speed,
    encode_speed,
    of_last_run,
    of_probe,
    of_profile,
)
from agents.core.offline_profile import OfflineProfile
from agents.core.prefill_speed import PrefillLine
from agents.core.slo_profile import Measure
from schemas.wire import WireError
from tests.agents.core.bench import MODEL, Bench

LINE = PrefillLine(s_per_token=0.0005, base_s=0.03)
KNOWN = of_last_run("vllm", ("m",), LINE)


def test_a_line_comes_back_from_its_prior():
    again = decode_speed(encode_speed(KNOWN))
    assert again == KNOWN
    assert again.prior.s_per_token == pytest.approx(0.0005, rel=1e-3)
    assert again.prior.base_s == pytest.approx(0.03, rel=1e-2)


def test_the_largest_file_can_be_read_again():
    names = tuple(f"{number:03}" + "m" * 60 for number in range(200))
    assert len(encode_speed(of_last_run("vllm", names, LINE))) <= SPEED_BYTES_MAX


@pytest.mark.parametrize(
    ("engine", "models", "fits"),
    [("vllm", ("m",), True), ("sglang", ("m",), False), ("vllm", ("n",), False)],
)
def test_it_is_of_one_engine_and_its_models(engine, models, fits):
    assert KNOWN.is_of(engine, models) is fits


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", encode_speed(KNOWN).replace(b"0.2", b"-1"), b'{"v":2}']
)
def test_what_is_no_speed_is_an_error(data):
    with pytest.raises(WireError):
        decode_speed(data)


def test_a_profile_predicts_prompts_in_chunks():
    function = (0.01, 0.0001, 0.0, 0.0, 0.0, 0.0, 0.0)  # 10 ms an iteration, 0.1 ms a token
    profile = OfflineProfile(
        engine="vllm",
        model="m",
        measured_at=0,
        computing=function,
        waiting=(0.0,) * 7,
        latency_budget_s=0.1,
        limits_s={next(iter(Measure)): 1.0},
        chunk_tokens=512,
        prefill_tokens_max=512,
    )
    known = of_profile(profile)
    assert known.is_of("vllm", ("m",))
    assert known.prior.error == PROFILE_ERROR
    assert known.prior.short_s == pytest.approx(0.01 + 0.0256)
    assert known.prior.more_s == pytest.approx(7 * 0.01 + 0.384)


def test_between_and_beyond_what_was_measured_it_is_a_line():
    points = [
        PrefillPoint(tokens=tokens, ttft_s=seconds)
        for tokens, seconds in ((10, 0.1), (110, 0.1), (210, 0.3))
    ]
    measured = {tokens: _measured_s(points, tokens) for tokens in (10, 60, 160, 1210)}
    assert measured == pytest.approx({10: 0.1, 60: 0.1, 160: 0.2, 1210: 2.3})


@pytest.mark.parametrize(
    ("short", "long", "s_per_token"),
    [
        ((0.1, 32), (0.3, 2032), 1e-4),
        ((0.1, 32), (0.1 + 2e-4, 2032), 1e-7),
        ((0.1, 32), (0.1 + 1e-4, 2032), None),  # too quick for any engine
        ((0.1, 32), (200.1, 2032), 0.1),
        ((0.1, 32), (210.0, 2032), None),  # too slow
        ((0.3, 32), (0.1, 2032), None),
        ((0.1, 32), (0.1, 2032), None),
        ((0.1, 32), (0.2, 64), 0.1 / 32),
        ((0.1, 32), (0.2, 63), None),  # too alike in length
        ((0.1, 32), (0.2, 32), None),
        ((0.1, 0), (0.2, 100), None),
        ((0.1, 32), (1.1, PROBE_TOKENS_MAX + 32), 1e-6),
        ((0.1, 32), (1.1, PROBE_TOKENS_MAX + 33), None),
    ],
)
def test_a_probe_finds_a_line_that_an_engine_may_have_or_none(short, long, s_per_token):
    later = [FirstToken(2 * long[0], long[1]), FirstToken(*long)]
    known = of_probe("vllm", ("m",), [FirstToken(9.0, 32), FirstToken(*short)], later)
    if s_per_token is None:
        assert known is None
        return
    assert known.is_of("vllm", ("m",))
    assert known.prior.s_per_token == pytest.approx(s_per_token, rel=0.01)
    assert PROBE_ERROR <= known.prior.error <= ERROR_MAX
    assert decode_speed(encode_speed(known)) == known


def test_an_endless_line_is_bounded():
    prior = of_last_run("vllm", (), PrefillLine(1e9, 1e9)).prior
    assert (prior.short_s, prior.more_s) == (3600.0, 3600.0)
    assert isinstance(KNOWN, KnownSpeed)


def test_routers_get_it_once_a_second_while_the_engine_serves_these_models():
    other, known = of_last_run("vllm", ("other",), LINE), of_last_run("vllm", (MODEL,), LINE)
    bench = Bench(speeds=(other, known))
    bench.tick(1.0)
    assert {beat.prefill_prior for beat in bench.beats} == {None}, "its models are not known yet"
    bench.read()
    bench.beats.clear()
    bench.tick(3.0)
    assert [beat.prefill_prior for beat in bench.beats].count(known.prior) == 3
    bench.read(models=("another",))
    bench.beats.clear()
    bench.tick(3.0)
    assert {beat.prefill_prior for beat in bench.beats} == {None}
