"""A replica's heartbeat: what each of its fields is read from."""

from itertools import islice
from typing import NamedTuple

from agents.core.adapters import Adapters
from agents.core.engine_load import EngineLoad, LoadCounts, occupancy
from agents.core.heartbeat import ReplicaConfig
from agents.core.loaded_models import LoadSeconds
from agents.core.offline_work import OfflineWork
from agents.core.request_tables import RequestTables
from agents.core.routers import Fence, HandoffAcks
from agents.core.speed_probe import SpeedProbe
from schemas.ids import ModelId
from schemas.state import (
    ADAPTERS_MAX,
    CARDS_MAX,
    DownReason,
    Heartbeat,
    ModelCard,
    ReplicaState,
    rounded,
)

CARDS_EVERY = 10  # heartbeats: model cards and priors hardly ever change


class HeartbeatNumbers(NamedTuple):
    """Its own number, and requests since the epoch began."""

    seq: int
    served: int
    refused: int


class HeartbeatFields:
    """Reads the parts of one agent's core."""

    def __init__(
        self,
        replica: ReplicaConfig,
        tables: RequestTables,
        engine: EngineLoad,
        offline: OfflineWork,
        adapters: Adapters,
        fence: Fence,
        acks: HandoffAcks,
        speed: SpeedProbe,
    ) -> None:
        self._replica = replica
        self._tables = tables
        self._engine = engine
        self._offline = offline
        self._adapters = adapters
        self._fence = fence
        self._acks = acks
        self._speed = speed

    def heartbeat(
        self,
        numbers: HeartbeatNumbers,
        counts: LoadCounts,
        state: ReplicaState,
        down_reason: DownReason | None,
        now: float,
    ) -> Heartbeat:
        """The replica as it is now."""
        replica, engine, requests = self._replica, self._engine, self._tables.online
        reading, line = engine.reading, engine.prefill.line
        owner, adapters = self._fence.owner(now), self._adapters
        on_demand = engine.loaded.on_demand
        is_open = state is ReplicaState.READY
        prior = self._speed.prior(engine.base_models) if numbers.seq % CARDS_EVERY == 1 else None
        return Heartbeat(
            region=replica.region,
            replica=replica.replica,
            epoch=replica.epoch,
            seq=numbers.seq,
            state=state,
            engine=replica.engine,
            models=engine.models if replica.computes(None) else (),
            full=counts.full,
            pending=counts.pending,
            running=counts.running,
            outstanding=len(requests.by_inbox),
            outstanding_max=engine.limit.most,
            prefill_queued_tokens=requests.prefill_queued_tokens(line, now),
            batch_max=reading.batch_max,
            batch_occupancy=rounded(occupancy(counts.running, reading.batch_max)),
            kv_used_ratio=rounded(reading.kv_used_ratio),
            kv_capacity_tokens=reading.kv_capacity_tokens,
            prefill_s_per_token=rounded(line.s_per_token) if line else None,
            prefill_base_s=rounded(line.base_s) if line else None,
            decode_tokens_per_s=rounded(engine.answers.decode_tokens_per_s),
            prefix_hit_ratio=rounded(engine.prefix_hit_ratio),
            engine_age_s=None if engine.read_at is None else rounded(now - engine.read_at),
            served_total=numbers.served,
            refused_total=numbers.refused,
            taken=self._acks.snapshot(),
            residency=replica.residency,
            owner=owner,
            owner_taken={} if owner is None else self._acks.snapshot(owner),
            term=self._fence.term,
            offline_room_tokens=self._offline.room_tokens(now, is_open=is_open),
            queue_s=self._offline.queue_s(now),
            offline_waiting=self._offline.waiting,
            offline_running=self._tables.offline.at_engine,
            down_reason=down_reason if state is ReplicaState.DOWN else None,
            cards=self._cards() if numbers.seq % CARDS_EVERY == 0 else {},
            paths=engine.paths,
            prefill_prior=prior,
            kv=None if replica.kv is None else replica.kv.report(engine.models),
            loadable=self._loadable(now) if on_demand else adapters.loadable(now),
            loading=self._loading(now) if on_demand else adapters.loading(now),
            adapters_busy=adapters.are_busy,
            adapters_free=adapters.free,
            routes=engine.routes,
            page_problem=engine.pages.problem if is_open else None,
            results=engine.results.report(now) if is_open else None,
        )

    def _loadable(self, now: float) -> LoadSeconds:
        """Models that the engine would load for a request, and adapters that the agent would."""
        both = self._engine.loaded.loadable() | self._adapters.loadable(now)
        return dict(islice(both.items(), ADAPTERS_MAX))

    def _loading(self, now: float) -> LoadSeconds:
        both = self._engine.loaded.being_loaded(now) | self._adapters.loading(now)
        return dict(islice(both.items(), ADAPTERS_MAX))

    def _cards(self) -> dict[ModelId, ModelCard]:
        """Of the first models, adapters that could be loaded last."""
        return dict(islice((self._engine.cards | self._adapters.cards()).items(), CARDS_MAX))
