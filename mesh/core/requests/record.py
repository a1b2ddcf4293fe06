"""The life of a request, its own client's or a peer's: its states, and every transition.

This is the only module that writes to a `RequestRecord`; others read it. A peer's request is the
same record: its answer goes to `request.answer_inbox`, and it ends here as soon as a replica has
it, because that replica answers to the peer's router.

`attempt` numbers the attempt under way. The router ignores events of earlier attempts.

An attempt on a pair of replicas has two stages. `prefill` is the first one, whose answer comes to
this router; `replica` and `destination` are the decode replica's from the beginning, where room is
reserved until its stage begins. Where the engines of the pair need both requests at once, so do the
stages begin. Whatever ends the attempt ends both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from mesh.core.model.effects import KvPair
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.placement.placement import PlacementResult
from mesh.core.policies.base import Destination
from schemas.decision import CandidateKind
from schemas.http_statuses import CLIENT_ERRORS, NOT_IMPLEMENTED, SERVER_ERRORS, TOO_MANY
from schemas.ids import RegionId, ReplicaId

REFUSED_S = 0.1  # about one heartbeat, or one digest
CLIENT_ERRORS_MAX = 3  # of the places that one request was tried on, by what others got there
PAIRS = "a pair's stream does not go on from another engine"
SERVER_ERRORS_MAX = 2  # of the engines that one request, or line, was tried on


def is_client_error(status: int | None) -> bool:
    """Whether an engine says by it that the request is wrong."""
    return status in CLIENT_ERRORS and status != TOO_MANY


class RequestState(Enum):
    """Where a request is in its life."""

    ARRIVED = auto()  # no decision yet
    HELD = auto()  # in the hold queue
    TRIED = auto()  # an attempt is under way; its client has no byte yet, so another may follow
    STARTED = auto()  # its client has a first byte: only this attempt's answer, or what follows
    BROKEN = auto()  # its attempt is lost, and the edge looks whether another can go on with it
    ENDED = auto()


class Transition(Enum):
    """What changes a request's state."""

    HOLD = auto()  # no place is available, or its attempt failed: it waits in the hold queue
    DISPATCH = auto()  # an attempt begins on a replica or a pair, or through a peer
    DECODE = auto()  # its second stage begins, on the pair's decode replica
    START = auto()  # the first byte goes to its client
    BREAK = auto()  # its attempt is lost after that, and another may go on with its stream
    END = auto()  # answered, failed, refused, or its client is gone


TRANSITIONS: Mapping[tuple[RequestState, Transition], RequestState] = {
    (RequestState.ARRIVED, Transition.HOLD): RequestState.HELD,
    (RequestState.ARRIVED, Transition.DISPATCH): RequestState.TRIED,
    (RequestState.ARRIVED, Transition.END): RequestState.ENDED,
    (RequestState.HELD, Transition.DISPATCH): RequestState.TRIED,
    (RequestState.HELD, Transition.END): RequestState.ENDED,
    (RequestState.TRIED, Transition.DECODE): RequestState.TRIED,
    (RequestState.TRIED, Transition.HOLD): RequestState.HELD,
    (RequestState.TRIED, Transition.START): RequestState.STARTED,
    (RequestState.TRIED, Transition.END): RequestState.ENDED,
    (RequestState.STARTED, Transition.START): RequestState.STARTED,
    (RequestState.STARTED, Transition.BREAK): RequestState.BROKEN,
    (RequestState.BROKEN, Transition.HOLD): RequestState.HELD,
    (RequestState.BROKEN, Transition.END): RequestState.ENDED,
    (RequestState.STARTED, Transition.END): RequestState.ENDED,
}


class Suspect(NamedTuple):
    """A place whose error may have been the request's fault, until another one answers it."""

    place: str
    what: str  # for people
    is_peer: bool


