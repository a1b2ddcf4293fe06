"""What one look at an engine says, in the same words for every kind of engine.

None means "this engine does not say", which is a state of its own. Reading it as zero would make
the least known replica look like the emptiest one, and all routers would herd onto it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One look at an engine's metrics page. Counts are requests unless the name says tokens."""

    waiting: int | None = None  # accepted, not in the running batch
    running: int | None = None
    batch_max: int | None = None
    kv_used_ratio: float | None = None
    kv_capacity_tokens: int | None = None
    prefix_hit_ratio: float | None = None  # of the engine's whole life
    # Numbers of which one rises with every computed step, and none without; empty if it has none.
    progress: tuple[float, ...] = ()


NOTHING_KNOWN = EngineReading()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts an engine gave for one answer; -1 where it gave none."""

    prompt_tokens: int = -1
    cached_tokens: int = -1
    completion_tokens: int = -1


NO_USAGE = Usage()
