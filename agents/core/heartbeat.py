"""What the replica says of itself, in heartbeats and refusals: its state, its load, and what each
field of a heartbeat is read from; and when the next one is due.

One is due at the interval (`heartbeat_pace.py`), and GAP_MIN_S after the last one when the
replica's state, fullness or models have changed.

Reads: acks, cuts, engine, fence, hangs, health, leaving, offline, refused_total, replica,
requests, routers, served_total.
Writes: beat_due_at, beat_sent_at, pace, published, seq.
"""

from itertools import islice

from agents.core import adapters, speed_probe
from agents.core.effects import PublishHeartbeat
from agents.core.engine_load import LoadCounts, occupancy
from agents.core.loaded_models import LoadSeconds
from agents.core.state import AgentState
from schemas.ids import ModelId
from schemas.state import (
    ADAPTERS_MAX,
    CARDS_MAX,
    DOWN_DETAIL_CHARS_MAX,
    DownReason,
    Heartbeat,
    ModelCard,
    ReplicaState,
    rounded,
)

GAP_MIN_S = 0.01  # a replica that turns full and not full with every request must not flood the bus
CARDS_EVERY = 10  # heartbeats: model cards and priors hardly ever change


def replica_state(state: AgentState) -> ReplicaState:
    """Whether it takes work, by its engine, its operators and its own end."""
    if state.leaving is not None:
        return state.leaving
    found = ReplicaState.DOWN if state.hangs.hung else state.health.state
    orders = state.routers.orders
    return orders.applied_to(found) if orders.is_drained else found


def is_full(state: AgentState, *, may_queue: bool = False) -> bool:
    """Whether new work would be refused; `may_queue`: work that may wait behind other."""
    requests, engine = state.requests.online, state.engine
    adds = state.cuts.count or engine.limit.is_lowered
    outstanding = _outstanding(state) if adds else len(requests.by_inbox)
    if outstanding >= engine.limit.most:
        return True
    if may_queue or not (engine.reading.waiting or requests.counters.sent_since):
        return False
    return bool(engine.pending(requests.counters))


def load_counts(state: AgentState) -> LoadCounts:
    """The replica's load, of online requests alone."""
    requests = state.requests.online
    at_engine = requests.at_engine + state.cuts.count
    return state.engine.counts(requests.counters, _outstanding(state), at_engine)


def _outstanding(state: AgentState) -> int:
    """Online requests, and what else counts against the most that the engine is given."""
    outstanding = len(state.requests.online.by_inbox)
    if outstanding:
        outstanding += state.cuts.count  # one is always taken: its answer teaches
    if state.engine.limit.is_lowered:  # by what the engine takes of both kinds
        outstanding += state.requests.offline.at_engine
    return outstanding


def publish_if_due(state: AgentState, now: float) -> None:
    """Call it after each event."""
    engine, taken, full = state.engine, replica_state(state), is_full(state)
    loads = adapters.told(state, now) if state.replica.adapters else ()
    if engine.loaded.on_demand:
        loads = (*loads, *engine.loaded.told)
    urgent = (taken, full, engine.models, engine.paths, engine.routes, loads)
    if urgent != state.published:
        state.beat_due_at = state.beat_sent_at + GAP_MIN_S  # the last one is out of date
    elif state.pace.is_slow and _told(state, urgent, now) != state.pace.told:
        state.pace.hasten()
    state.beat_due_at = min(state.beat_due_at, state.beat_sent_at + state.pace.gap_s)
    if now < state.beat_due_at and state.leaving is not ReplicaState.GONE:
        return
    state.published = urgent
    state.pace.sent(_told(state, urgent, now) if _is_at_rest(state, now) else None, now)
    state.beat_sent_at, state.beat_due_at = now, now + state.pace.gap_s
    state.seq += 1
    state.emit(PublishHeartbeat(heartbeat(state, now)))


def _is_at_rest(state: AgentState, now: float) -> bool:
    """Whether nothing is under way that heartbeats tell of."""
    reading = state.engine.reading
    if len(state.requests) or reading.running or reading.waiting:  # the engine's may be of others
        return False
    if state.cuts.count or state.engine.limit.is_lowered:
        return False
    return replica_state(state) is ReplicaState.READY and not _loading(state, now)


def _told(state: AgentState, urgent: object, now: float) -> tuple[object, ...]:
    """Of a replica at rest: where this is as it was, the heartbeat tells nothing new."""
    requests = len(state.requests), state.served_total, state.refused_total
    return urgent, requests, state.engine.reading, state.fence.term, state.fence.owner(now)


