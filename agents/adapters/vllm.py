"""vLLM's metrics page (V1 names, and the V0 name of the KV gauge), also spoken by Dynamo's mocker.

vLLM tells its KV capacity only as a label of an info gauge, and its `max_num_seqs` not at all:
give that one as `--batch-max`. With data parallelism every series comes once per `engine`.
"""

from agents.adapters.page import Page, Series
from agents.core.reading import EngineReading

# The gauge rises with each part of a long prompt; the counters show nothing until its end.
_PROGRESS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
)


def read(page: Page) -> EngineReading:
    """What this page says; None for series that are not there yet."""
    used = page.ratio("vllm:kv_cache_usage_perc")
    return EngineReading(
        waiting=page.count("vllm:num_requests_waiting"),
        running=page.count("vllm:num_requests_running"),
        kv_used_ratio=page.ratio("vllm:gpu_cache_usage_perc") if used is None else used,
        kv_capacity_tokens=_capacity(page),
        prefix_hit_ratio=page.share(
            "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
        ),
        progress=page.totals(*_PROGRESS),
    )


def _capacity(page: Page) -> int | None:
    pools = [_pool_tokens(info) for info in page.series("vllm:cache_config_info")]
    known = [tokens for tokens in pools if tokens is not None]
    return sum(known) if known and len(known) == len(pools) else None


def _pool_tokens(info: Series) -> int | None:
    block, blocks = info.label("block_size"), info.label("num_gpu_blocks")
    if block is None or blocks is None or not (block.isdecimal() and blocks.isdecimal()):
        return None  # "None" until the engine has measured its memory
    return int(block) * int(blocks)
