"""The heartbeat of one replica, put together from what its agent knows."""

from dataclasses import dataclass
from typing import NamedTuple

from agents.core import load
from agents.core.answers import AnswerTable
from agents.core.prefill_queue import queued_tokens
from agents.core.view import EngineView, Load
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.residency import Label, Labels
from schemas.state import Heartbeat, ReplicaState

CARDS_EVERY = 10  # heartbeats: what never changes need not be told ten times a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Which replica this is and what its operator decided about it.

    `epoch` must differ from that of every earlier start of this replica's agent.
    """

    region: RegionId
    replica: ReplicaId
    epoch: int
    engine: str  # kind
    outstanding_max: int
    heartbeat_s: float
    batch_max: int | None = None  # where the engine's metrics don't say it
    residency: tuple[Label, ...] | None = None  # labels that hold here; None: all of its region
    counts_own: bool = False  # the engine shows no counts: what it runs is what it was handed

    def stands_on(self, wanted: Labels) -> bool:
        """Whether a label of these holds here. Routers ask first, and may not have heard yet that
        one was taken away. An agent that says nothing vouches for all that its region has, and
        which these are stands in mesh.toml, which agents don't read."""
        return not wanted or self.residency is None or any(one in wanted for one in self.residency)


class Told(NamedTuple):
    """What the core itself counts and judges."""

    seq: int
    state: ReplicaState
    full: bool
    served_total: int
    refused_total: int
    taken: dict[RouterId, int]
    owner: RegionId | None = None  # the region that has adopted the replica
    owner_taken: dict[RouterId, int] | None = None
    term: int = 0


def compose(
    replica: Replica,
    engine: EngineView,
    answers: AnswerTable,
    carried: Load,
    told: Told,
    now: float,
) -> Heartbeat:
    """The heartbeat at `now`; what nobody knows is None."""
    reading, line = engine.reading, engine.line
    return Heartbeat(
        region=replica.region,
        replica=replica.replica,
        epoch=replica.epoch,
        seq=told.seq,
        state=told.state,
        engine=replica.engine,
        models=engine.models,
        full=told.full,
        pending=carried.pending,
        running=carried.running,
        outstanding=len(answers),
        outstanding_max=replica.outstanding_max,
        prefill_queued_tokens=queued_tokens(answers, line, answers.settled_at, now),
        batch_max=reading.batch_max,
        batch_occupancy=load.occupancy(carried.running, reading.batch_max),
        kv_used_ratio=reading.kv_used_ratio,
        kv_capacity_tokens=reading.kv_capacity_tokens,
        prefill_s_per_token=line.s_per_token if line else None,
        prefill_base_s=line.base_s if line else None,
        decode_tokens_per_s=engine.served.decode_tokens_per_s,
        prefix_hit_ratio=engine.prefix_hit_ratio,
        engine_age_s=None if engine.read_at is None else now - engine.read_at,
        served_total=told.served_total,
        refused_total=told.refused_total,
        taken=told.taken,
        residency=replica.residency,
        owner=told.owner,
        owner_taken=told.owner_taken or {},
        term=told.term,
        down_reason=engine.down_reason if told.state is ReplicaState.DOWN else None,
        cards=dict(engine.cards) if told.seq % CARDS_EVERY == 0 else {},
    )
