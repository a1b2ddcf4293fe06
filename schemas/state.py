"""What people and routers read of the fleet's state: heartbeats and digests, as JSON.

A field that an engine does not report is null. Null is a tier of its own and never means zero
(PEERS: routers that read "missing" as 0 herd onto the replica they know least about).
Versions: `v` rises when a field changes its meaning; new fields alone do not raise it, because
readers ignore fields they don't know.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from schemas.ids import NAME_PATTERN, ModelId, RegionId, ReplicaId, RouterId
from schemas.wire import WireError

STATE_BYTES_MAX = 256 * 1024

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Count = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class ReplicaState(StrEnum):
    """Whether a replica takes work."""

    STARTING = "starting"  # the agent is up, the engine has not answered yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DOWN = "down"  # the agent is up, the engine does not answer
    GONE = "gone"  # the agent's last word


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One replica's state, every 100 ms and at once when it turns full or not full."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    v: Literal[1] = 1
    region: Annotated[RegionId, Field(pattern=NAME_PATTERN)]
    replica: Annotated[ReplicaId, Field(pattern=NAME_PATTERN)]
    epoch: Count  # changes at every start of the agent; counters below start anew with it
    seq: Count  # rises by one a heartbeat inside an epoch
    state: ReplicaState
    engine: str  # adapter kind: vllm, sglang, llamacpp, openai
    models: tuple[ModelId, ...]
    full: bool  # the agent's own verdict: new work would be refused now
    pending: Count | None  # accepted, not yet in the running batch (SkyWalker 3.3)
    running: Count | None  # in the running batch
    outstanding: Count  # taken from the bus and not finished, counted by the agent itself
    batch_max: Count | None = None  # most requests the engine runs at once
    batch_occupancy: Ratio | None = None  # running / batch_max
    kv_used_ratio: Ratio | None = None
    kv_capacity_tokens: Count | None = None
    prefill_s_per_token: Seconds | None = None  # learned slope of TTFT on uncached tokens
    prefill_base_s: Seconds | None = None  # its intercept
    decode_tokens_per_s: Rate | None = None  # of one running request, median of late
    prefix_hit_ratio: Ratio | None = None  # cached / prompt tokens of what this agent served
    engine_age_s: Seconds | None = None  # age of the engine reading inside this heartbeat
    served_total: Count = 0
    refused_total: Count = 0
    # Highest hand-off number taken from each router of this region: what a router handed off
    # beyond it is still on its way and must be added to `pending`.
    taken: dict[RouterId, Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapacity:
    """How many replicas of a region serve one model, and how many of them would take work."""

    ready: Count
    free: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A region's state as its router tells it to its peers, every 100 ms and on change."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    v: Literal[1] = 1
    region: Annotated[RegionId, Field(pattern=NAME_PATTERN)]
    router: Annotated[RouterId, Field(pattern=NAME_PATTERN)]
    epoch: Count
    seq: Count
    accepting: bool  # false while the router drains
    replicas_ready: Count
    replicas_free: Count  # ready and not full (SkyWalker 3.3: what makes a region available)
    queue: Count  # requests held in this router
    models: dict[ModelId, ModelCapacity]
    requests_per_s: Rate
    prefill_s_per_token: Seconds | None = None  # median over ready replicas
    kv_used_ratio: Ratio | None = None  # mean over ready replicas


_HEARTBEAT: TypeAdapter[Heartbeat] = TypeAdapter(Heartbeat)
_DIGEST: TypeAdapter[Digest] = TypeAdapter(Digest)

T = TypeVar("T")


def encode_state(message: Heartbeat | Digest) -> bytes:
    """The JSON of a heartbeat or digest."""
    return orjson.dumps(message)


def decode_heartbeat(data: bytes) -> Heartbeat:
    """The heartbeat in `data`. Raises WireError for anything else."""
    return _decode(_HEARTBEAT, data)


def decode_digest(data: bytes) -> Digest:
    """The digest in `data`. Raises WireError for anything else."""
    return _decode(_DIGEST, data)


def _decode(adapter: TypeAdapter[T], data: bytes) -> T:
    if len(data) > STATE_BYTES_MAX:
        raise WireError(f"state of {len(data)} bytes, at most {STATE_BYTES_MAX} are read")
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        raise WireError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
