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

    def value(self, name: str, kind: str, about: str, value: float) -> None:
        self._head(name, kind, about)
        self._lines.append(f"{name}{{{self._labels}}} {float(value)!r}")
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


# (name, type, help, value) of what the engine's own numbers say.
_Row = tuple[str, str, str, Callable[[EngineStats], float]]

_VLLM_ROWS: tuple[_Row, ...] = (
    (
        "num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        lambda stats: stats.running,
    ),
    (
        "num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        lambda stats: stats.waiting,
    ),
    (
        "kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda stats: stats.kv_utilization,
    ),
    (
        "prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda stats: stats.queried_tokens,
    ),
    (
        "prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in terms of number of cached tokens.",
        lambda stats: stats.hit_tokens,
    ),
    (
        "num_preemptions_total",
        "counter",
        "Cumulative number of preemption from the engine.",
        lambda stats: stats.preemptions,
    ),
    (
        "prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        lambda stats: stats.prompt_tokens,
    ),
    (
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        lambda stats: stats.generated_tokens,
    ),
)

_SGLANG_ROWS: tuple[_Row, ...] = (
    (
        "num_running_reqs",
        "gauge",
        "The number of running requests.",
        lambda stats: stats.running,
    ),
    (
        "num_queue_reqs",
        "gauge",
        "The number of requests in the waiting queue.",
        lambda stats: stats.waiting,
    ),
    ("num_used_tokens", "gauge", "The number of used tokens.", lambda stats: stats.kv_used_tokens),
    ("token_usage", "gauge", "The token usage.", lambda stats: stats.kv_utilization),
    (
        "cache_hit_rate",
        "gauge",
        "The prefix cache hit rate.",
        lambda stats: stats.hit_tokens / max(stats.queried_tokens, 1),
    ),
    (
        "max_total_num_tokens",
        "gauge",
        "Maximum total number of tokens in the KV cache pool.",
        lambda stats: stats.kv_capacity_tokens,
    ),
    (
        "prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        lambda stats: stats.prompt_tokens,
    ),
    (
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        lambda stats: stats.generated_tokens,
    ),
    (
        "cached_tokens_total",
        "counter",
        "Number of cached prompt tokens.",
        lambda stats: stats.hit_tokens,
    ),
)


def vllm_page(stats: EngineStats, meters: Meters, facts: PageFacts, now: float) -> str:
    """vLLM V1's page."""
    page = _Page(f'engine="0",model_name="{_escaped(facts.model)}"', facts.started_at)
    for name, kind, about, value in _VLLM_ROWS:
        page.value(f"vllm:{name}", kind, about, value(stats))
    page.family(
        "vllm:request_success_total",
        "Count of successfully processed requests.",
        "finished_reason",
        {reason: meters.ended[reason] for reason in ("stop", "length", "abort")},
    )
    for name, about, histogram in (
        ("time_to_first_token", "time to first token", meters.ttft_s),
        ("inter_token_latency", "inter-token latency", meters.itl_s),
        ("e2e_request_latency", "e2e request latency", meters.e2e_s),
    ):
        page.histogram(f"vllm:{name}_seconds", f"Histogram of {about} in seconds.", histogram)
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
    for name, kind, about, value in _SGLANG_ROWS:
        page.value(f"sglang:{name}", kind, about, value(stats))
    page.value(
        "sglang:gen_throughput",
        "gauge",
        "The generation throughput (token/s).",
        meters.throughput(stats.generated_tokens, now),
    )
    for name, about, histogram in (
        ("time_to_first_token", "time to first token", meters.ttft_s),
        ("time_per_output_token", "time per output token", meters.itl_s),
        ("e2e_request_latency", "End-to-end request latency", meters.e2e_s),
    ):
        page.histogram(f"sglang:{name}_seconds", f"Histogram of {about} in seconds.", histogram)
    return page.text()


PageWriter = Callable[[EngineStats, Meters, PageFacts, float], str]

PAGES: dict[PageKind, PageWriter] = {PageKind.VLLM: vllm_page, PageKind.SGLANG: sglang_page}
