"""Attempts: where they begin and where they are left, with the room they take meanwhile.

Every way in and out of an attempt is here, so that what it occupies (a hand-off to a replica, a
forwarded request) is counted once and given back once, and every placement has its receipt.
"""

from collections.abc import Callable

from mesh.core import effects as fx
from mesh.core.federation.peers import PeerTable
from mesh.core.placing.placement import Place, Placer
from mesh.core.policies.base import Spot
from mesh.core.region.names import apart
from mesh.core.region.replicas import ReplicaTable
from mesh.core.requests.inflight import Inflight
from mesh.core.requests.request import Request, Served
from schemas.decision import CandidateKind, Decision, Placement
from schemas.ids import RegionId, ReplicaId


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
        self, request: Request, place: Place, *, attempt: int = 1, held_s: float = 0.0
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

    def begin(self, record: Inflight, place: Place, now: float) -> None:
        """Begin an attempt of a client's request where `place` says."""
        assert place.target is not None, "a place to go to"
        request = record.request
        record.release(now)
        self.decided(request, place, attempt=record.attempt, held_s=record.held_s)
        if place.placement is Placement.LOCAL:
            replica = ReplicaId(place.target)
            record.spot = Spot(CandidateKind.REPLICA, replica)
            record.replica, record.peer = replica, None
            record.handoff = self._hand_off(request, place, replica, record.attempt, None, now)
        else:
            record.replica, record.peer = None, RegionId(place.target)
            self._peers.forwarded(record.peer, now)
            record.spot = Spot(CandidateKind.PEER, record.peer)
            self._placer.placed(request, record.spot, now)
            forward = fx.Forward(request.key, record.attempt, record.peer, held_s=record.held_s)
            self._effects.append(forward)

    def begin_for_peer(
        self, request: Request, inbox: str, place: Place, now: float, held_s: float = 0.0
    ) -> None:
        """Hand a peer's request to a local replica, which answers to the peer's `inbox`, or send
        it on to another region, whose replica will. `held_s`: seconds that it was held here."""
        assert place.target is not None, "a place to go to"
        self.decided(request, place)
        if place.placement is Placement.PEER:
            peer = RegionId(place.target)
            self._peers.forwarded(peer, now)
            self._placer.placed(request, Spot(CandidateKind.PEER, peer), now)
            held_s += request.held_before_s
            self._effects.append(fx.Forward(request.key, 1, peer, inbox, held_s))
            return
        replica = ReplicaId(place.target)
        self._hand_off(request, place, replica, 1, inbox, now)
        self._replicas.relay(replica, inbox, request.deadline)

    def _hand_off(
        self,
        request: Request,
        place: Place,
        replica: ReplicaId,
        attempt: int,
        inbox: str | None,
        now: float,
    ) -> int:
        prefill_tokens = place.prefill_tokens
        handoff = self._replicas.hand_off(replica, request.prompt.tokens, prefill_tokens, now)
        self._placer.placed(request, Spot(CandidateKind.REPLICA, replica), now)
        region, name = apart(replica)
        self._effects.append(
            fx.Dispatch(
                request.key,
                attempt,
                name,
                handoff,
                inbox,
                prefill_tokens,
                place.may_queue,
                region,
                self._term(region or self._region),
            )
        )
        return handoff

    def began(self, record: Inflight, now: float) -> None:
        """The answer has begun: its hand-off waits no longer."""
        if record.handoff is not None and record.replica is not None:
            self._replicas.began(record.replica, record.handoff)
        if record.spot is not None:
            self._placer.began(record.request, record.spot, now)

    def served(self, record: Inflight, served: Served | None, now: float) -> None:
        """The whole answer has come: what it cost is a lesson, unless nothing is to be learned."""
        if record.spot is not None and served is not None:
            self._placer.served(record.request, record.spot, served, now)

    def leave(self, record: Inflight, now: float) -> None:
        """The attempt under way, if any, takes no room any more."""
        if record.handoff is not None and record.replica is not None:
            self._replicas.over(record.replica, record.handoff)
        if record.spot is not None:
            self._placer.left(record.request, record.spot, now)
        record.handoff = record.spot = None

    def rest(self, record: Inflight, now: float, sent_on_to: RegionId | None = None) -> None:
        """Whoever did not do this attempt gets no other work until it speaks again.

        `sent_on_to`: where the peer that was asked had sent it on to, if it was refused there.
        """
        if record.peer is not None:
            self._peers.refused(sent_on_to or record.peer, now)
        elif record.replica is not None:
            self._replicas.refused(record.replica, now)

    def cancel(self, record: Inflight) -> None:
        """Tell whoever works on it that nobody waits for the answer any more."""
        region, replica = record.peer, record.replica
        if region is None and replica is not None:
            region, replica = apart(replica)
        self._effects.append(
            fx.CancelAttempt(record.request.key, record.attempt, region or self._region, replica)
        )

    def hand_back(self, record: Inflight, now: float) -> None:
        """Its replica belongs to another region now: as if that one had placed it there."""
        assert record.replica is not None, "an attempt on an adopted replica"
        region, replica = apart(record.replica)
        self.leave(record, now)
        record.peer, record.replica = region, replica
