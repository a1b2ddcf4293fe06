"""llama.cpp's metrics page (`llama-server --metrics`).

The number of slots is not on it: give `-np` as `--batch-max`. Newer versions dropped the KV
gauges, which then stay unknown. `prompt_tokens_total` counts tokens that were processed, so the
cached ones come on top of it.
"""

from agents.adapters.page import Page
from agents.core.reading import EngineReading

_PROGRESS = (
    "llamacpp:prompt_tokens_total",
    "llamacpp:tokens_predicted_total",
    "llamacpp:n_decode_total",
)


def read(page: Page) -> EngineReading:
    """What this page says; None for series that this version does not have."""
    return EngineReading(
        waiting=page.count("llamacpp:requests_deferred"),
        running=page.count("llamacpp:requests_processing"),
        kv_used_ratio=page.ratio("llamacpp:kv_cache_usage_ratio"),
        prefix_hit_ratio=_hit_ratio(page),
        progress=page.totals(*_PROGRESS),
    )


def _hit_ratio(page: Page) -> float | None:
    processed = page.total("llamacpp:prompt_tokens_total")
    cached = page.total("llamacpp:prompt_tokens_cached_total")
    if processed is None or cached is None or processed + cached <= 0:
        return None
    return cached / (processed + cached)
