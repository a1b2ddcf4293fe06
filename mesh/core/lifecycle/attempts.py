"""Attempts: where they begin and where they are left, with the room they take meanwhile.

Every way in and out of an attempt is here, so that what it occupies (a hand-off to a replica, a
forwarded request) is counted once and given back once, and every placement has its receipt.
"""

from collections.abc import Callable, Iterable

from mesh.core.lifecycle.admission import RETRY_AFTER_S_MAX, Admission, LateFirstToken
from mesh.core.lifecycle.forwarded import ForwardedQueue
from mesh.core.lifecycle.hold_queue import HoldQueue
from mesh.core.lifecycle.record import RequestRecord
from mesh.core.model import effects as fx
from mesh.core.model.replica_names import split_replica_name
from mesh.core.model.request import Request, Served
from mesh.core.placement.placement import PlacementResult, Placer
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import Decision, Placement
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId
from schemas.state import Digest


class Attempts:
    """Writes to the tables and to `effects`; whether and where is decided by the caller."""

    def __init__(
        self,
        *,
        region: RegionId,
        replicas: ReplicaTable,
        peers: PeerTable,
        placer: Placer,
        effects: list[fx.Effect],
        term: Callable[[RegionId], int | None] = lambda region: None,
    ) -> None:
        """`term`: of the lease by which this router owns a region's replicas."""
        self._region = region
        self._replicas = replicas
        self._peers = peers
        self._placer = placer
        self._effects = effects
        self._term = term

    def decided(
        self, request: Request, place: PlacementResult, *, attempt: int = 1, held_s: float = 0.0
    ) -> None:
        """The receipt of a placement, whatever it is."""
        local = place.placement is Placement.LOCAL
        decision = Decision(
            request=request.request_id,
            region=self._region,
            policy=place.policy,
            placement=place.placement,
            replica=place.target if local else None,
            peer=None if local else place.target,
            hops=request.hops + (place.placement is Placement.PEER),
            attempt=attempt,
            held_s=held_s,
            reason=place.reason,
            residency=request.residency,
            candidates=place.candidates,
            considered=place.considered,
        )
        self._effects.append(fx.Decided(request.key, decision))

    def begin(self, record: RequestRecord, place: PlacementResult, now: float) -> None:
        """Begin an attempt where `place` says.

        A peer's request leaves this router with it: the replica answers to the peer's inbox.
        """
        request = record.request
        destination = record.dispatch(place, now)
        self.decided(request, place, attempt=record.attempt, held_s=record.held_s)
        if record.peer is not None:
            self._peers.forwarded(record.peer, now)
            self._placer.placed(request, destination, now)
            forward = fx.Forward(request.key, record.attempt, record.peer, held_s=record.held_s)
            self._effects.append(forward)
            return
        replica = ReplicaId(destination.name)
        prefill_tokens, inbox = place.prefill_tokens, request.answer_inbox
        handoff = self._replicas.hand_off(replica, request.prompt.tokens, prefill_tokens, now)
        self._placer.placed(request, destination, now)
        region, name = split_replica_name(replica)
        term = self._term(region or self._region)
        self._effects.append(
            fx.Dispatch(
                request.key,
                record.attempt,
                name,
                handoff,
                inbox,
                prefill_tokens,
                place.may_queue,
                region,
                term,
            )
        )
        if inbox is None:
            record.handed_off(handoff)
        else:
            self._replicas.relay(replica, inbox, request.deadline)
            record.end()

    def began(self, record: RequestRecord, now: float) -> None:
        """The answer has begun: its hand-off waits no longer."""
        if record.handoff is not None and record.replica is not None:
            self._replicas.began(record.replica, record.handoff)
        if record.destination is not None:
            self._placer.began(record.request, record.destination, now)

    def served(self, record: RequestRecord, served: Served | None, now: float) -> None:
        """The whole answer has come: what it cost is a lesson, unless nothing is to be learned."""
        if record.destination is not None and served is not None:
            self._placer.served(record.request, record.destination, served, now)

    def leave(self, record: RequestRecord, now: float) -> None:
        """The attempt under way, if any, takes no room any more."""
        if record.handoff is not None and record.replica is not None:
            self._replicas.over(record.replica, record.handoff)
        if record.destination is not None:
            self._placer.left(record.request, record.destination, now)
        record.left()

    def rest(self, record: RequestRecord, now: float) -> None:
        """Whoever did not do this attempt gets no other work until it speaks again."""
        if record.peer is not None:
            self._peers.refused(record.peer, now)
        elif record.replica is not None:
            self._replicas.refused(record.replica, now)

    def cancel(self, record: RequestRecord) -> None:
        """Tell whoever works on it that nobody waits for the answer any more."""
        region, replica = record.peer, record.replica
        if region is None and replica is not None:
            region, replica = split_replica_name(replica)
        self._effects.append(
            fx.CancelAttempt(record.request.key, record.attempt, region or self._region, replica)
        )

    def hand_back(self, record: RequestRecord, now: float) -> None:
        """Its replica belongs to another region now: as if that one had placed it there."""
        assert record.replica is not None, "an attempt on an adopted replica"
        region, replica = split_replica_name(record.replica)
        self.leave(record, now)
        assert region is not None, "adopted replicas are named with their region"
        record.handed_back(region, replica)


