"""The life of a request, its own client's or a peer's: its states, and every transition.

This is the only module that writes to a `RequestRecord`; others read it. A peer's request is the
same record: its answer goes to `request.answer_inbox`, and it ends here as soon as a replica has
it, because that replica answers to the peer's router.

`attempt` numbers the attempt under way. The router ignores events of earlier attempts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from mesh.core.model.request import Request
from mesh.core.placement.placement import PlacementResult
from mesh.core.policies.base import Destination
from schemas.decision import CandidateKind
from schemas.ids import RegionId, ReplicaId

REFUSED_S = 0.1  # about one heartbeat, or one digest
STATUS_NOT_IMPLEMENTED = 501
SERVER_ERRORS = range(500, 600)
SERVER_ERRORS_MAX = 2  # of the engines that one request was tried on


class RequestState(Enum):
    """Where a request is in its life."""

    ARRIVED = auto()  # no decision yet
    HELD = auto()  # in the hold queue
    TRIED = auto()  # an attempt is under way; its client has no byte yet, so another may follow
    STARTED = auto()  # its client has a first byte: only this attempt's answer, or an error event
    ENDED = auto()


class Transition(Enum):
    """What changes a request's state."""

    HOLD = auto()  # no place is available, or its attempt failed: it waits in the hold queue
    DISPATCH = auto()  # an attempt begins on a replica, or through a peer
    START = auto()  # the first byte goes to its client
    END = auto()  # answered, failed, refused, or its client is gone


TRANSITIONS: Mapping[tuple[RequestState, Transition], RequestState] = {
    (RequestState.ARRIVED, Transition.HOLD): RequestState.HELD,
    (RequestState.ARRIVED, Transition.DISPATCH): RequestState.TRIED,
    (RequestState.ARRIVED, Transition.END): RequestState.ENDED,
    (RequestState.HELD, Transition.DISPATCH): RequestState.TRIED,
    (RequestState.HELD, Transition.END): RequestState.ENDED,
    (RequestState.TRIED, Transition.HOLD): RequestState.HELD,
    (RequestState.TRIED, Transition.START): RequestState.STARTED,
    (RequestState.TRIED, Transition.END): RequestState.ENDED,
    (RequestState.STARTED, Transition.START): RequestState.STARTED,
    (RequestState.STARTED, Transition.END): RequestState.ENDED,
}


class ImpossibleTransition(AssertionError):
    """A transition that the table lacks: a defect of the router."""


