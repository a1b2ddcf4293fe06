"""The kinds of engine an agent can serve, in one table: how to read each one's metrics page, and
where it shows its batch size and version.

vllm (to 0.33): V1 names and the V0 name of the KV gauge; Dynamo's mocker has them too. It shows its
KV capacity only as labels of an info gauge, and `max_num_seqs` not at all (give `--batch-max`).
With data parallelism every series comes once per `engine`, and a header picks a request's rank.
sglang: with data-parallel attention every series comes once per rank (`dp_rank`), and so do the
settings' states, each of `effective_max_running_requests_per_dp` requests; a field of the body
picks the rank. Older versions show only their option (`max_running_requests`, for all ranks), or
null. It takes an adapter from the field `lora_path` and answers a model name that it does not know
as if it were its own.
llamacpp (`llama-server --metrics`): slots (`-np`) are in `/props`. Newer ones lack the KV gauges.
`prompt_tokens_total` counts computed tokens, so the cached ones come on top of it.
openai: any OpenAI-compatible server, without a page: the queue is unknown, running is what the
agent sent to it, and a small cap on outstanding requests takes the place of the engine's numbers.

An agent scrapes its engine ten to twenty times a second and a real page has hundreds of histogram
lines, so only required names are searched for; the rest is never parsed. prometheus_client's parser
takes 1.5 ms instead of 36 µs for a 10 KB page of SGLang, a third of a core for twelve busy agents.
A name is matched whole: `x_total` has neighbours `x_created` that hold a time, not a count.
Format: Prometheus text exposition 0.0.4.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from agents.config import BATCH_MAX_MOST
from agents.core.engine_load import BLIND_OUTSTANDING_MAX
from agents.core.events import EngineReading
from schemas.numbers import WHOLE_MAX
from schemas.state import CARD_CHARS_MAX, LOOKS_LIKE

COUNT_CHARS_MAX = 12  # of a count that a label has as text
SERIES_MAX = 4096  # label sets of one name; more is no engine's page

_LINE = re.compile(r'(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+([^ \t]+)')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a metric. Labels stay text until one is read."""

    labels_text: str
    value: float

    def label(self, name: str) -> str | None:
        """The value of one label, escapes left as they are."""
        for found in _LABEL.finditer(self.labels_text):
            if found[1] == name:
                return found[2]
        return None


class MetricsPage:
    __slots__ = ("_only", "_text")

    def __init__(self, text: str, only: tuple[str, str] | None = None) -> None:
        """`only`: a label and its value; lines without it are not there."""
        self._text = "\n" + text
        self._only = only

    def series(self, name: str) -> list[Series]:
        """All lines of that exact metric; none if the page lacks it. NaN and Inf are left out."""
        found = self._all_series(name)
        if self._only is None:
            return found
        label, value = self._only
        return [series for series in found if series.label(label) == value]

    def _all_series(self, name: str) -> list[Series]:
        found: list[Series] = []
        start = "\n" + name
        at = self._text.find(start)
        while at >= 0 and len(found) < SERIES_MAX:
            rest = at + len(start)
            end = self._text.find("\n", rest)
            line = self._text[rest : end if end >= 0 else len(self._text)]
            parsed = _parsed(line)
            if parsed is not None:
                found.append(parsed)
            at = self._text.find(start, rest)
        return found

    def total(self, name: str) -> float | None:
        """The sum over all label sets (engines, ranks) of one name, or None if it is missing."""
        values = [series.value for series in self.series(name)]
        total = sum(values)
        return total if values and math.isfinite(total) else None

    def count(self, name: str) -> int | None:
        """`total` as a number of things; None if missing, or no number that things have."""
        value = self.total(name)
        return round(value) if value is not None and 0 <= value <= WHOLE_MAX else None

    def totals(self, *names: str) -> tuple[float, ...]:
        """`total` of each of these that the page has, in this order."""
        totals = (self.total(name) for name in names)
        return tuple(total for total in totals if total is not None)

    def mean(self, name: str) -> float | None:
        """The mean over all label sets, or None if the page lacks the name."""
        values = [series.value for series in self.series(name)]
        return sum(values) / len(values) if values else None

    def ratio(self, name: str) -> float | None:
        """`mean` of a share, held inside 0..1: engines round beyond it."""
        value = self.mean(name)
        return None if value is None else min(1.0, max(0.0, value))

    def share(self, part: str, whole: str) -> float | None:
        """One counter as a share of another; None if either is missing or nothing was counted."""
        counted, of = self.total(part), self.total(whole)
        if counted is None or not of:
            return None
        return min(1.0, max(0.0, counted / of))