class Cause(Enum):
    """What ended an attempt before its first byte, and so what it says of its place."""

    PLACE = auto()  # its replica or peer: it is avoided
    PREFILL = auto()  # the prefill replica of a pair, or the transfer
    LINK = auto()  # a link, or silence of a peer that may have done no wrong: counts as a refusal
    PEERS_REPLICA = auto()  # a peer's replica was lost: that region has others
    RESTART = auto()  # another process runs at its place, which may be tried again


MAYBE_INNOCENT = (Cause.LINK, Cause.PEERS_REPLICA)  # places are tried again where no other is left


class ImpossibleTransition(AssertionError):
    """A transition that the table lacks: a defect of the router, or of the batch runner."""


@dataclass(slots=True)
class PrefillStage:
    """The first stage of an attempt on a pair."""

    replica: ReplicaId
    handoff: int
    began_at: float
    pair: KvPair
    reserved: int | None  # room on the decode replica; None once its own hand-off counts
    # Blocks of the prompt that the replica was estimated to hold, and the deepest one's age.
    matched_blocks: int = 0
    matched_at: float = -inf
    is_open: bool = True


@dataclass(slots=True, kw_only=True)
class Failures:
    """What failed of one request, or of one line of a batch job."""

    failures: int = 0  # attempts
    engine_status: int | None = None  # of the last attempt's engine, if it answered with an error
    server_errors: int = 0  # attempts that engines answered with one
    client_errors: int = 0  # attempts whose client error was taken for the engine's own

    def engine_answered(self, status: int | None) -> None:
        """This attempt failed; `status`: of the engine's error, if it answered with one."""
        self.engine_status = status
        if is_client_error(status):
            self.client_errors += 1
        if status in SERVER_ERRORS:
            self.server_errors += 1

    def is_worth_another(self, failures_max: int) -> bool:
        """Whether to try another replica after a failure.

        A lost connection, a hang or an unreadable answer is the replica's fault: up to
        `failures_max` attempts. An engine's 5xx may be the request's fault (some answer 500 to a
        prompt that is too long) or the engine's (its GPU failed): one more engine is tried. 501 is
        the request's fault; 429 means that this engine is full, which others may not be. A client
        error that arrives as a failure is what that engine says to everybody: one more is tried.
        """
        if self.failures >= failures_max or self.engine_status == NOT_IMPLEMENTED:
            return False
        if is_client_error(self.engine_status):
            return self.client_errors < CLIENT_ERRORS_MAX
        return self.engine_status is None or self.server_errors < SERVER_ERRORS_MAX


