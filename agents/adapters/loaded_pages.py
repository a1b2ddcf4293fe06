"""What engines that load models on demand say of which are loaded.

A list of models may have a `status` for each (llama-swap, llama.cpp's router mode, transformers
serve). Ollama lists the loaded ones in `/api/ps`, llama-swap those that are not stopped in
`/running`, LM Studio has each one's state in `/api/v0/models`. Which of these pages an engine has
is found out once, and again when it was away. One that answers neither with such a page nor that it
has none is asked again, TRIES_MAX times in all; until then the engine may load on demand.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import orjson

from agents.core.loaded_models import NO_STATES, ModelState, States
from schemas.ids import ModelId

Row = Mapping[str, Any]
TRIES_MAX = 10
LATEST = ":latest"  # which Ollama adds to a name without a tag

_STATES = {
    **dict.fromkeys(("loaded", "ready", "running"), ModelState.LOADED),
    **dict.fromkeys(("loading", "starting"), ModelState.LOADING),
    **dict.fromkeys(
        ("unloaded", "not-loaded", "not_loaded", "stopped", "stopping", "shutdown", "sleeping"),
        ModelState.UNLOADED,
    ),
}


class Listed(Protocol):
    """A list of models."""

    @property
    def base(self) -> tuple[ModelId, ...]: ...
    @property
    def states(self) -> States: ...
    @property
    def aliases(self) -> Mapping[ModelId, ModelId]: ...


def state_of(status: object) -> ModelState | None:
    """What a status means: a text, or an object with one as its `value`. None for any other."""
    if isinstance(status, dict):
        status = status.get("value")
    return _STATES.get(status.lower()) if isinstance(status, str) else None


def _ollama(row: Row) -> tuple[object, ModelState | None]:
    return row.get("model") or row.get("name"), ModelState.LOADED


def _llama_swap(row: Row) -> tuple[object, ModelState | None]:
    return row.get("model"), state_of(row.get("state"))


def _lm_studio(row: Row) -> tuple[object, ModelState | None]:
    return row.get("id"), state_of(row.get("state"))


# Of each page: the key of its list, and how a row is read.
PAGES: Mapping[str, tuple[str, Callable[[Row], tuple[object, ModelState | None]]]] = {
    "/api/ps": ("models", _ollama),
    "/running": ("running", _llama_swap),
    "/api/v0/models": ("data", _lm_studio),
}


class LoadedPages:
    """Of one engine. `get`: reads a page; empty where there is none, None where that is unknown."""

    def __init__(self, get: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._get = get
        self._not_there: set[str] = set()
        self._tries: dict[str, int] = {}  # of pages that answered neither way
        self.is_unknown = False  # whether it says what is loaded
        self._page: str | None = None
        self._last = NO_STATES

    def restarted(self) -> None:
        """Another engine may have its place."""
        self._not_there.clear()
        self._tries.clear()
        self._page, self._last = None, NO_STATES

    async def states(self, listed: Listed, *, has_page: bool) -> States:
        """Of the models listed; empty if it says nothing of them. `has_page`: it has a page of
        metrics, as no engine with one of these has."""
        if has_page:
            return listed.states
        pages = PAGES if self._page is None else (self._page,)
        for path in pages:
            if path in self._not_there:
                continue
            found = None
            if (data := await self._get(path)) is not None:
                found = _named(data, *PAGES[path])
                if found is None and self._page is None:
                    self._not_there.add(path)
            elif self._page is None:
                self._tries[path] = self._tries.get(path, 0) + 1
                if self._tries[path] >= TRIES_MAX:
                    self._not_there.add(path)
            if found is not None:
                self._page = path
                self._last = dict(_told(listed, found))
                break
        tried = self._tries.keys() if self._page is None else ()
        unsettled = any(path not in self._not_there for path in tried)
        self.is_unknown = unsettled and not listed.states
        known = self._last if self._page is not None else NO_STATES
        return {**listed.states, **{name: known[name] for name in listed.base if name in known}}


def _named(
    data: bytes, key: str, read: Callable[[Row], tuple[object, ModelState | None]]
) -> dict[object, ModelState] | None:
    """The models on a page; None if it is another page."""
    try:
        page = orjson.loads(data)
    except ValueError:
        return None
    rows = page.get(key) if isinstance(page, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    read_rows = [read(row) for row in rows]
    if any(not isinstance(name, str) or state is None for name, state in read_rows):
        return None
    return {name: state for name, state in read_rows if state is not None}


def _told(
    listed: Listed, found: Mapping[object, ModelState]
) -> Iterable[tuple[ModelId, ModelState]]:
    for name in listed.base:
        state = found.get(listed.aliases.get(name, name)) or found.get(f"{name}{LATEST}")
        yield name, state or ModelState.UNLOADED