# How a request leaves the router, other than by its answer: failed, shed, or refused.
#
# Whoever ends one ends all of it here: its place in the line, its attempt, and the room they took.
# A peer's request has its client elsewhere: whatever would fail it here refuses it, and its own
# router, told how this region is at that moment, asks somebody else.


SHUTTING_DOWN = "this router is shutting down"


class Completion:
    """Writes to the tables and to `effects`; whether it must end is decided by the caller."""

    def __init__(
        self,
        *,
        inflight: dict[int, RequestRecord],
        held: HoldQueue,
        guests: ForwardedQueue,
        admission: Admission,
        attempts: Attempts,
        placer: Placer,
        fresh: Callable[[float], Digest],
        effects: list[fx.Effect],
    ) -> None:
        """`fresh`: this region's digest at that moment, for whoever is refused."""
        self._inflight = inflight
        self._held = held
        self._forwarded_queue = guests
        self._admission = admission
        self._attempts = attempts
        self._placer = placer
        self._fresh = fresh
        self._effects = effects

    def end(self, record: RequestRecord, now: float) -> None:
        """It is over; what its client is told is the caller's to say."""
        del self._inflight[record.request.key]
        record.end()
        if record.held_since is not None:
            self._held.remove(record.request)
            self._admission.left(record.request, now)
        self._attempts.leave(record, now)

    def fail(
        self,
        record: RequestRecord,
        now: float,
        fault: Fault,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        """End it with an error, or refuse it if it is a peer's."""
        self.end(record, now)
        if (inbox := record.request.answer_inbox) is not None:
            self._forwarded_queue.leave(record.request)
            why = Refusal.DRAINING if fault is Fault.DRAINING else Refusal.NO_REPLICA
            self.refuse(record.request, inbox, why, now)
            return
        self._effects.append(fx.Fail(record.request.key, fault, message, retry_after_s))

    def drained(self, records: Iterable[RequestRecord], now: float) -> None:
        """End these because this router ends: whoever waits for them hears of it, and whoever
        works for them."""
        for record in list(records):
            if record.held_since is None:
                self._attempts.cancel(record)
            self.fail(record, now, Fault.DRAINING, SHUTTING_DOWN, 1.0)

    def refuse(self, request: Request, inbox: str, why: Refusal, now: float) -> None:
        """A peer's request is not taken, or not kept; `inbox` is where its router hears of it."""
        self._effects.append(fx.RefusePeer(request.key, inbox, why, self._fresh(now)))

    def shed_if_too_late(
        self, record: RequestRecord, place: PlacementResult | None, now: float
    ) -> bool:
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
        record: RequestRecord,
        place: PlacementResult | None,
        why: str,
        now: float,
        late: LateFirstToken | None = None,
    ) -> None:
        """Refuse it with its receipt, and say when to come back."""
        self._given_up(record, place, why, now)
        retry_after_s = self._admission.retry_after_s(record.request, late, now)
        self.fail(record, now, Fault.SATURATED, f"no room in time: {why}", retry_after_s)

    def unserved(self, record: RequestRecord, why: str, now: float) -> None:
        """Nobody who may serve it is there: refuse it with its receipt, until they are back."""
        self._given_up(record, None, why, now)
        self.fail(record, now, Fault.NO_REPLICA, why, RETRY_AFTER_S_MAX)

    def _given_up(
        self, record: RequestRecord, place: PlacementResult | None, why: str, now: float
    ) -> None:
        """Its last receipt."""
        request = record.request
        last = place or record.place or self._placer.held(request, why)
        shed = last._replace(placement=Placement.SHED, target=None, reason=why)
        attempt, held_s = max(1, record.attempt), record.waited_s(now)
        self._attempts.decided(request, shed, attempt=attempt, held_s=held_s)
