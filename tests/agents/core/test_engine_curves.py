"""The file of an engine's curves: what it says, and what is refused in it."""

import json

import pytest

from agents.core.engine_curves import (
    FILE_BYTES_MAX,
    POINTS_MAX,
    CurvesInvalid,
    decode_calibrated,
    encode_calibrated,
)

CURVES = {
    "prefill": [{"tokens": 16, "ttft_s": 0.02}, {"tokens": 512, "ttft_s": 0.1}],
    "decode": [{"requests": 1, "context_tokens": 32, "tbt_s": 0.01}],
    "chunk_tokens": 512,
    "kv_tokens": 10_000,
    "batch_max": 8,
}
FILE = {"v": 1, "engine": "vllm", "model": "m", "measured_at": 1, "curves": CURVES}
CACHED = {"tokens": 600, "cached_tokens": 512, "ttft_s": 0.03}
POINT = {"tokens": 600, "ttft_s": 0.2}


def data(**changed: object) -> bytes:
    return json.dumps({**FILE, "curves": {**CURVES, **changed}}).encode()


def test_a_file_says_the_same_after_it_was_read_and_written():
    found = decode_calibrated(data())
    assert decode_calibrated(encode_calibrated(found)) == found
    assert [point.tokens for point in found.curves.prefill] == [16, 512]


def test_a_file_may_lack_the_prompts_that_were_cached():
    assert decode_calibrated(data()).curves.cached == ()
    assert decode_calibrated(data(cached=[CACHED])).curves.cached[0].cached_tokens == 512


def test_what_else_a_profile_says_is_for_agents():
    whole = json.dumps({**FILE, "latency_budget_s": 0.1, "trials": []}).encode()
    assert decode_calibrated(whole) == decode_calibrated(data())


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b"{}", "engine"),
        (json.dumps({**FILE, "v": 2}).encode(), "v"),
        (json.dumps({name: FILE[name] for name in FILE if name != "curves"}).encode(), "curves"),
        (data(prefill=[POINT]), "curves.prefill"),
        (data(prefill=[POINT, POINT]), "should rise"),
        (data(prefill=[POINT, {"tokens": 700, "ttft_s": -1.0}]), "curves.prefill.1.ttft_s"),
        (data(prefill=[POINT, {"tokens": 700}]), "curves.prefill.1.ttft_s"),
        (data(decode=[]), "curves.decode"),
        (data(decode=[{**CURVES["decode"][0], "tbt_s": 1e9}]), "curves.decode.0.tbt_s"),
        (data(decode=[{**CURVES["decode"][0], "more": 1}]), "curves.decode.0.more"),
        (data(decode=CURVES["decode"] * (POINTS_MAX + 1)), "curves.decode"),
        (data(cached=[{**CACHED, "cached_tokens": 600}]), "curves.cached.0"),
        (data(cached=[{**CACHED, "cached_tokens": 0}]), "curves.cached.0.cached_tokens"),
        (data(cached=[CACHED] * (POINTS_MAX + 1)), "curves.cached"),
        (data(batch_max=0), "curves.batch_max"),
        (data(kv_tokens="many"), "curves.kv_tokens"),
        (b" " * (FILE_BYTES_MAX + 1), "bytes"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong(file, says):
    with pytest.raises(CurvesInvalid, match=says):
        decode_calibrated(file)


def test_a_file_may_have_as_many_points_as_the_limit():
    found = decode_calibrated(data(decode=CURVES["decode"] * POINTS_MAX))
    assert len(found.curves.decode) == POINTS_MAX