@dataclass(slots=True)
class RequestRecord:
    """One request, its state and its attempt under way."""

    request: Request
    state: RequestState = RequestState.ARRIVED
    attempt: int = 0
    peer: RegionId | None = None  # region asked in this attempt, None when local
    replica: ReplicaId | None = None  # None until the peer names it
    destination: Destination | None = None  # of this attempt
    handoff: int | None = None  # number of this attempt's hand-off, when local
    attempted_at: float = 0.0
    last_frame_at: float = 0.0  # of this attempt
    held_since: float | None = None
    held_s: float = 0.0
    held_by_peers_s: float = 0.0  # until each of them placed it, or refused it
    place: PlacementResult | None = None  # the last decision, while held
    failures: int = 0
    refusals: int = 0
    avoid: frozenset[str] = frozenset()  # places that failed it; membership only
    refused_by: dict[str, float] = field(default_factory=dict)  # peers, and until when to avoid
    engine_status: int | None = None  # of the last attempt's engine: the edge keeps its error
    server_errors: int = 0  # attempts that engines answered with one

    @property
    def has_started(self) -> bool:
        return self.state is RequestState.STARTED

    @property
    def waits_at_peer(self) -> bool:
        """Whether the peer has reported only that the request is in its hold queue."""
        placed = self.replica is not None or self.has_started
        return self.peer is not None and not placed and self.last_frame_at > self.attempted_at

    def waited_s(self, now: float) -> float:
        return self.held_s + (0.0 if self.held_since is None else now - self.held_since)

    def queued_s(self, now: float) -> float:
        """In hold queues since its arrival: here, in its own region, and in peers that it asked."""
        return self.request.held_before_s + self.held_by_peers_s + self.waited_s(now)

    def avoided(self, now: float) -> frozenset[str]:
        """Places that must not be chosen now."""
        if not self.refused_by:
            return self.avoid
        return self.avoid | {place for place, until in self.refused_by.items() if until > now}

    def is_worth_another(self, failures_max: int) -> bool:
        """Whether to try another replica after a failure.

        A lost connection, a hang or an unreadable answer is the replica's fault: up to
        `failures_max` attempts. An engine's 5xx may be the request's fault (some answer 500 to a
        prompt that is too long) or the engine's (its GPU failed): one more engine is tried. 501 is
        the request's fault; 429 means that this engine is full, which others may not be.
        """
        if self.failures >= failures_max or self.engine_status == STATUS_NOT_IMPLEMENTED:
            return False
        return self.engine_status is None or self.server_errors < SERVER_ERRORS_MAX

    # Transitions.

    def _enter(self, transition: Transition) -> None:
        state = TRANSITIONS.get((self.state, transition))
        if state is None:
            raise ImpossibleTransition(f"{transition.name} of a request that is {self.state.name}")
        self.state = state

    def hold(self, now: float) -> None:
        """It waits in the hold queue from `now` on; the attempt before is over."""
        self._enter(Transition.HOLD)
        self._count_peers_hold(now)
        self.held_since = now
        self.peer = self.replica = self.handoff = self.destination = None

    def dispatch(self, destination: Destination, handoff: int | None, now: float) -> None:
        """The next attempt begins. `handoff`: its number, on a local replica."""
        self._enter(Transition.DISPATCH)
        if self.held_since is not None:
            self.held_s += now - self.held_since
        self.held_since = self.place = self.engine_status = None
        self.attempt += 1
        self.attempted_at = self.last_frame_at = now
        self.handoff, self.destination = handoff, destination
        if destination.kind is CandidateKind.REPLICA:
            self.replica, self.peer = ReplicaId(destination.name), None
        else:
            self.replica, self.peer = None, RegionId(destination.name)

    def start(self, now: float) -> None:
        self._enter(Transition.START)
        self.last_frame_at = now

    def end(self) -> None:
        """Answered, failed, refused, or its client is gone."""
        self._enter(Transition.END)

    # Updates without a transition.

    def decided(self, place: PlacementResult) -> None:
        """The last decision about a request that is held, or about to be."""
        self.place = place

    def placed_by_peer(self, replica: ReplicaId, now: float) -> None:
        """The peer has named the replica that answers."""
        self._count_peers_hold(now)
        self.replica, self.last_frame_at = replica, now

    def _count_peers_hold(self, now: float) -> None:
        if self.waits_at_peer:
            self.held_by_peers_s += now - self.attempted_at

    def progressed(self, now: float) -> None:
        self.last_frame_at = now

    def refused(self, now: float) -> None:
        """The replica or peer did not take it. A peer is avoided, longer after each refusal."""
        self.refusals += 1
        if self.peer is not None:
            self.refused_by[self.peer] = now + REFUSED_S * self.refusals

    def engine_answered(self, status: int | None) -> None:
        """This attempt failed; `status`: of the engine's error, if it answered with one."""
        self.engine_status = status
        if status in SERVER_ERRORS:
            self.server_errors += 1

    def failed(self, *, avoid_place: bool) -> None:
        """This attempt failed before its first byte."""
        self.failures += 1
        place = self.peer or self.replica
        if avoid_place and place is not None:
            self.avoid |= {place}

    def handed_back(self, region: RegionId, replica: ReplicaId) -> None:
        """Its replica belongs to `region` again: from now on as if that peer had placed it."""
        self.peer, self.replica = region, replica
        self.handoff = self.destination = None
