"""Whether the process that a connection leads to serves a model, as its list of models says.

An engine may end and another one, with another model, begin on its port. Some answer whatever
model a request names, so an answer is passed on only if the list was read after its connection was
opened: both processes are then the same one, or the older has ended and its answer with it. A kept
connection is covered by the list that scrapes read; a new one costs a reading, which all that wait
for one share. Where the list can't be read, the last one holds: an engine that computes may
answer late, and that it was replaced in this moment is far less likely.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from schemas.ids import ModelId

LOADS_MAX = 64  # the last ones: many more than end during one reading


class ServedModels:
    """Of one engine. `read` reads the list, or raises OSError (a timeout too) or ValueError."""

    def __init__(self, read: Callable[[], Awaitable[Collection[ModelId]]]) -> None:
        self._read = read
        self._models: Collection[ModelId] = ()
        self._began_at = float("-inf")  # the last reading, by time.monotonic
        self._reading: asyncio.Task[None] | None = None
        self._loads: deque[tuple[ModelId, float]] = deque(maxlen=LOADS_MAX)

    def were_read(self, began_at: float, models: Collection[ModelId]) -> None:
        """A reading that began then by time.monotonic."""
        later = [model for model, loaded_at in self._loads if began_at <= loaded_at]
        self._began_at, self._models = began_at, ({*models, *later} if models else models)

    def loaded(self, model: ModelId) -> None:
        """The engine has loaded it: a list whose reading began before may lack it."""
        self._loads.append((model, time.monotonic()))
        if self._models:
            self._models = {*self._models, model}

    async def serves(self, model: ModelId, opened_at: float) -> bool:
        """Whether the process serves that model; `opened_at`: the connection to it."""
        if opened_at > self._began_at and self._reading is not None:
            await asyncio.shield(self._reading)  # it may have begun too early
        if opened_at > self._began_at:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_again())
            await asyncio.shield(self._reading)
        return model in self._models or not self._models

    async def _read_again(self) -> None:
        began_at = time.monotonic()
        try:
            self.were_read(began_at, await self._read())
        except (OSError, ValueError):
            pass
        finally:
            self._reading = None
