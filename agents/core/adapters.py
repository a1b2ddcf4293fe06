"""LoRA adapters of one engine: which it has, which the agent loads for a request, and who waits.

An agent that loads adapters is given their names and paths and how many its engine may have at
once. A request for one that is not loaded waits while the engine loads it, one load of a name at a
time; where the engine has as many as it may, the least recently used one that no request needs is
unloaded first. Only names come over the bus: a path is what the operator gave for it.

A load that fails sends its requests elsewhere, and the adapter counts as not loadable here for
BACKOFF_S. What is loaded is read anew with each list of the engine's models, because operators may
load and unload at the engine itself; a list that was read before a load ended says nothing of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from agents.core.effects import AgentEffect, HoldWork, LoadAdapter
from agents.core.engine_load import EngineLoad
from agents.core.events import AdapterLoadEnded, EngineScraped
from agents.core.heartbeat import AdapterSource
from agents.core.request_tables import RequestTables
from agents.core.requests import AgentRequest, WorkRequest
from schemas.exchange import Refusal
from schemas.ids import ModelId
from schemas.state import ModelCard, ReplicaState, rounded

BACKOFF_S = 30.0
WAITING_MAX = 64  # requests for one adapter; their bodies are held in memory
LOAD_WEIGHT = 0.3  # of a new load in the average
NO_ADAPTERS: tuple[object, ...] = ()
LEFT_S_MIN = 0.1  # of a load that takes longer than usual


@dataclass(slots=True)
class AdapterLoad:
    """One load under way, with the requests that wait for it and their bodies, by inbox."""

    began_at: float
    instead_of: ModelId | None
    waiting: dict[str, tuple[AgentRequest, bytes]] = field(default_factory=dict)


class Adapters:
    """Of one agent. It reads the tables of requests and queues those that wait."""

    def __init__(
        self,
        known: Mapping[ModelId, AdapterSource],
        most: int,
        tables: RequestTables,
        engine: EngineLoad,
    ) -> None:
        """`known`: those that it may load; empty: none. `most`: that the engine may have at once.
        It keeps the models of `engine` up to date."""
        self._known = known
        self._most = most
        self._tables = tables
        self._engine = engine
        self._models: tuple[ModelId, ...] = ()  # of the engine, without adapters
        self._used_at: dict[ModelId, float] = {}  # of those loaded: last needed, as last looked
        self._loads: dict[ModelId, AdapterLoad] = {}
        self._changed_at = -inf  # a load ended
        self._failed_until: dict[ModelId, float] = {}
        self._load_s: dict[ModelId, float] = {}
        self._usual_s: float | None = None  # of any of them

    def scraped(self, event: EngineScraped, before: ReplicaState) -> None:
        """Correct what the engine serves by this scrape. `before` the scrape: a process that comes
        back may load what the last one could not."""
        if before is not ReplicaState.READY:
            self._failed_until.clear()
        if event.models is None or not self._known:
            return
        self._models = tuple(name for name in event.models if name not in event.adapters)
        if event.began_at > self._changed_at:
            leaving = {load.instead_of for load in self._loads.values()}
            there = event.adapters.difference(leaving, self._loads)
            self._used_at = {name: self._used_at.get(name, -inf) for name in sorted(there)}
        self._publish()

    def _publish(self) -> None:
        self._engine.models = (*self._models, *self._used_at)
        self._engine.adapters = frozenset(self._used_at)

    def reason_against(self, work: WorkRequest, now: float) -> Refusal | None:
        """Why the agent loads no adapter for this request; None if it does. None is loaded for
        offline work or warm-ups."""
        adapter, may_load = work.model, not (work.offline or work.warm)
        if adapter not in self._known or not may_load or not self._engine.answers_on(work.path):
            return Refusal.WRONG_MODEL
        load = self._loads.get(adapter)
        if load is not None:
            return None if len(load.waiting) < WAITING_MAX else Refusal.FULL
        if not self._may_load(adapter, now):
            return Refusal.WRONG_MODEL
        return None if self._has_room else Refusal.FULL

    def is_loaded(self, model: ModelId) -> bool:
        """Whether the engine can be given a request for that model or adapter at once."""
        return model in self._used_at or model not in self._known

    def wait(self, record: AgentRequest, body: bytes, now: float) -> list[AgentEffect] | None:
        """Let it wait for its adapter, and begin the load; None where there is no room any more."""
        adapter = record.work.model
        done: list[AgentEffect] = []
        if self.reason_against(record.work, now) is not None:
            return None
        load = self._loads.get(adapter)
        if load is None:
            victim = None if self.free else self._victim()
            if victim is not None:
                del self._used_at[victim]
                self._publish()
            load = self._loads[adapter] = AdapterLoad(now, victim)
            done.append(LoadAdapter(adapter, self._known[adapter].path, victim))
        load.waiting[record.inbox] = record, body
        self._tables.of(record).queue(record)
        return [HoldWork(record.inbox), *done]

    def used(self, model: ModelId, now: float) -> None:
        """A request for it was taken."""
        if model in self._used_at:
            self._used_at[model] = now

    def withdraw(self, record: AgentRequest) -> None:
        """It ends without having been at the engine."""
        load = self._loads.get(record.work.model)
        if load is not None:
            load.waiting.pop(record.inbox, None)

    def ended(self, event: AdapterLoadEnded, now: float) -> list[tuple[AgentRequest, bytes]]:
        """A load is over: who waited for it, with their bodies."""
        adapter, self._changed_at = event.adapter, now
        load = self._loads.pop(adapter)
        if event.good:
            self._used_at[adapter] = now
            self._measure(adapter, event.load_s)
        else:
            self._failed_until[adapter] = now + BACKOFF_S
        self._publish()
        return list(load.waiting.values())

    def _measure(self, adapter: ModelId, load_s: float) -> None:
        before = self._load_s.get(adapter, load_s)
        self._load_s[adapter] = before + LOAD_WEIGHT * (load_s - before)
        usual_s = load_s if self._usual_s is None else self._usual_s
        self._usual_s = usual_s + LOAD_WEIGHT * (load_s - usual_s)

    # For the heartbeat.

    def loadable(self, now: float) -> dict[ModelId, float | None]:
        """Adapters that a request would be loaded for, with the seconds of a load."""
        names = (name for name in self._known if name not in self._loads)
        return {
            name: rounded(self._expected_s(name)) for name in names if self._may_load(name, now)
        }

    def loading(self, now: float) -> dict[ModelId, float | None]:
        """Those being loaded, with the seconds that are left."""
        return {name: self._left_s(name, load, now) for name, load in self._loads.items()}

    @property
    def free(self) -> int:
        """How many could be loaded before one has to be unloaded."""
        return max(0, self._most - len(self._used_at) - len(self._loads))

    @property
    def are_busy(self) -> bool:
        """Whether those that it has are all needed: none could be loaded now."""
        return bool(self._known) and not self._has_room

    def state(self, now: float) -> tuple[object, ...]:
        """Of which routers learn each change at once."""
        if not self._known:
            return NO_ADAPTERS
        return (*self.loadable(now),), (*self._loads,), self.are_busy

    def cards(self) -> dict[ModelId, ModelCard]:
        """Of those that are not loaded."""
        models = self._models
        first = models[0] if models else None
        return {
            name: ModelCard(parent=source.base or first)
            for name, source in self._known.items()
            if name not in self._used_at
        }

    def _expected_s(self, adapter: ModelId) -> float | None:
        return self._load_s.get(adapter, self._usual_s)

    def _left_s(self, adapter: ModelId, load: AdapterLoad, now: float) -> float | None:
        expected_s = self._expected_s(adapter)
        if expected_s is None:
            return None
        return rounded(max(LEFT_S_MIN, expected_s - (now - load.began_at)))

    # Room.

    def _may_load(self, adapter: ModelId, now: float) -> bool:
        source = self._known.get(adapter)
        if (
            source is None
            or adapter in self._used_at
            or now < self._failed_until.get(adapter, -inf)
        ):
            return False
        return bool(self._models) if source.base is None else source.base in self._models

    @property
    def _has_room(self) -> bool:
        return self.free > 0 or self._victim() is not None

    def _victim(self) -> ModelId | None:
        """The least recently used that no request taken needs; none that only the operator of the
        engine has loaded."""
        needed = {record.work.model for record in self._tables.all()}
        idle = [
            (at, name)
            for name, at in self._used_at.items()
            if name in self._known and name not in needed
        ]
        return min(idle)[1] if idle else None
