"""LoRA adapters of one engine: which it has, which the agent loads for a request, and who waits.

An agent that loads adapters is given their names and paths and how many its engine may have at
once. A request for one that is not loaded waits while the engine loads it, one load of a name at a
time; where the engine has as many as it may, the least recently used one that no request needs is
unloaded first. Only names come over the bus: a path is what the operator gave for it.

A load that fails sends its requests elsewhere, and the adapter counts as not loadable here for
BACKOFF_S. What is loaded is read anew with each list of the engine's models, because operators may
load and unload at the engine itself; a list that was read before a load ended says nothing of it.

Reads: replica, requests.
Writes: adapters, engine.
"""

from math import inf

from agents.core.effects import HoldWork, LoadAdapter
from agents.core.events import AdapterLoadEnded, EngineScraped
from agents.core.requests import AgentRequest
from agents.core.state import AdapterLoad, AgentState
from agents.core.work_message import WorkRequest
from schemas.exchange import Refusal
from schemas.ids import ModelId
from schemas.state import ModelCard, ReplicaState, rounded

BACKOFF_S = 30.0
WAITING_MAX = 64  # requests for one adapter; their bodies are held in memory
LOAD_WEIGHT = 0.3  # of a new load in the average
LEFT_S_MIN = 0.1  # of a load that takes longer than usual


def scraped(state: AgentState, event: EngineScraped, before: ReplicaState) -> None:
    """Correct what the engine serves by this scrape. `before` the scrape: a process that comes
    back may load what the last one could not."""
    table = state.adapters
    if before is not ReplicaState.READY:
        table.failed_until.clear()
    if event.models is None or not state.replica.adapters:
        return
    table.models = tuple(name for name in event.models if name not in event.adapters)
    if event.began_at > table.changed_at:
        leaving = {load.instead_of for load in table.loads.values()}
        there = event.adapters.difference(leaving, table.loads)
        table.used_at = {name: table.used_at.get(name, -inf) for name in sorted(there)}
    _tell_engine(state)


def _tell_engine(state: AgentState) -> None:
    """Keep what is known of the engine up to date."""
    table, engine = state.adapters, state.engine
    engine.models = (*table.models, *table.used_at)
    engine.adapters = frozenset(table.used_at)


def reason_against(state: AgentState, work: WorkRequest, now: float) -> Refusal | None:
    """Why the agent loads no adapter for this request; None if it does. None is loaded for
    offline work."""
    adapter, may_load = work.model, not work.offline
    known = adapter in state.replica.adapters
    if not (known and may_load and state.engine.answers_on(work.path)):
        return Refusal.WRONG_MODEL
    load = state.adapters.loads.get(adapter)
    if load is not None:
        return None if len(load.waiting) < WAITING_MAX else Refusal.FULL
    if not _may_load(state, adapter, now):
        return Refusal.WRONG_MODEL
    return None if _has_room(state) else Refusal.FULL


def is_loaded(state: AgentState, model: ModelId) -> bool:
    """Whether the engine can be given a request for that model or adapter at once."""
    return model not in state.replica.adapters or model in state.adapters.used_at


def wait(state: AgentState, record: AgentRequest, body: bytes, now: float) -> bool:
    """Let it wait for its adapter, and begin the load; False where there is no room any more."""
    if reason_against(state, record.work, now) is not None:
        return False
    table, adapter = state.adapters, record.work.model
    state.emit(HoldWork(record.inbox))
    load = table.loads.get(adapter)
    if load is None:
        victim = None if free(state) else _victim(state)
        if victim is not None:
            del table.used_at[victim]
            _tell_engine(state)
        load = table.loads[adapter] = AdapterLoad(now, victim)
        state.emit(LoadAdapter(adapter, state.replica.adapters[adapter].path, victim))
    load.waiting[record.inbox] = record, body
    state.requests.of(record).queue(record)
    return True


