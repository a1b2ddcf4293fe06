"""SGLang's metrics page, and its settings.

With data-parallel attention every series comes once per rank, and so do the settings' states: each
runs `effective_max_running_requests_per_dp` requests. Older versions show only the option that it
was started with (`max_running_requests`, for all ranks), null where none was given.
"""

from agents.adapters.page import Page
from agents.adapters.settings_page import batch_size, read_object
from agents.core.reading import EngineReading

SETTINGS_PATHS = ("/get_server_info", "/server_info")  # the second one is its later name
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


def batch_max(settings: bytes) -> int | None:
    """Requests that all ranks together run at once; None if this page doesn't tell."""
    fields = read_object(settings)
    states = fields.get("internal_states")
    if isinstance(states, list) and states:
        ranks = [
            batch_size(state.get("effective_max_running_requests_per_dp"))
            for state in states
            if isinstance(state, dict)
        ]
        known = [rank for rank in ranks if rank is not None]
        if len(known) == len(states):
            return batch_size(sum(known))
    return batch_size(fields.get("max_running_requests"))
