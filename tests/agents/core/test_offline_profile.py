"""The profile file: what is written is read back; every bad value is named."""

import orjson
import pytest

from agents.core.latency_predictor import BadCoefficients, BatchLoad, IterationTimes
from agents.core.offline_profile import (
    PROFILE_BYTES_MAX,
    TRIALS_MAX,
    OfflineProfile,
    ProfileInvalid,
    ProfileTrial,
    decode_profile,
    encode_profile,
)
from agents.core.slo_profile import Measure
from tests.agents.core.test_latency_predictor import TRAINED
from tests.support.profiled import coefficients_of

TRIAL = ProfileTrial(budget_s=0.02, latency_s={Measure.TBT_P99: 0.03}, kept=True)
PROFILE = OfflineProfile(
    engine="vllm",
    model="org/llama",
    measured_at=1_700_000_000,
    **coefficients_of(TRAINED),
    latency_budget_s=0.025,
    limits_s={Measure.TBT_P99: 0.03, Measure.TTFT_MEAN: 0.4},
    chunk_tokens=512,
    prefill_tokens_max=2048,
    trials=(TRIAL,),
)


def test_what_is_written_is_read_back() -> None:
    data = encode_profile(PROFILE)
    assert decode_profile(data) == PROFILE
    assert b'"p99 TBT": 0.03' in data
    assert b"curves" not in data  # agents of 0.1.0 know no such field


def test_it_predicts_as_the_predictor_that_it_was_made_from() -> None:
    times = decode_profile(encode_profile(PROFILE)).times
    for load in (BatchLoad().with_decode(900), BatchLoad().with_prefill(300, 100).with_decode(9)):
        assert times.predict_s(load) == TRAINED.predict_s(load)
        assert times.longest_prefill(0.03, 512, load, 0) == TRAINED.longest_prefill(
            0.03, 512, load, 0
        )


ROW = orjson.loads(encode_profile(PROFILE))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v": 2}, "v: "),
        ({"latency_budget_s": 0}, "latency_budget_s: "),
        ({"latency_budget_s": "fast"}, "latency_budget_s: "),
        ({"computing": [1.0]}, "computing: "),
        ({"waiting": [-1.0, *[0.0] * 6]}, "waiting.0: "),
        ({"waiting": [0.0] * 7, "computing": [0.0] * 7}, "computing, waiting: "),
        ({"limits_s": {}}, "limits_s: "),
        ({"limits_s": {"p95 TBT": 1.0}}, "limits_s.p95 TBT"),
        ({"kv_share": 1.5}, "kv_share: "),
        ({"chunk_tokens": 0}, "chunk_tokens: "),
        ({"burst_s": -1.0}, "burst_s: "),
        ({"queued_requests_max": 4097}, "queued_requests_max: "),
        ({"trials": [ROW["trials"][0]] * (TRIALS_MAX + 1)}, "trials: "),
        ({"surprise": 1}, "surprise: "),
    ],
)
def test_a_bad_value_is_named(change, said) -> None:
    with pytest.raises(ProfileInvalid) as problem:
        decode_profile(orjson.dumps({**ROW, **change}))
    assert str(problem.value).startswith(said)


@pytest.mark.parametrize("field", ["engine", "computing", "latency_budget_s", "limits_s"])
def test_a_missing_field_is_named(field) -> None:
    row = {name: value for name, value in ROW.items() if name != field}
    with pytest.raises(ProfileInvalid, match=field):
        decode_profile(orjson.dumps(row))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b" " * (PROFILE_BYTES_MAX + 1)])
def test_what_is_no_profile(data) -> None:
    with pytest.raises(ProfileInvalid):
        decode_profile(data)


@pytest.mark.parametrize("row", [[0.1], [float("nan"), *[0.0] * 6], [-0.1, *[0.0] * 6]])
def test_coefficients_that_no_fit_gives(row) -> None:
    with pytest.raises(BadCoefficients):
        IterationTimes(row, [0.1] * 7)