def _parsed(line: str) -> Series | None:
    found = _LINE.match(line)
    if found is None:
        return None
    try:
        value = float(found[2])
    except ValueError:
        return None
    return Series(found[1] or "", value) if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class EngineDialect:
    """How to read one kind of engine; readings are None where a version lacks the series."""

    read: Callable[[MetricsPage], EngineReading] | None  # None: it has no page
    outstanding_max: int  # unless the operator sets it
    series: str = ""  # how the names on its page begin: no two kinds share one
    # Where it shows its settings, the first path that exists, and the batch size in them.
    settings_paths: tuple[str, ...] = ()
    batch_max: Callable[..., int | None] = lambda page, rank=None: None  # rank: of one alone
    version_field: str = "version"  # of the same page
    # And the one that says whether answers have the count of cached tokens: without it none were.
    cached_field: str = ""
    takes_response_ids: bool = False  # whether a response has the id that its request gives
    ends_streams: bool = False  # whether every version ends every stream as its API promises
    takes_usage_option: bool = False  # whether every version takes `stream_options.include_usage`
    may_move_turns: bool = False  # system turns of `/v1/messages`, by its model's template
    # Of data-parallel ranks: the label of their series; how a request names one.
    rank_label: str = ""
    rank_header: str = ""
    rank_field: str = ""
    # Where adapters are loaded and unloaded; the field that names one beside `model`.
    load_path: str = ""
    unload_path: str = ""
    adapter_field: str = ""

    @property
    def has_metrics(self) -> bool:
        return self.read is not None

    def version(self, page: bytes) -> str | None:
        """Its version, where the page of its settings shows it."""
        found = read_object(page).get(self.version_field)
        return found if isinstance(found, str) and len(found) <= CARD_CHARS_MAX else None

    def reports_cached(self, page: bytes) -> bool:
        """Whether that page says that answers have the count of cached tokens."""
        return bool(self.cached_field) and read_object(page).get(self.cached_field) is True


def read_object(data: bytes) -> dict[str, Any]:
    """The fields of a page of settings; none if it is no JSON object."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def batch_size(value: object) -> int | None:
    """A number of requests that may run at once, or None for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= BATCH_MAX_MOST else None


def read_vllm(page: MetricsPage) -> EngineReading:
    used = page.ratio("vllm:kv_cache_usage_perc")
    return EngineReading(
        waiting=page.count("vllm:num_requests_waiting"),
        running=page.count("vllm:num_requests_running"),
        kv_used_ratio=page.ratio("vllm:gpu_cache_usage_perc") if used is None else used,
        kv_capacity_tokens=_vllm_capacity(page),
        prefix_hit_ratio=page.share(
            "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
        ),
        # The gauge rises with each part of a long prompt; the counters only at its end.
        progress=page.totals(
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:iteration_tokens_total_count",
            "vllm:kv_cache_usage_perc",
        ),
        is_asleep=_vllm_sleeps(page),
    )


def _vllm_sleeps(page: MetricsPage) -> bool | None:
    """Whether `/sleep` was called. One state is 1, of awake and two depths of sleep."""
    states = page.series("vllm:engine_sleep_state")
    if not states:
        return None
    return any(not one.value and one.label("sleep_state") == "awake" for one in states)


def _vllm_capacity(page: MetricsPage) -> int | None:
    pools = [_vllm_pool_tokens(info) for info in page.series("vllm:cache_config_info")]
    known = [tokens for tokens in pools if tokens is not None]
    is_known = bool(known) and len(known) == len(pools) and sum(known) <= WHOLE_MAX
    return sum(known) if is_known else None


def _vllm_pool_tokens(info: Series) -> int | None:
    """Of one rank. Older versions show its blocks alone, newer ones with several ranks the sum of
    theirs with each; and groups of layers share blocks."""
    tokens = info.label("kv_cache_size_tokens")
    if tokens is not None and is_count(tokens):
        return int(tokens)
    block, blocks = info.label("block_size"), info.label("num_gpu_blocks")
    if block is None or blocks is None or not (is_count(block) and is_count(blocks)):
        return None  # "None" until the engine has measured its memory
    return int(block) * int(blocks)


