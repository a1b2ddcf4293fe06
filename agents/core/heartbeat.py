"""One replica's heartbeat: what is in it, and when the next one is due."""

from dataclasses import dataclass
from typing import NamedTuple

from agents.core.engine_load import EngineLoad, LoadCounts, occupancy
from agents.core.requests import RequestTable
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.residency import Label, Labels
from schemas.state import DownReason, Heartbeat, ReplicaState

CARDS_EVERY = 10  # heartbeats: model cards hardly ever change
GAP_MIN_S = 0.01  # a replica that turns full and not full with every request must not flood the bus


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Which replica this is and what its operator decided about it.

    `epoch` must differ from that of every earlier start of this replica's agent.
    """

    region: RegionId
    replica: ReplicaId
    epoch: int
    engine: str  # kind
    outstanding_max: int
    heartbeat_s: float
    batch_max: int | None = None  # where the engine's metrics don't show it
    residency: tuple[Label, ...] | None = None  # labels that hold here; None: all of its region's
    counts_own: bool = False  # the engine shows no counts: it runs what this agent sent to it

    def fits_residency(self, requested: Labels) -> bool:
        """Whether one of these labels holds here. Routers check it first, but a label may have
        been removed since. Without labels of its own the agent has all of its region's, which only
        mesh.toml lists."""
        labels = self.residency
        return not requested or labels is None or any(label in requested for label in labels)


class HeartbeatFields(NamedTuple):
    """What the core itself counts and decides."""

    seq: int
    state: ReplicaState
    down_reason: DownReason | None
    served_total: int
    refused_total: int
    taken: dict[RouterId, int]
    owner: RegionId | None = None  # the region that has adopted the replica
    owner_taken: dict[RouterId, int] | None = None
    term: int = 0


def compose(
    replica: ReplicaConfig,
    engine: EngineLoad,
    requests: RequestTable,
    counts: LoadCounts,
    fields: HeartbeatFields,
    now: float,
) -> Heartbeat:
    """The heartbeat at `now`; unknown numbers are None."""
    reading, line = engine.reading, engine.prefill.line
    return Heartbeat(
        region=replica.region,
        replica=replica.replica,
        epoch=replica.epoch,
        seq=fields.seq,
        state=fields.state,
        engine=replica.engine,
        models=engine.models,
        full=counts.full,
        pending=counts.pending,
        running=counts.running,
        outstanding=len(requests.by_inbox),
        outstanding_max=replica.outstanding_max,
        prefill_queued_tokens=requests.prefill_queued_tokens(line, now),
        batch_max=reading.batch_max,
        batch_occupancy=occupancy(counts.running, reading.batch_max),
        kv_used_ratio=reading.kv_used_ratio,
        kv_capacity_tokens=reading.kv_capacity_tokens,
        prefill_s_per_token=line.s_per_token if line else None,
        prefill_base_s=line.base_s if line else None,
        decode_tokens_per_s=engine.answers.decode_tokens_per_s,
        prefix_hit_ratio=engine.prefix_hit_ratio,
        engine_age_s=None if engine.read_at is None else now - engine.read_at,
        served_total=fields.served_total,
        refused_total=fields.refused_total,
        taken=fields.taken,
        residency=replica.residency,
        owner=fields.owner,
        owner_taken=fields.owner_taken or {},
        term=fields.term,
        down_reason=fields.down_reason,
        cards=dict(engine.cards) if fields.seq % CARDS_EVERY == 0 else {},
    )


class HeartbeatTimer:
    """When the next heartbeat is due: at the interval, or GAP_MIN_S after the last one when the
    replica's state, fullness or models have changed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sent_at = float("-inf")
        self.due_at = float("-inf")

    def hurry(self) -> None:
        """The last heartbeat is out of date."""
        self.due_at = self._sent_at + GAP_MIN_S

    def sent(self, now: float) -> None:
        self._sent_at = now
        self.due_at = now + self._interval_s