def heartbeat(state: AgentState, now: float) -> Heartbeat:
    """The replica as it is now, under the number of the last heartbeat published."""
    replica, engine, requests = state.replica, state.engine, state.requests.online
    taken, counts = replica_state(state), load_counts(state)
    is_open = taken is ReplicaState.READY
    reading, line = engine.reading, engine.prefill.line
    owner, offline, turn = state.fence.owner(now), state.offline, state.seq % CARDS_EVERY
    is_slow = state.pace.is_slow
    admission = None if offline is None else offline.admission
    room_tokens = None if admission is None else admission.room_tokens(now) if is_open else 0
    return Heartbeat(
        region=replica.region,
        replica=replica.replica,
        epoch=replica.epoch,
        seq=state.seq,
        state=taken,
        engine=replica.engine,
        models=engine.models if replica.computes(None) else (),
        full=counts.full,
        pending=counts.pending,
        running=counts.running,
        outstanding=len(requests.by_inbox),
        outstanding_max=engine.limit.most,
        prefill_queued_tokens=requests.prefill_queued_tokens(line, now),
        batch_max=engine.batch_max,
        batch_occupancy=rounded(occupancy(counts.running, engine.batch_max)),
        kv_used_ratio=rounded(reading.kv_used_ratio),
        kv_capacity_tokens=reading.kv_capacity_tokens,
        prefill_s_per_token=rounded(line.s_per_token) if line else None,
        prefill_base_s=rounded(line.base_s) if line else None,
        decode_tokens_per_s=rounded(engine.answers.decode_tokens_per_s),
        prefix_hit_ratio=rounded(engine.prefix_hit_ratio),
        engine_age_s=None if engine.read_at is None else rounded(now - engine.read_at),
        served_total=state.served_total,
        refused_total=state.refused_total,
        taken=state.acks.snapshot(),
        residency=replica.residency,
        owner=owner,
        owner_taken={} if owner is None else state.acks.snapshot(owner),
        term=state.fence.term,
        offline_room_tokens=room_tokens,
        queue_s=None if admission is None else admission.queue_s(now),
        offline_waiting=state.requests.offline.not_sent,
        offline_running=state.requests.offline.at_engine,
        down_reason=_down_reason(state) if taken is ReplicaState.DOWN else None,
        cards=_cards(state) if turn == 0 or is_slow else {},
        paths=engine.paths,
        prefill_prior=(
            speed_probe.prior(state, engine.base_models) if turn == 1 or is_slow else None
        ),
        kv=None if replica.kv is None else replica.kv.report(engine.models),
        loadable=_loadable(state, now),
        loading=(loading := _loading(state, now)),
        adapters_busy=adapters.are_busy(state),
        adapters_free=adapters.free(state),
        routes=engine.routes,
        page_problem=engine.pages.problem if is_open else None,
        too_many=engine.limit.most if engine.limit.is_lowered and is_open else None,
        results=engine.results.report(now) if is_open else None,
        system_first=engine.system_first,
        down_detail=_down_detail(state, taken),
        waited=None if loading else engine.first_waiting(requests, now),
        next_within_s=rounded(state.pace.next_within_s),
    )


def _down_reason(state: AgentState) -> DownReason:
    if state.health.state is not ReplicaState.DOWN:
        return DownReason.HUNG
    return DownReason.ASLEEP if state.health.asleep else DownReason.UNREACHABLE


def _down_detail(state: AgentState, taken: ReplicaState) -> str | None:
    health = state.health
    if taken is ReplicaState.READY or taken is not health.state or health.detail is None:
        return None
    return health.detail[:DOWN_DETAIL_CHARS_MAX]


def _loadable(state: AgentState, now: float) -> LoadSeconds:
    """Models that the engine would load for a request, and adapters that the agent would."""
    loaded, own = state.engine.loaded, adapters.loadable(state, now)
    return (
        dict(islice((loaded.loadable() | own).items(), ADAPTERS_MAX)) if loaded.on_demand else own
    )


def _loading(state: AgentState, now: float) -> LoadSeconds:
    loaded, own = state.engine.loaded, adapters.loading(state, now)
    if not loaded.on_demand:
        return own
    return dict(islice((loaded.being_loaded(now) | own).items(), ADAPTERS_MAX))


def _cards(state: AgentState) -> dict[ModelId, ModelCard]:
    """Of the first models, adapters that could be loaded last."""
    return dict(islice((state.engine.cards | adapters.cards(state)).items(), CARDS_MAX))