def is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= COUNT_CHARS_MAX


def read_sglang(page: MetricsPage) -> EngineReading:
    return EngineReading(
        waiting=page.count("sglang:num_queue_reqs"),
        running=page.count("sglang:num_running_reqs"),
        kv_used_ratio=page.ratio("sglang:token_usage"),
        kv_capacity_tokens=page.count("sglang:max_total_num_tokens"),
        prefix_hit_ratio=page.ratio("sglang:cache_hit_rate"),
        # The counters move when a request ends; the gauge with parts of a prompt and with tokens.
        progress=page.totals(
            "sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_used_tokens"
        ),
    )


def _sglang_batch_max(page: bytes, rank: int | None = None) -> int | None:
    """Requests that all ranks together run at once, or one of them."""
    settings = read_object(page)
    states = settings.get("internal_states")
    if isinstance(states, list) and states:
        ranks = [
            batch_size(state.get("effective_max_running_requests_per_dp"))
            for state in states
            if isinstance(state, dict)
        ]
        if rank is not None:
            return ranks[rank] if rank < len(ranks) else None
        known = [each for each in ranks if each is not None]
        if len(known) == len(states):
            return batch_size(sum(known))
    return None if rank is not None else batch_size(settings.get("max_running_requests"))


def read_llamacpp(page: MetricsPage) -> EngineReading:
    processed = page.total("llamacpp:prompt_tokens_total")
    cached = page.total("llamacpp:prompt_tokens_cached_total")
    ratio = None
    if processed is not None and cached is not None and processed + cached > 0:
        ratio = cached / (processed + cached)
    return EngineReading(
        waiting=page.count("llamacpp:requests_deferred"),
        running=page.count("llamacpp:requests_processing"),
        kv_used_ratio=page.ratio("llamacpp:kv_cache_usage_ratio"),
        prefix_hit_ratio=ratio,
        progress=page.totals(
            "llamacpp:prompt_tokens_total",
            "llamacpp:tokens_predicted_total",
            "llamacpp:n_decode_total",
        ),
    )


# An engine that shows its queue needs the cap only against accidents. One that shows nothing is
# protected by it.
KINDS: dict[str, EngineDialect] = {
    "vllm": EngineDialect(
        read_vllm,
        outstanding_max=256,
        series="vllm:",
        settings_paths=("/version",),
        ends_streams=True,
        takes_response_ids=True,
        takes_usage_option=True,
        may_move_turns=True,
        rank_label="engine",
        rank_header="X-data-parallel-rank",
        load_path="/v1/load_lora_adapter",
        unload_path="/v1/unload_lora_adapter",
    ),
    "sglang": EngineDialect(
        read_sglang,
        outstanding_max=256,
        series="sglang:",
        settings_paths=("/server_info", "/get_server_info"),  # the second one is its old name
        batch_max=_sglang_batch_max,
        cached_field="enable_cache_report",  # 0.5.21 and older leave out a count of 0
        ends_streams=True,
        takes_response_ids=True,
        takes_usage_option=True,
        may_move_turns=True,
        rank_label="dp_rank",
        rank_field="data_parallel_rank",
        load_path="/load_lora_adapter",
        unload_path="/unload_lora_adapter",
        adapter_field="lora_path",
    ),
    "llamacpp": EngineDialect(  # has the counts in every stream, and moves them where it is asked
        read_llamacpp,
        outstanding_max=256,
        series="llamacpp:",
        settings_paths=("/props",),
        batch_max=lambda page, rank=None: batch_size(read_object(page).get("total_slots")),
        ends_streams=True,
        version_field="build_info",
    ),
    "openai": EngineDialect(None, outstanding_max=BLIND_OUTSTANDING_MAX),
}


def kind_of_page(text: str) -> str | None:
    """The kind whose series a page of metrics has; None where it has those of none."""
    page = "\n" + text
    return next(
        (name for name, kind in KINDS.items() if kind.series and f"\n{kind.series}" in page), None
    )


def looks_like(other: str | None, told: EngineDialect) -> str | None:
    """Words for an engine that is recognisably of another kind than its agent was `told`."""
    seen = None if other is None else KINDS.get(other)
    if seen is None or not seen.has_metrics or seen is told:
        return None
    own = next(name for name, kind in KINDS.items() if kind is told)
    return f"{LOOKS_LIKE}{other}, not {own}: give --engine-kind {other}"