def used(state: AgentState, model: ModelId, now: float) -> None:
    """A request was taken for it, which is loaded."""
    state.adapters.used_at[model] = now


def withdraw(state: AgentState, record: AgentRequest) -> None:
    """It ends without having been at the engine."""
    load = state.adapters.loads.get(record.work.model)
    if load is not None:
        load.waiting.pop(record.inbox, None)


def load_ended(
    state: AgentState, event: AdapterLoadEnded, now: float
) -> list[tuple[AgentRequest, bytes]]:
    """A load is over: who waited for it, with their bodies."""
    table, adapter = state.adapters, event.adapter
    table.changed_at = now
    load = table.loads.pop(adapter)
    if event.good:
        table.used_at[adapter] = now
        before = table.load_s.get(adapter, event.load_s)
        table.load_s[adapter] = before + LOAD_WEIGHT * (event.load_s - before)
        usual_s = event.load_s if table.usual_s is None else table.usual_s
        table.usual_s = usual_s + LOAD_WEIGHT * (event.load_s - usual_s)
    else:
        table.failed_until[adapter] = now + BACKOFF_S
    _tell_engine(state)
    return list(load.waiting.values())


# For the heartbeat.


def loadable(state: AgentState, now: float) -> dict[ModelId, float | None]:
    """Adapters that a request would be loaded for, with the seconds of a load."""
    names = (name for name in state.replica.adapters if name not in state.adapters.loads)
    return {
        name: rounded(_expected_s(state, name)) for name in names if _may_load(state, name, now)
    }


def loading(state: AgentState, now: float) -> dict[ModelId, float | None]:
    """Those being loaded, with the seconds that are left."""
    loads = state.adapters.loads
    return {name: _left_s(state, name, load, now) for name, load in loads.items()}


def free(state: AgentState) -> int:
    """How many could be loaded before one has to be unloaded."""
    table = state.adapters
    return max(0, state.replica.adapters_max - len(table.used_at) - len(table.loads))


def are_busy(state: AgentState) -> bool:
    """Whether those that it has are all needed: none could be loaded now."""
    return bool(state.replica.adapters) and not _has_room(state)


def told(state: AgentState, now: float) -> tuple[object, ...]:
    """Of which routers learn each change at once."""
    return (*loadable(state, now),), (*state.adapters.loads,), are_busy(state)


def cards(state: AgentState) -> dict[ModelId, ModelCard]:
    """Of those that are not loaded."""
    models = state.adapters.models
    first = models[0] if models else None
    return {
        name: ModelCard(parent=source.base or first)
        for name, source in state.replica.adapters.items()
        if name not in state.adapters.used_at
    }


def _expected_s(state: AgentState, adapter: ModelId) -> float | None:
    return state.adapters.load_s.get(adapter, state.adapters.usual_s)


def _left_s(state: AgentState, adapter: ModelId, load: AdapterLoad, now: float) -> float | None:
    expected_s = _expected_s(state, adapter)
    if expected_s is None:
        return None
    return rounded(max(LEFT_S_MIN, expected_s - (now - load.began_at)))


# Room.


def _may_load(state: AgentState, adapter: ModelId, now: float) -> bool:
    table, source = state.adapters, state.replica.adapters.get(adapter)
    if source is None or adapter in table.used_at or now < table.failed_until.get(adapter, -inf):
        return False
    return bool(table.models) if source.base is None else source.base in table.models


def _has_room(state: AgentState) -> bool:
    return free(state) > 0 or _victim(state) is not None


def _victim(state: AgentState) -> ModelId | None:
    """The least recently used that no request taken needs; none that only the operator of the
    engine has loaded."""
    needed = {record.work.model for record in state.requests.all()}
    idle = [
        (at, name)
        for name, at in state.adapters.used_at.items()
        if name in state.replica.adapters and name not in needed
    ]
    return min(idle)[1] if idle else None
