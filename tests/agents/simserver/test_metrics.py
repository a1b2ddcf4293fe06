"""The metrics pages: parseable, and with the names and types of recorded real ones."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agents.sim.events import EngineStats
from agents.simserver.metrics import PAGES, Meters, PageFacts, PageKind

STATS = EngineStats(
    running=3,
    waiting=2,
    kv_used_tokens=400,
    kv_capacity_tokens=1600,
    preemptions=1,
    prompt_tokens=1000,
    generated_tokens=70,
    queried_tokens=1200,
    hit_tokens=300,
    finished=5,
    aborted=1,
)
FACTS = PageFacts(model='org/name "x"', block_tokens=16, started_at=1.7e9)

# From pages of a vLLM V1 and of two SGLang servers: name → type.
RECORDED = {
    PageKind.VLLM: {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_queries_created": "gauge",
        "vllm:prefix_cache_hits_total": "counter",
        "vllm:num_preemptions_total": "counter",
        "vllm:num_preemptions_created": "gauge",
        "vllm:prompt_tokens_total": "counter",
        "vllm:generation_tokens_total": "counter",
        "vllm:request_success_total": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:cache_config_info": "gauge",
    },
    PageKind.SGLANG: {
        "sglang:num_running_reqs": "gauge",
        "sglang:num_queue_reqs": "gauge",
        "sglang:num_used_tokens": "gauge",
        "sglang:token_usage": "gauge",
        "sglang:cache_hit_rate": "gauge",
        "sglang:max_total_num_tokens": "gauge",
        "sglang:gen_throughput": "gauge",
        "sglang:prompt_tokens_total": "counter",
        "sglang:generation_tokens_total": "counter",
        "sglang:cached_tokens_total": "counter",
        "sglang:time_to_first_token_seconds": "histogram",
        "sglang:e2e_request_latency_seconds": "histogram",
        "sglang:time_per_output_token_seconds": "histogram",
    },
}
LABELS = {
    PageKind.VLLM: {"engine": "0", "model_name": 'org/name "x"'},
    PageKind.SGLANG: {"model_name": 'org/name "x"', "tp_rank": "0"},
}


def page(kind: PageKind) -> str:
    meters = Meters()
    meters.ttft_s.observe(0.3)
    meters.itl_s.observe(0.045, 60)
    return PAGES[kind](STATS, meters, FACTS, 100.0)


def samples(kind: PageKind) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page(kind))
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.parametrize("kind", PAGES)
def test_names_and_types_are_those_of_real_pages(kind):
    types = dict(
        line.removeprefix("# TYPE ").split(" ")
        for line in page(kind).splitlines()
        if line.startswith("# TYPE ")
    )
    assert RECORDED[kind].items() <= types.items()


@pytest.mark.parametrize("kind", PAGES)
def test_labels_are_those_of_real_pages(kind):
    for family in text_string_to_metric_families(page(kind)):
        for sample in family.samples:
            if sample.name != "vllm:cache_config_info":
                assert LABELS[kind].items() <= sample.labels.items()


def test_vllm_values():
    values = samples(PageKind.VLLM)
    assert values["vllm:num_requests_running"] == 3
    assert values["vllm:num_requests_waiting"] == 2
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:prefix_cache_hits_total"] == 300
    assert values["vllm:inter_token_latency_seconds_count"] == 60
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(2.7)
    assert 'block_size="16"' in page(PageKind.VLLM)
    assert 'num_gpu_blocks="100"' in page(PageKind.VLLM)


def test_sglang_values():
    values = samples(PageKind.SGLANG)
    assert values["sglang:num_running_reqs"] == 3
    assert values["sglang:num_queue_reqs"] == 2
    assert values["sglang:token_usage"] == 0.25
    assert values["sglang:num_used_tokens"] == 400
    assert values["sglang:max_total_num_tokens"] == 1600
    assert values["sglang:cache_hit_rate"] == 0.25
