"""The metrics page, under the names, types and labels of the engine it stands for.

The names are those of recorded pages of vLLM V1 and SGLang. vLLM's page has, beside every
counter, a gauge `…_created` that shares its prefix: a reader that matches by prefix is wrong,
and should find that out here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from agents.sim.events import EngineStats
from agents.simserver.meters import Histogram, Meters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PageKind(StrEnum):
    """Whose metrics page the simulated engine shows."""

    VLLM = "vllm"
    SGLANG = "sglang"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What the page says that never changes. Times are Unix seconds."""

    model: str
    block_tokens: int
    started_at: float


class _Page:
    def __init__(self, labels: str, created_at: float | None) -> None:
        self._labels = labels
        self._created_at = created_at
        self._lines: list[str] = []

    def value(self, name: str, kind: str, about: str, value: float, more: str = "") -> None:
        self._head(name, kind, about)
        self._lines.append(f"{name}{{{self._labels}{more}}} {float(value)!r}")
        if kind == "counter":
            self._created(name.removesuffix("_total"), about)

    def family(self, name: str, about: str, label: str, values: dict[str, int]) -> None:
        self._head(name, "counter", about)
        for key, value in values.items():
            self._lines.append(f'{name}{{{self._labels},{label}="{key}"}} {float(value)!r}')

    def histogram(self, name: str, about: str, histogram: Histogram) -> None:
        self._head(name, "histogram", about)
        for le, count in histogram.cumulative():
            self._lines.append(f'{name}_bucket{{{self._labels},le="{le}"}} {float(count)!r}')
        self._lines.append(f"{name}_count{{{self._labels}}} {float(histogram.count)!r}")
        self._lines.append(f"{name}_sum{{{self._labels}}} {histogram.total!r}")
        self._created(name, about)

    def info(self, name: str, about: str, labels: str) -> None:
        self._head(name, "gauge", about)
        self._lines.append(f"{name}{{{labels}}} 1.0")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, about: str) -> None:
        self._lines.append(f"# HELP {name} {about}\n# TYPE {name} {kind}")

    def _created(self, name: str, about: str) -> None:
        if self._created_at is not None:
            self._head(f"{name}_created", "gauge", about)
            self._lines.append(f"{name}_created{{{self._labels}}} {self._created_at!r}")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def vllm_page(stats: EngineStats, meters: Meters, facts: PageFacts, now: float) -> str:
    """vLLM V1's page."""
    page = _Page(f'engine="0",model_name="{_escaped(facts.model)}"', facts.started_at)
    gauge, counter = "gauge", "counter"
    page.value(
        "vllm:num_requests_running",
        gauge,
        "Number of requests in model execution batches.",
        stats.running,
    )
    page.value(
        "vllm:num_requests_waiting",
        gauge,
        "Number of requests waiting to be processed.",
        stats.waiting,
    )
    page.value(
        "vllm:kv_cache_usage_perc",
        gauge,
        "KV-cache usage. 1 means 100 percent usage.",
        stats.kv_utilization,
    )
    page.value(
        "vllm:prefix_cache_queries_total",
        counter,
        "Prefix cache queries, in terms of number of queried tokens.",
        stats.queried_tokens,
    )
    page.value(
        "vllm:prefix_cache_hits_total",
        counter,
        "Prefix cache hits, in terms of number of cached tokens.",
        stats.hit_tokens,
    )
    page.value(
        "vllm:num_preemptions_total",
        counter,
        "Cumulative number of preemption from the engine.",
        stats.preemptions,
    )
    page.value(
        "vllm:prompt_tokens_total",
        counter,
        "Number of prefill tokens processed.",
        stats.prompt_tokens,
    )
    page.value(
        "vllm:generation_tokens_total",
        counter,
        "Number of generation tokens processed.",
        stats.generated_tokens,
    )
    page.family(
        "vllm:request_success_total",
        "Count of successfully processed requests.",
        "finished_reason",
        {reason: meters.ended[reason] for reason in ("stop", "length", "abort")},
    )
    page.histogram(
        "vllm:time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        meters.ttft_s,
    )
    page.histogram(
        "vllm:inter_token_latency_seconds",
        "Histogram of inter-token latency in seconds.",
        meters.itl_s,
    )
    page.histogram(
        "vllm:e2e_request_latency_seconds",
        "Histogram of e2e request latency in seconds.",
        meters.e2e_s,
    )
    page.info(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig",
        f'block_size="{facts.block_tokens}",cache_dtype="auto",enable_prefix_caching="True",'
        f'engine="0",num_gpu_blocks="{stats.kv_capacity_tokens // facts.block_tokens}"',
    )
    return page.text()


def sglang_page(stats: EngineStats, meters: Meters, facts: PageFacts, now: float) -> str:
    """SGLang's page."""
    page = _Page(f'model_name="{_escaped(facts.model)}",tp_rank="0"', None)
    gauge, counter = "gauge", "counter"
    hit_rate = stats.hit_tokens / stats.queried_tokens if stats.queried_tokens else 0.0
    throughput = meters.throughput(stats.generated_tokens, now)
    for name, about, value in (
        ("num_running_reqs", "The number of running requests.", stats.running),
        ("num_queue_reqs", "The number of requests in the waiting queue.", stats.waiting),
        ("num_used_tokens", "The number of used tokens.", stats.kv_used_tokens),
        ("token_usage", "The token usage.", stats.kv_utilization),
        ("cache_hit_rate", "The prefix cache hit rate.", hit_rate),
        (
            "max_total_num_tokens",
            "Maximum total number of tokens in the KV cache pool.",
            stats.kv_capacity_tokens,
        ),
        ("gen_throughput", "The generation throughput (token/s).", throughput),
    ):
        page.value(f"sglang:{name}", gauge, about, value)
    for name, about, value in (
        ("prompt_tokens_total", "Number of prefill tokens processed.", stats.prompt_tokens),
        (
            "generation_tokens_total",
            "Number of generation tokens processed.",
            stats.generated_tokens,
        ),
        ("cached_tokens_total", "Number of cached prompt tokens.", stats.hit_tokens),
    ):
        page.value(f"sglang:{name}", counter, about, value)
    page.histogram(
        "sglang:time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        meters.ttft_s,
    )
    page.histogram(
        "sglang:time_per_output_token_seconds",
        "Histogram of time per output token in seconds.",
        meters.itl_s,
    )
    page.histogram(
        "sglang:e2e_request_latency_seconds",
        "Histogram of End-to-end request latency in seconds",
        meters.e2e_s,
    )
    return page.text()


PageWriter = Callable[[EngineStats, Meters, PageFacts, float], str]

PAGES: dict[PageKind, PageWriter] = {PageKind.VLLM: vllm_page, PageKind.SGLANG: sglang_page}
