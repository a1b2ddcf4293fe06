"""The life of a request, its own client's or a peer's: its states, and every transition.

This is the only module that writes to a `RequestRecord`; all others ask it. A peer's request is
the same record: `request.answer_inbox` says where its answer goes, and it ends here as soon as a
replica has it, because that replica answers to the peer's router.

`attempt` numbers the attempt under way. An event that names another attempt is out of date, and
whoever receives it ignores it (`is_current`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from mesh.core.model.replica_names import split_replica_name
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

    ARRIVED = auto()  # nothing is decided yet
    HELD = auto()  # in the hold queue
    TRIED = auto()  # an attempt is under way; its client has seen nothing, so another may follow
    STARTED = auto()  # its client has a first byte: this attempt's answer, or an error event
    ENDED = auto()


class Transition(Enum):
    """What happens to it."""

    HOLD = auto()  # nobody takes it at present, or its attempt came to nothing: it waits
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
    """One request and what has become of it so far."""

    request: Request
    state: RequestState = RequestState.ARRIVED
    attempt: int = 0
    peer: RegionId | None = None  # region asked in this attempt, None when local
    replica: ReplicaId | None = None  # None while a peer has not said which
    destination: Destination | None = None  # of this attempt, until it is left
    handoff: int | None = None  # number of this attempt's hand-off, when local
    attempted_at: float = 0.0
    last_frame_at: float = 0.0  # of this attempt
    held_since: float | None = None
    held_s: float = 0.0
    place: PlacementResult | None = None  # the last decision, while held
    failures: int = 0
    refusals: int = 0
    avoid: frozenset[str] = frozenset()  # places that failed it; membership only
    refused_by: dict[str, float] = field(default_factory=dict)  # peers, and until when to wait
    engine_status: int | None = None  # of the last attempt's engine: the edge keeps its error
    server_errors: int = 0  # attempts that engines answered with one

    # What others ask.

    @property
    def is_held(self) -> bool:
        """Whether it waits in the hold queue."""
        return self.held_since is not None

    @property
    def is_tried(self) -> bool:
        """Whether an attempt is under way that may still be replaced by another."""
        return self.state is RequestState.TRIED

    @property
    def has_started(self) -> bool:
        """Whether its client has seen a byte."""
        return self.state is RequestState.STARTED

    def is_current(self, attempt: int) -> bool:
        """Whether that attempt is the one under way."""
        return self.attempt == attempt and self.held_since is None

    @property
    def adopted_from(self) -> RegionId | None:
        """The region of the adopted replica that it is tried on, if it is."""
        if self.peer or self.replica is None:
            return None
        return split_replica_name(self.replica).region

    def is_at(self, replica: ReplicaId) -> bool:
        """Whether it is tried on that replica, known by this name here."""
        return self.peer is None and self.replica == replica

    @property
    def waits_at_peer(self) -> bool:
        """Whether all that came of this attempt is word that it waits in a peer's hold queue."""
        placed = self.replica is not None or self.has_started
        return self.peer is not None and not placed and self.last_frame_at > self.attempted_at

    def waited_s(self, now: float) -> float:
        """Seconds in the hold queue so far."""
        return self.held_s + (0.0 if self.held_since is None else now - self.held_since)

    def avoided(self, now: float) -> frozenset[str]:
        """Where it should not be tried at present."""
        if not self.refused_by:
            return self.avoid
        return self.avoid | {place for place, until in self.refused_by.items() if until > now}

    def is_worth_another(self, failures_max: int) -> bool:
        """Whether a replica that has not failed it may do better.

        A lost connection, a hang or an unreadable answer says something of the replica, so others
        are asked, up to `failures_max` attempts. An engine's own 5xx may be the request's fault
        (some answer 500 to a prompt that is too long), or the engine's (one that has lost its GPU):
        one more engine tells the two apart. 501 is always the request's fault; 429 says that this
        engine is full, which others may not be.
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
        """No attempt is under way: it waits from `now` on."""
        self._enter(Transition.HOLD)
        self.held_since = now
        self.peer = self.replica = None

    def dispatch(self, place: PlacementResult, now: float) -> Destination:
        """The next attempt begins where `place` says."""
        self._enter(Transition.DISPATCH)
        target = place.target
        assert target is not None, "a place to go to"
        self.held_s, self.held_since, self.place = self.waited_s(now), None, None
        self.attempt += 1
        self.attempted_at = self.last_frame_at = now
        self.engine_status = None
        if place.is_local:
            self.replica, self.peer = ReplicaId(target), None
            self.destination = Destination(CandidateKind.REPLICA, target)
        else:
            self.replica, self.peer = None, RegionId(target)
            self.destination = Destination(CandidateKind.PEER, target)
        return self.destination

    def start(self, now: float) -> None:
        """Its client has the first byte."""
        self._enter(Transition.START)
        self.last_frame_at = now

    def end(self) -> None:
        """It is over, whatever its client was sent."""
        self._enter(Transition.END)

    # What is noted without a transition.

    def decided(self, place: PlacementResult) -> None:
        """The last decision about a request that waits, or is going to."""
        self.place = place

    def handed_off(self, number: int) -> None:
        """The replica's table counts this attempt under that number."""
        self.handoff = number

    def left(self) -> None:
        """This attempt takes no room anywhere any more."""
        self.handoff = self.destination = None

    def placed_by_peer(self, replica: ReplicaId, now: float) -> None:
        """The peer that was asked has said which replica answers."""
        self.replica, self.last_frame_at = replica, now

    def progressed(self, now: float) -> None:
        """A frame of this attempt came."""
        self.last_frame_at = now

    def refused(self, now: float) -> None:
        """Whoever was asked did not take it: a peer is asked again later, longer each time."""
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
        """Its adopted replica belongs to `region` again: as if that one had placed it there."""
        self.peer, self.replica = region, replica
