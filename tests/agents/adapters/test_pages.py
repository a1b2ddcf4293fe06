"""Engines' metrics pages: recorded ones, and what versions and ranks do to them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.adapters.engine_kinds import (
    MetricsPage,
    read_llamacpp,
    read_sglang,
    read_vllm,
)
from agents.core.events import NOTHING_KNOWN, EngineReading

RECORDED = Path(__file__).parents[2] / "data" / "server_metrics"


def recorded(name: str) -> MetricsPage:
    return MetricsPage((RECORDED / name).read_text())


@pytest.mark.parametrize(
    ("read", "name", "expected"),
    [
        (
            read_vllm,
            "vllm_datadog_opt125m_excerpt.txt",
            EngineReading(
                waiting=0,
                running=0,
                kv_used_ratio=0.0,
                kv_capacity_tokens=16 * 7281,
                prefix_hit_ratio=64 / 117,
                progress=(5.0, 7.0, 0.0),
                is_asleep=False,
            ),
        ),
        (
            read_vllm,
            "vllm_v1_openshift_idle_excerpt.txt",
            EngineReading(waiting=0, running=0, kv_used_ratio=0.0, progress=(0.0, 0.0, 0.0)),
        ),
        (
            read_vllm,
            "vllm_v1_prefix_counters_4090_excerpt.txt",
            EngineReading(prefix_hit_ratio=202736 / 230400),
        ),
        (
            read_vllm,
            "vllm_0.24_h100_excerpt.txt",
            EngineReading(
                waiting=0,
                running=0,
                kv_used_ratio=0.0,
                kv_capacity_tokens=16 * 39297,
                prefix_hit_ratio=0.0,
                progress=(28.0, 2.0, 2.0, 0.0),
                is_asleep=False,
            ),
        ),
        (
            read_vllm,
            "vllm_0.33_from_source.txt",
            EngineReading(
                waiting=2,
                running=3,
                kv_used_ratio=0.125,
                kv_capacity_tokens=155_648,
                prefix_hit_ratio=0.25,
                progress=(4096.0, 640.0, 300.0, 0.125),
                is_asleep=False,
            ),
        ),
        (
            read_sglang,
            "sglang_docs_production_metrics.txt",
            EngineReading(
                waiting=2826,
                running=162,
                kv_used_ratio=0.28,
                prefix_hit_ratio=0.007507552643049313,
                progress=(8128902.0, 7557572.0, 123859.0),
            ),
        ),
        (
            read_sglang,
            "sglang_0.5.10_datadog_condensed.txt",
            EngineReading(
                waiting=0,
                running=0,
                kv_used_ratio=0.25,
                kv_capacity_tokens=430839,
                prefix_hit_ratio=0.2,
                progress=(5.0, 37.0),
            ),
        ),
        (
            read_sglang,
            "sglang_0.5.23_cpu_condensed.txt",
            EngineReading(
                waiting=3,
                running=4,
                kv_used_ratio=0.06,
                kv_capacity_tokens=16_384,
                prefix_hit_ratio=0.0,
                progress=(272.0, 98.0, 976.0),
            ),
        ),
        (
            read_llamacpp,
            "llamacpp_metrics_real.txt",
            EngineReading(waiting=0, running=0, progress=(33065.0, 7801.0, 7831.0)),
        ),
    ],
)
def test_recorded_pages(read, name, expected) -> None:
    assert read(recorded(name)) == expected


@pytest.mark.parametrize(
    ("awake", "weights_offloaded", "discard_all", "is_asleep"),
    [(1, 0, 0, False), (0, 1, 0, True), (0, 0, 1, True), (0, 0, 0, True)],
)
def test_vllm_says_whether_it_sleeps(awake, weights_offloaded, discard_all, is_asleep) -> None:
    text = (RECORDED / "vllm_0.24_h100_excerpt.txt").read_text()
    states = {
        "awake": awake, "weights_offloaded": weights_offloaded, "discard_all": discard_all,
    }  # fmt: skip
    kept = [line for line in text.splitlines() if not line.startswith("vllm:engine_sleep_state{")]
    kept += [
        f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{name}"}} {value}.0'
        for name, value in states.items()
    ]
    assert read_vllm(MetricsPage("\n".join(kept))).is_asleep is is_asleep


@pytest.mark.parametrize("read", [read_vllm, read_sglang, read_llamacpp])
@pytest.mark.parametrize("text", ["", "\n", "# HELP x y\n", "process_cpu_seconds_total 1.0\n"])
def test_a_page_without_the_series_gives_none_rather_than_zero(read, text) -> None:
    assert read(MetricsPage(text)) == NOTHING_KNOWN


def test_ranks_are_summed_and_shares_are_averaged() -> None:
    page = MetricsPage(
        'vllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:num_requests_waiting{engine="1"} 2.0\n'
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.6\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="20"} 1.0\n'
    )
    assert read_vllm(page) == EngineReading(
        waiting=3,
        running=3,
        kv_used_ratio=pytest.approx(0.4),
        kv_capacity_tokens=480,
        progress=(pytest.approx(0.8),),
    )


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("vllm:gpu_cache_usage_perc 0.5\n", 0.5),
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.7\n", 0.7),
        ("vllm:kv_cache_usage_perc 1.0000001\n", 1.0),
        ("vllm:kv_cache_usage_perc NaN\n", None),
    ],
)
def test_both_names_of_the_kv_gauge(text, ratio) -> None:
    assert read_vllm(MetricsPage(text)).kv_used_ratio == ratio


def test_capacity_is_unknown_until_every_engine_has_measured_its_memory() -> None:
    page = MetricsPage(
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    )
    assert read_vllm(page).kv_capacity_tokens is None


def test_llamacpp_with_its_older_and_newer_series() -> None:
    page = MetricsPage(
        "llamacpp:prompt_tokens_total 75\nllamacpp:prompt_tokens_cached_total 25\n"
        "llamacpp:kv_cache_usage_ratio 0.5\nllamacpp:requests_processing 2\n"
        "llamacpp:requests_deferred 1"
    )
    expected = EngineReading(
        waiting=1, running=2, kv_used_ratio=0.5, prefix_hit_ratio=0.25, progress=(75.0,)
    )
    assert read_llamacpp(page) == expected


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("a 1", "", 1.0),
        ("a{} 1", "", 1.0),
        ("a\t1.5e3", "", 1500.0),
        ("a 1 1700000000", "", 1.0),
        ('a{m="x} 9"} 2', 'm="x} 9"', 2.0),
        (r'a{m="q\"} 9"} 2', r'm="q\"} 9"', 2.0),
        ('a{m="x"} 2 # {trace_id="y"} 0.5', 'm="x"', 2.0),
    ],
)
def test_lines(line, labels, value) -> None:
    (series,) = MetricsPage(line).series("a")
    assert (series.labels_text, series.value) == (labels, value)


@pytest.mark.parametrize(
    "line", ["ab 1", "a", "a{", 'a{m="x} 1', "a x", "a +Inf", "# a 1", "b a 1"]
)
def test_what_is_no_line_of_that_name(line) -> None:
    assert MetricsPage(line).series("a") == []


@given(st.text(max_size=300))
def test_any_page_is_survived(text) -> None:
    read_vllm(MetricsPage("vllm:num_requests_waiting" + text))
    read_vllm(MetricsPage("vllm:cache_config_info{" + text))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("vllm:num_requests_waiting 1e308", NOTHING_KNOWN),  # no integer of a heartbeat
        ("vllm:num_requests_waiting 1e308\nvllm:num_requests_waiting 1e308", NOTHING_KNOWN),
        (
            f'vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="1"}} 1',
            NOTHING_KNOWN,  # Python reads no such number
        ),
        (
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="999999999999"} 1\n' * 4096,
            NOTHING_KNOWN,
        ),
    ],
)
def test_counts_that_no_engine_has_are_not_read(lines, expected):
    assert read_vllm(MetricsPage(lines)) == expected
