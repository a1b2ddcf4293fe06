"""The kinds of engine an agent can stand beside, in one table."""

from collections.abc import Callable
from dataclasses import dataclass

from agents.adapters import llamacpp, openai, sglang, vllm
from agents.adapters.page import Page
from agents.core.reading import EngineReading


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How to read one kind of engine."""

    read: Callable[[Page], EngineReading]
    has_metrics: bool
    outstanding_max: int  # unless the operator says otherwise
    # Where it shows its settings, the first that is there, and the size of its batch in them.
    settings_paths: tuple[str, ...] = ()
    batch_max: Callable[[bytes], int | None] = lambda settings: None


# An engine that shows its queue needs the cap only against accidents. One that shows nothing
# must be protected by it: 8 is what a small server batches without its latency collapsing.
KINDS: dict[str, EngineKind] = {
    "vllm": EngineKind(vllm.read, has_metrics=True, outstanding_max=256),
    "sglang": EngineKind(
        sglang.read,
        has_metrics=True,
        outstanding_max=256,
        settings_paths=sglang.SETTINGS_PATHS,
        batch_max=sglang.batch_max,
    ),
    "llamacpp": EngineKind(
        llamacpp.read,
        has_metrics=True,
        outstanding_max=256,
        settings_paths=llamacpp.SETTINGS_PATHS,
        batch_max=llamacpp.batch_max,
    ),
    "openai": EngineKind(openai.read, has_metrics=False, outstanding_max=8),
}