@dataclass(slots=True)
class RequestRecord(Failures):
    """One request, its state and its attempt under way."""

    request: Request
    state: RequestState = RequestState.ARRIVED
    attempt: int = 0
    peer: RegionId | None = None  # region asked in this attempt, None when local
    replica: ReplicaId | None = None  # None until the peer names it
    destination: Destination | None = None  # of this attempt
    handoff: int | None = None  # number of this attempt's hand-off, when local and sent
    prefill: PrefillStage | None = None  # of this attempt, on a pair
    attempted_at: float = 0.0
    given_at: float = 0.0  # when its replica was sent it, or its peer reported which one was
    last_frame_at: float = 0.0  # of this attempt
    held_since: float | None = None
    held_s: float = 0.0
    held_by_peers_s: float = 0.0  # until each of them placed it, or refused it
    unserved_s: float = 0.0  # of `queued_s`: until a replica served what it needs
    place: PlacementResult | None = None  # the last decision, while held
    refusals: int = 0
    avoid: frozenset[str] = frozenset()  # places that failed it; membership only
    broken_at: frozenset[str] = frozenset()  # where its stream broke last
    broke_because: str = ""  # for people
    maybe_innocent: frozenset[str] = frozenset()  # of `avoid`: a transfer or link may have failed
    refused_by: dict[str, float] = field(default_factory=dict)  # peers, and until when to avoid
    suspects: tuple[Suspect, ...] = ()
    may_continue: bool = False  # the edge keeps what was said, so that another may go on with it
    why_not: str = ""  # for people, where its stream may not
    continuations: int = 0  # times that it broke so
    move_asked: int = 0  # the last attempt of which the edge was asked whether it may be moved

    @property
    def has_started(self) -> bool:
        return self.state is RequestState.STARTED

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt of it is."""
        return self.held_since is None and self.state is not RequestState.BROKEN

    @property
    def is_broken(self) -> bool:
        return self.state is RequestState.BROKEN

    @property
    def waits_at_peer(self) -> bool:
        """Whether the peer has reported only that the request is in its hold queue."""
        placed = self.replica is not None or self.has_started
        return self.peer is not None and not placed and self.last_frame_at > self.attempted_at

    @property
    def is_unheard(self) -> bool:
        """Whether a replica was given it, and has not sent any frame."""
        return self.replica is not None and self.last_frame_at == self.given_at

    @property
    def is_prefilling(self) -> bool:
        """Whether only the first stage of its attempt has begun."""
        return self.prefill is not None and self.prefill.reserved is not None

    @property
    def is_foreign_prefill(self) -> bool:
        """Whether it is a peer's, and stays here for its prefill stage."""
        return self.prefill is not None and not self.request.kind.ends_here

    @property
    def is_handed_over(self) -> bool:
        """Whether its decode replica answers to a peer's router already: it can't be placed
        again."""
        return self.is_foreign_prefill and not self.is_prefilling

    @property
    def working(self) -> ReplicaId | None:
        """The replica whose frames are awaited, None until a peer names it."""
        stage = self.prefill
        return stage.replica if stage is not None and self.is_prefilling else self.replica

    def needs(self, replica: ReplicaId) -> bool:
        """Whether its attempt is lost with that replica of this router's."""
        if self.peer is not None:
            return False
        stage = self.prefill
        in_stage = stage is not None and stage.is_open and not self.has_started
        return self.replica == replica or (
            in_stage and stage is not None and stage.replica == replica
        )

    def will_decode_on(self, replica: ReplicaId) -> bool:
        """Whether that replica of this router's gets its decode stage later."""
        return self.is_prefilling and self.replica == replica

    def waited_s(self, now: float) -> float:
        return self.held_s + (0.0 if self.held_since is None else now - self.held_since)

    def queued_s(self, now: float) -> float:
        """In hold queues since its arrival: here, in its own region, and in peers that it asked."""
        return self.request.held_before_s + self.held_by_peers_s + self.waited_s(now)

    def in_line_s(self, now: float) -> float:
        """In hold queues, since a replica serves what it needs."""
        return self.queued_s(now) - self.unserved_s

    def nobody_serves(self, now: float) -> None:
        self.unserved_s = self.queued_s(now)

    def avoided(self, now: float) -> frozenset[str]:
        """Places that must not be chosen now."""
        if not self.refused_by:
            return self.avoid
        return self.avoid | {place for place, until in self.refused_by.items() if until > now}

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
        self.peer = self.replica = self.handoff = self.destination = self.prefill = None

    def dispatch(
        self,
        destination: Destination,
        handoff: int | None,
        now: float,
        prefill: PrefillStage | None = None,
    ) -> None:
        """The next attempt begins. `handoff`: its number, on a local replica that is sent it.

        `prefill`: its first stage, on a pair.
        """
        self._enter(Transition.DISPATCH)
        if self.held_since is not None:
            self.held_s += now - self.held_since
        self.held_since = self.place = self.engine_status = None
        self.attempt += 1
        self.attempted_at = self.given_at = self.last_frame_at = now
        self.handoff, self.destination, self.prefill = handoff, destination, prefill
        if destination.kind is CandidateKind.REPLICA:
            self.replica, self.peer = ReplicaId(destination.name), None
        else:
            self.replica, self.peer = None, RegionId(destination.name)

    def decode(self, handoff: int, now: float) -> None:
        """The second stage begins, under that number."""
        self._enter(Transition.DECODE)
        assert self.prefill is not None, "a decode stage follows a prefill stage"
        self.prefill.reserved = None
        self.handoff, self.last_frame_at = handoff, now

    def start(self, now: float, *, may_continue: bool = False, why_not: str = "") -> None:
        self._enter(Transition.START)
        self.last_frame_at = now
        self.may_continue, self.why_not = may_continue, why_not
        if may_continue and self.prefill is not None:
            self.may_continue, self.why_not = False, PAIRS

    def broke(self, detail: str, *, avoid_place: bool) -> None:
        """Its stream broke; no attempt is under way. It goes to no place that failed it before, as
        long as there are others."""
        place = self.peer or self.replica
        self._enter(Transition.BREAK)
        self.broke_because = detail
        self.broken_at = frozenset({place} if avoid_place and place else ())
        self.avoid |= self.broken_at
        self.failures = self.client_errors = self.server_errors = 0
        self.continuations += 1
        self.peer = self.replica = self.handoff = self.destination = self.prefill = None

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
        self.replica, self.given_at, self.last_frame_at = replica, now, now

    def _count_peers_hold(self, now: float) -> None:
        if self.waits_at_peer:
            self.held_by_peers_s += now - self.attempted_at

    def goes_on(self, prompt: Prompt, unable: frozenset[str]) -> None:
        """Its prompt has grown by what was said; its objective for a first token is met. It goes to
        none of the places that are `unable` to go on with it."""
        self.request = replace(self.request, prompt=prompt, slo_ttft_s=None)
        self.avoid |= unable

    def asks_to_move(self) -> None:
        """The edge is asked whether another engine could go on with it, once an attempt."""
        self.move_asked = self.attempt

    def forgives(self, unable: frozenset[str]) -> None:
        """Of places that it was to avoid, only these are left, and where it broke last."""
        self.avoid = self.broken_at | unable

    def avoid_peer(self) -> None:
        """No engine of the peer that refused it may serve it, or the one that it chose can't go on
        with a turn."""
        if self.peer is not None:
            self.avoid |= {self.peer}

    def progressed(self, now: float) -> None:
        self.last_frame_at = now

    def refused(self, now: float) -> None:
        """A replica or the peer did not take it. A peer is avoided, longer after each refusal."""
        self.refusals += 1
        if self.peer is not None:
            self.refused_by[self.peer] = now + REFUSED_S * self.refusals

    def suspect(self, suspect: Suspect) -> None:
        """That place will be judged if another one answers."""
        self.suspects += (suspect,)

    def prefilled(self) -> None:
        """Its prefill stage is over."""
        assert self.prefill is not None, "only a stage ends"
        self.prefill.is_open = False

    def failed(self, cause: Cause) -> None:
        """This attempt failed before its first byte. An error that the decode engine of a pair
        answers with may be of the transfer, and so of either engine."""
        self.failures += cause is not Cause.LINK
        place, stage = self.peer or self.replica, self.prefill
        if cause is Cause.RESTART or place is None:
            return
        in_prefill = cause is Cause.PREFILL
        if stage is None or not in_prefill:
            self.avoid |= {place}
        if stage is not None and (in_prefill or self.engine_status is not None):
            self.avoid |= {stage.replica}
            self.maybe_innocent |= self.avoid & {place}
        if cause in MAYBE_INNOCENT:
            self.maybe_innocent |= {place}

    def trust_again(self) -> None:
        """No other place is left: decode replicas that only a transfer failed on may be tried, and
        peers that only a link failed to."""
        self.avoid, self.maybe_innocent = self.avoid - self.maybe_innocent, frozenset()

    def handed_back(self, region: RegionId, replica: ReplicaId) -> None:
        """Its replica belongs to `region` again: from now on as if that peer had placed it."""
        self.peer, self.replica = region, replica
        self.handoff = self.destination = None
