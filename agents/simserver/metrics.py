"""The metrics page, under the names, types and labels of the simulated engine: those of recorded
pages of vLLM V1 and SGLang, and their histograms, in wall seconds. Agents scrape it up to twenty
times a second: prometheus_client takes 0.5 ms to write one, this code 0.04 ms.

vLLM's page has, beside every counter, a gauge `…_created` that shares its prefix: a reader that
matches by prefix is wrong, and should fail here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from agents.sim.events import EngineStats

# vLLM V1's own buckets.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts by upper bound, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """The same value, seen that many times."""
        self._counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(le, values at or below it), ending with +Inf."""
        names = (*map(str, self.bounds), "+Inf")
        return zip(names, accumulate(self._counts), strict=True)


class Meters:
    """What the page shows beyond the engine's own numbers."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(_TTFT_S)
        self.itl_s = Histogram(_ITL_S)
        self.e2e_s = Histogram(_E2E_S)
        self.ended: Counter[str] = Counter()  # by finish reason
        self._tokens_before = 0
        self._seen_at = 0.0
        self._tokens_per_s = 0.0

    def throughput(self, generated_tokens: int, now: float) -> float:
        """Tokens per second since the last scrape that was a second ago or more."""
        elapsed_s = now - self._seen_at
        if elapsed_s >= 1.0:
            self._tokens_per_s = (generated_tokens - self._tokens_before) / elapsed_s
            self._tokens_before, self._seen_at = generated_tokens, now
        return self._tokens_per_s


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

    def value(self, name: str, about: str, value: float) -> None:
        counts = name.endswith("_total")
        self._head(name, "counter" if counts else "gauge", about)
        self._lines.append(f"{name}{{{self._labels}}} {float(value)!r}")
        if counts:
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


# By name: help, and the field of EngineStats. Names of counters end in _total.
_Rows = dict[str, tuple[str, str]]

_COUNTERS: _Rows = {
    "prompt_tokens_total": ("Number of prefill tokens processed.", "prompt_tokens"),
    "generation_tokens_total": ("Number of generation tokens processed.", "generated_tokens"),
}
_QUERIES = "Prefix cache queries, in terms of number of queried tokens."
_HITS = "Prefix cache hits, in terms of number of cached tokens."
_VLLM: _Rows = {
    "num_requests_running": ("Number of requests in model execution batches.", "running"),
    "num_requests_waiting": ("Number of requests waiting to be processed.", "waiting"),
    "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", "kv_utilization"),
    "prefix_cache_queries_total": (_QUERIES, "queried_tokens"),
    "prefix_cache_hits_total": (_HITS, "hit_tokens"),
    "num_preemptions_total": ("Cumulative number of preemption from the engine.", "preemptions"),
    **_COUNTERS,
}
_POOL = "Maximum total number of tokens in the KV cache pool."
_SGLANG: _Rows = {
    "num_running_reqs": ("The number of running requests.", "running"),
    "num_queue_reqs": ("The number of requests in the waiting queue.", "waiting"),
    "num_used_tokens": ("The number of used tokens.", "kv_used_tokens"),
    "token_usage": ("The token usage.", "kv_utilization"),
    "cache_hit_rate": ("The prefix cache hit rate.", "hit_ratio"),
    "max_total_num_tokens": (_POOL, "kv_capacity_tokens"),
    **_COUNTERS,
    "cached_tokens_total": ("Number of cached prompt tokens.", "hit_tokens"),
}


def vllm_page(stats: EngineStats, meters: Meters, facts: PageFacts, now: float) -> str:
    page = _Page(f'engine="0",model_name="{_escaped(facts.model)}"', facts.started_at)
    for name, (about, field) in _VLLM.items():
        page.value(f"vllm:{name}", about, getattr(stats, field))
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
    page = _Page(f'model_name="{_escaped(facts.model)}",tp_rank="0"', None)
    for name, (about, field) in _SGLANG.items():
        page.value(f"sglang:{name}", about, getattr(stats, field))
    page.value(
        "sglang:gen_throughput",
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
