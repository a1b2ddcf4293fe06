"""How a request leaves the router, other than by its answer: failed, shed, or refused.

Whoever ends one ends all of it here: its place in the line, its attempt, and the room they took.
A peer's request has its client elsewhere: whatever would fail it here refuses it, and its own
router, told how this region is at that moment, asks somebody else.
"""

from collections.abc import Callable, Iterable

from mesh.core import effects as fx
from mesh.core.federation.guests import Guests
from mesh.core.placing.placement import Place, Placer
from mesh.core.requests.attempts import Attempts
from mesh.core.requests.inflight import Inflight
from mesh.core.requests.request import Request
from mesh.core.waiting.admission import Admission, Late
from mesh.core.waiting.hold_queue import HoldQueue
from mesh.core.waiting.retry_after import RETRY_AFTER_S_MAX
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.state import Digest

SHUTTING_DOWN = "this router is shutting down"


class Ends:
    """Writes to the tables and to `effects`; whether it must end is decided by the caller."""

    def __init__(
        self,
        *,
        inflight: dict[int, Inflight],
        held: HoldQueue,
        guests: Guests,
        admission: Admission,
        attempts: Attempts,
        placer: Placer,
        fresh: Callable[[float], Digest],
        effects: list[fx.Effect],
    ) -> None:
        """`fresh`: this region's digest at that moment, for whoever is refused."""
        self._inflight = inflight
        self._held = held
        self._guests = guests
        self._admission = admission
        self._attempts = attempts
        self._placer = placer
        self._fresh = fresh
        self._effects = effects

    def end(self, record: Inflight, now: float) -> None:
        """It is over; what its client is told is the caller's to say."""
        del self._inflight[record.request.key]
        if record.held_since is not None:
            self._held.remove(record.request)
            self._admission.left(record.request, now)
        self._attempts.leave(record, now)

    def fail(
        self,
        record: Inflight,
        now: float,
        fault: Fault,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        """End it with an error, or refuse it if it is a peer's."""
        self.end(record, now)
        if (inbox := record.request.answer_inbox) is not None:
            self._guests.leave(record.request)
            why = Refusal.DRAINING if fault is Fault.DRAINING else Refusal.NO_REPLICA
            self.refuse(record.request, inbox, why, now)
            return
        self._effects.append(fx.Fail(record.request.key, fault, message, retry_after_s))

    def drained(self, records: Iterable[Inflight], now: float) -> None:
        """End these because this router ends: whoever waits for them hears of it, and whoever
        works for them."""
        for record in list(records):
            if record.held_since is None:
                self._attempts.cancel(record)
            self.fail(record, now, Fault.DRAINING, SHUTTING_DOWN, 1.0)

    def refuse(self, request: Request, inbox: str, why: Refusal, now: float) -> None:
        """A peer's request is not taken, or not kept; `inbox` is where its router hears of it."""
        self._effects.append(fx.RefusePeer(request.key, inbox, why, self._fresh(now)))

    def shed_if_too_late(self, record: Inflight, place: Place | None, now: float) -> bool:
        """Whether it is over: it would miss its objective, or, without one, wait for too long."""
        late = self._admission.late(record, place, now)
        why = late or self._admission.too_long(record, place, now)
        if why is None:
            return False
        joins = place is not None and place.target is None and record.held_since is None
        placed = f"; {place.reason}" if joins and place is not None else ""
        self.shed(record, place, f"{why}{placed}", now, late)
        return True

    def shed(
        self,
        record: Inflight,
        place: Place | None,
        why: str,
        now: float,
        late: Late | None = None,
    ) -> None:
        """Refuse it with its receipt, and say when to come back."""
        self._given_up(record, place, why, now)
        retry_after_s = self._admission.retry_after_s(record.request, late, now)
        self.fail(record, now, Fault.SATURATED, f"no room in time: {why}", retry_after_s)

    def unserved(self, record: Inflight, why: str, now: float) -> None:
        """Nobody who may serve it is there: refuse it with its receipt, until they are back."""
        self._given_up(record, None, why, now)
        self.fail(record, now, Fault.NO_REPLICA, why, RETRY_AFTER_S_MAX)

    def _given_up(self, record: Inflight, place: Place | None, why: str, now: float) -> None:
        """Its last receipt."""
        request = record.request
        last = place or record.place or self._placer.held(request, why)
        shed = last._replace(placement=Placement.SHED, target=None, reason=why)
        attempt, held_s = max(1, record.attempt), record.waited_s(now)
        self._attempts.decided(request, shed, attempt=attempt, held_s=held_s)
