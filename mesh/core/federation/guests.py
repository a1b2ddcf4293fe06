"""Peers' requests that wait here: in the region's one line, at their place by arrival.

A request goes to the region where its first token is expected soonest, and that may be one where
it must wait as well, because its prefix is there or because the line is shorter. It waits there as
those of the region's own clients do and is told from them only by where its end is said: its own
router keeps the client, and hears HELD at once and every HELD_S, or PLACED, or REFUSED. HELD says
how many regions the request has passed, so that its router knows in how many lines it has waited.

Rejected: refusing at once whoever can't be placed, and letting its own region ask again. News of a
free place reaches that region half a round trip later than those who wait beside the replica, so
between two busy regions nothing would be exchanged, and each would compute every prefix itself.

Whoever asked may be gone meanwhile. It isn't told to us: when the request is placed, its router
tells the replica to stop.
"""

from mesh.core import effects as fx
from mesh.core.requests.request import Request
from mesh.core.waiting.hold_queue import HoldQueue
from schemas.exchange import HELD_S

HELD_MAX = 128  # bodies are kept with them, in the one budget for all bodies


class Guests:
    """Knows who of those held is a guest, and keeps their routers informed."""

    def __init__(self, held: HoldQueue, effects: list[fx.Effect]) -> None:
        self._held = held
        self._effects = effects
        self._said_at: dict[int, float] = {}  # by key

    @property
    def is_full(self) -> bool:
        """Whether no more may wait here."""
        return len(self._said_at) >= HELD_MAX or self._held.is_full

    def wait(self, request: Request, now: float) -> None:
        """It has joined the line."""
        self._say_held(request, now)

    def check(self, request: Request, now: float) -> None:
        """A tick: say so again, if it is a guest and time."""
        if now - self._said_at.get(request.key, now) >= HELD_S:
            self._say_held(request, now)

    def leave(self, request: Request) -> None:
        """It waits no more."""
        self._said_at.pop(request.key, None)

    def _say_held(self, request: Request, now: float) -> None:
        assert request.answer_inbox is not None
        self._said_at[request.key] = now
        self._effects.append(fx.TellHeld(request.answer_inbox, request.hops))
