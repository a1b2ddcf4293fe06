"""SGLang's metrics page. With data-parallel attention every series comes once per rank."""

from agents.adapters.page import Page
from agents.core.reading import EngineReading

# The counters move when a request ends; the gauge with each part of a prompt and with tokens.
_PROGRESS = (
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:num_used_tokens",
)


def read(page: Page) -> EngineReading:
    """What this page says; None for series that this version does not have."""
    used = page.ratio("sglang:token_usage")
    return EngineReading(
        waiting=page.count("sglang:num_queue_reqs"),
        running=page.count("sglang:num_running_reqs"),
        kv_used_ratio=used,
        kv_capacity_tokens=page.count("sglang:max_total_num_tokens"),
        prefix_hit_ratio=page.ratio("sglang:cache_hit_rate"),
        progress=page.totals(*_PROGRESS),
    )
