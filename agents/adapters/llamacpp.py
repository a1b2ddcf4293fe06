"""llama.cpp's metrics page (`llama-server --metrics`), and its settings.

The number of slots (`-np`) is in `/props`. Newer versions dropped the KV
gauges, which then stay unknown. `prompt_tokens_total` counts tokens that were processed, so the
cached ones come on top of it.
"""

from agents.adapters.page import Page
from agents.adapters.settings_page import batch_size, read_object
from agents.core.reading import EngineReading

SETTINGS_PATHS = ("/props",)
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


def batch_max(settings: bytes) -> int | None:
    """The number of slots; None if this page doesn't tell."""
    return batch_size(read_object(settings).get("total_slots"))


def _hit_ratio(page: Page) -> float | None:
    processed = page.total("llamacpp:prompt_tokens_total")
    cached = page.total("llamacpp:prompt_tokens_cached_total")
    if processed is None or cached is None or processed + cached <= 0:
        return None
    return cached / (processed + cached)
