"""Which models an engine has loaded, and so which of them its agent may ask by itself.

Engines that load on demand (Ollama, llama-swap, llama.cpp's router mode, transformers serve, LM
Studio) list what they could serve. A request for a model that is not loaded loads it, often in the
place of the one that clients use, and each one starts its time of idleness anew. So an agent asks
by itself (probes of speed, of a hang) only for a model that `LoadedModels.may_ask`:
- an engine of one model that says nothing of loading has it loaded;
- where the engine says what is loaded, a loaded one;
- else, and while it is not known whether the engine says it, the one whose answer a client got
  last, for RECENT_S.
In each case not while a client's request for another model waits for its first byte: the engine
may be about to change.

Which routes such an engine answers is found out without a model, by requests without a body, and
from clients' requests (`agents.core.model_routes`).

A load is measured as a client sees it: from sending the request to its first byte.
"""

from collections.abc import Collection, Mapping
from enum import Enum

from schemas.ids import ModelId
from schemas.state import ADAPTERS_MAX, ModelCard, rounded

RECENT_S = 30.0
LOAD_S_MAX = 600.0  # the longest request: what waits for longer waits no more
LOAD_WEIGHT = 0.3  # of a new load in the average
LEFT_S_MIN = 0.1  # of a load that takes longer than usual

LoadSeconds = dict[ModelId, float | None]


class ModelState(Enum):
    """What an engine says of one model."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADED = "unloaded"


States = Mapping[ModelId, ModelState]
NO_STATES: States = {}
NO_LOADS: LoadSeconds = {}


def is_one_model(names: Collection[ModelId], cards: Mapping[ModelId, ModelCard]) -> bool:
    """Whether these are one model, under one name or several."""
    if len(names) == 1:
        return True
    roots = (cards[name].root if name in cards else None for name in names)
    return len({root or name for root, name in zip(roots, names, strict=True)}) == 1


def loads_on_demand(
    names: Collection[ModelId], cards: Mapping[ModelId, ModelCard], states: States
) -> bool:
    """Whether an engine with these models, adapters aside, may have to load one for a request."""
    return bool(states) or not is_one_model(names, cards)


def loads_nothing(model: ModelId, states: States) -> bool:
    """Whether a request for it does: it is loaded, and none is about to take its place."""
    return states.get(model) is ModelState.LOADED and ModelState.LOADING not in states.values()


class LoadedModels:
    """Of one engine. Fed with each list of its models and with clients' requests for them."""

    def __init__(self) -> None:
        self.on_demand = False  # else everything that is listed is loaded
        self._names: tuple[ModelId, ...] = ()
        self._states = NO_STATES
        # The last request of a client that was sent: its model, when, and whether it has a byte.
        self._last: ModelId | None = None
        self._last_at = float("-inf")
        self._is_answered = False
        self._asked_at: dict[ModelId, float] = {}  # of models that have to be loaded for a client
        self._load_s: dict[ModelId, float] = {}
        self._usual_s: float | None = None  # of any of them

    def listed(
        self,
        names: tuple[ModelId, ...],
        cards: Mapping[ModelId, ModelCard],
        states: States,
        now: float,
        *,
        unknown: bool = False,
    ) -> None:
        """The engine was asked for its models. `names`: without adapters; `unknown`: whether it
        says what is loaded."""
        if not states and not self.on_demand and not unknown and names == self._names:
            return
        self.on_demand = unknown or loads_on_demand(names, cards, states)
        if names != self._names:
            self._load_s = {name: each for name, each in self._load_s.items() if name in names}
        self._names, self._states = names, states
        self._asked_at = {
            name: at
            for name, at in self._asked_at.items()
            if name in states and now - at < LOAD_S_MAX
        }

    def sent(self, model: ModelId, now: float) -> None:
        """A client's request for it goes to the engine. For engines that load `on_demand`."""
        self._last, self._last_at, self._is_answered = model, now, False
        if self._states.get(model) in (ModelState.UNLOADED, ModelState.LOADING):
            self._asked_at.setdefault(model, now)

    def answered(self, model: ModelId, now: float) -> None:
        """A client's request for it has the first byte of a good answer."""
        if model == self._last or self._is_answered:
            self._last, self._last_at, self._is_answered = model, now, True
        asked_at = self._asked_at.pop(model, None)
        if asked_at is not None:
            load_s = now - asked_at
            before = self._load_s.get(model, load_s)
            self._load_s[model] = before + LOAD_WEIGHT * (load_s - before)
            usual_s = load_s if self._usual_s is None else self._usual_s
            self._usual_s = usual_s + LOAD_WEIGHT * (load_s - usual_s)

    def failed(self, model: ModelId, now: float) -> None:
        """A client's request for it has no good answer, or ended: how long a load takes is not
        known by it."""
        if model == self._last and not self._is_answered:
            self._last_at = now - RECENT_S  # it waits no more
        self._asked_at.pop(model, None)

    def may_ask(self, model: ModelId, now: float) -> bool:
        """Whether the agent may send it a request of its own."""
        if not self.on_demand:
            return True
        is_recent = now - self._last_at < RECENT_S
        if is_recent and not self._is_answered and model != self._last:
            return False
        if self._states:
            return self._states.get(model) is ModelState.LOADED
        return is_recent and self._is_answered and model == self._last

    def to_probe(self, models: tuple[ModelId, ...]) -> tuple[ModelId, ...]:
        """Of these models, those of which one may be asked whether an engine that clients wait for
        computes: where it loads on demand, what a client asked for last, which it has to load."""
        return (self._last,) if self.on_demand and self._last in models else models

    @property
    def loading(self) -> bool:
        """Whether it is loading one, or has to for a client's request that waits for it."""
        return bool(self._asked_at) or ModelState.LOADING in self._states.values()

    def loadable(self) -> LoadSeconds:
        """Those that are not loaded, each with the seconds that a load takes; None before one was
        measured."""
        if not self._states:
            return NO_LOADS
        names = [name for name in self._names if self._states.get(name) is ModelState.UNLOADED]
        expected = {name: self._expected_s(name) for name in names if name not in self._asked_at}
        return {
            name: None if each is None else rounded(each)
            for name, each in list(expected.items())[:ADAPTERS_MAX]
        }

    def being_loaded(self, now: float) -> LoadSeconds:
        """Those that it loads now, each with the seconds that this still takes."""
        if not self._states:
            return NO_LOADS
        told = (name for name, state in self._states.items() if state is ModelState.LOADING)
        found: LoadSeconds = {}
        for name in sorted({*told, *self._asked_at})[:ADAPTERS_MAX]:
            expected_s = self._expected_s(name)
            if expected_s is not None:
                since = self._asked_at.get(name, now)
                expected_s = rounded(max(LEFT_S_MIN, expected_s - (now - since)))
            found[name] = expected_s
        return found

    @property
    def told(self) -> tuple[object, ...]:
        """Of which routers learn each change at once."""
        if not self._states:
            return ()
        return tuple(self._states.items()), tuple(self._asked_at)

    def _expected_s(self, model: ModelId) -> float | None:
        return self._load_s.get(model, self._usual_s)
