"""An agent's looks at its engine: when, and what it sees.

The live cadence (agents.runtime): every `reading_s` while the agent holds answers, half as often
while it holds none, and at once when something says that the engine changed. A look is one
event, at the moment of its reading; that it began a little earlier is told, because what was
handed over meanwhile may not be in it.
"""

from collections.abc import Callable

from agents.core.events import EngineFailed, EngineRead
from mesh.sim.engine import Engine
from mesh.sim.event_queue import EventQueue
from mesh.sim.work import MODEL

LOOK_S = 0.002  # from its beginning to its reading
IDLE_LOOK_S = 0.1
LOOK_GAP_S = 0.01
MODELS_EVERY_S = 1.0
REFUSED_CONNECTION = "connection refused"


class Looks:
    """`begin` and `end` with the agent; `hurry` when it wants one now."""

    def __init__(
        self,
        engine: Engine,
        queue: EventQueue,
        reading_s: float,
        seen: Callable[[EngineRead | EngineFailed], None],
        is_busy: Callable[[], bool],
    ) -> None:
        """`seen` is told what each look saw; `is_busy`: whether the agent holds answers then."""
        self._engine = engine
        self._queue = queue
        self._reading_s = reading_s
        self._seen = seen
        self._is_busy = is_busy
        self._number = 0  # of the next look; one that was put off is not taken
        self._looked_at = float("-inf")
        self._models_due_at = float("-inf")

    def begin(self) -> None:
        """Look now, and go on."""
        self._models_due_at = float("-inf")
        self._look(self._number)

    def end(self) -> None:
        """Look no more."""
        self._number += 1

    def hurry(self) -> None:
        """Look at once, at the models too."""
        self._models_due_at = float("-inf")
        self._number += 1
        self._queue.at(self._looked_at + LOOK_GAP_S, self._look, self._number)

    def _look(self, number: int) -> None:
        if number != self._number:
            return
        now = self._looked_at = self._queue.now
        self._seen(self._failed(now) if self._engine.is_down else self._read(now))
        every_s = self._reading_s if self._is_busy() else max(self._reading_s, IDLE_LOOK_S)
        if number == self._number:  # else something asked for a look meanwhile
            self._queue.at(now + every_s, self._look, number)

    def _read(self, now: float) -> EngineRead:
        models = None
        if now >= self._models_due_at:
            models = (MODEL,)
            self._models_due_at = now + MODELS_EVERY_S
        return EngineRead(now - LOOK_S, self._engine.reading(), models)

    def _failed(self, now: float) -> EngineFailed:
        self._models_due_at = float("-inf")
        return EngineFailed(
            began_at=now - LOOK_S,
            heard_at=float("-inf"),
            timed_out=False,
            detail=REFUSED_CONNECTION,
        )
