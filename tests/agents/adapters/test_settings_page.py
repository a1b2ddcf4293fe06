"""Engines' settings: recorded ones, and whatever else may come."""

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.adapters.engine_kinds import KINDS, batch_size, read_object

RECORDED = Path(__file__).parents[2] / "data" / "server_metrics"
PER_RANK = "effective_max_running_requests_per_dp"


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("llamacpp", "llamacpp_props_real.json", 4),
        ("sglang", "sglang_server_info_condensed.json", 128),
        ("sglang", "sglang_0.5.23_server_info_condensed.json", 4),
        ("llamacpp", "sglang_server_info_condensed.json", None),
        ("vllm", "llamacpp_props_real.json", None),
        ("openai", "llamacpp_props_real.json", None),
    ],
)
def test_recorded_settings(kind, name, expected):
    assert KINDS[kind].batch_max((RECORDED / name).read_bytes()) == expected


def test_the_settings_of_sglang_say_whether_it_reports_cached_tokens():
    recorded = (RECORDED / "sglang_0.5.23_server_info_condensed.json").read_bytes()
    assert KINDS["sglang"].reports_cached(recorded)
    assert KINDS["sglang"].version(recorded) == "0.5.23"
    assert not KINDS["vllm"].reports_cached(recorded)
    assert not KINDS["sglang"].reports_cached(b'{"enable_cache_report":1}')


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"internal_states": [{PER_RANK: 16}, {PER_RANK: 24}], "max_running_requests": 50}, 40),
        ({"internal_states": [{PER_RANK: 16}, {}], "max_running_requests": 50}, 50),
        ({"internal_states": [{PER_RANK: 16}, 7], "max_running_requests": 50}, 50),
        ({"internal_states": [], "max_running_requests": 50}, 50),
        ({"internal_states": 7, "max_running_requests": None}, None),
        ({"internal_states": [{PER_RANK: 65_536}] * 2}, None),
        ({"internal_states": [{PER_RANK: -1}]}, None),
    ],
)
def test_ranks_of_sglang_add_up(fields, expected):
    assert KINDS["sglang"].batch_max(orjson.dumps(fields)) == expected


@pytest.mark.parametrize(
    "value", [None, True, 0, -4, 65_537, 2**63, 1e9, 4.0, "4", [4], {"slots": 4}]
)
def test_what_is_no_size_of_a_batch(value):
    assert batch_size(value) is None
    assert KINDS["llamacpp"].batch_max(orjson.dumps({"total_slots": value})) is None


@pytest.mark.parametrize("page", [b"", b"<html>", b"[]", b"7", b"null", b"{", b"[" * 5000])
def test_what_is_no_object_has_no_fields(page):
    assert read_object(page) == {}


@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200))
def test_any_page_gives_a_batch_size_or_none(kind, page):
    found = KINDS[kind].batch_max(page)
    assert found is None or 0 < found <= 65_536
