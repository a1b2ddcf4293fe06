"""Everything that may happen to a router. Times are not in events: `handle` is given `now`."""

from dataclasses import dataclass

from mesh.core.model.request import NOTHING_SAID, Request, Served
from schemas.gossip import TrieAsk, TrieDelta, TriePart
from schemas.ids import RegionId, ReplicaId
from schemas.state import Digest, Heartbeat, Lease


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client, or a peer's router, wants an answer."""

    request: Request


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody waits for this answer any more."""

    key: int


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """A replica of this region spoke, or one of a region that it has adopted."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class DigestSeen:
    """A peer region's router spoke."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class RttMeasured:
    """A ping to a peer region came back; `rtt_s` is None for one that did not."""

    region: RegionId
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class TrieSeen:
    """A router of a peer region, or of our own, told peers what its region gained and lost."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class TriePartSeen:
    """A part of a peer router's whole set, as an answer to our question."""

    part: TriePart


@dataclass(frozen=True, slots=True)
class SiblingSeen:
    """Another router of this region told what it placed on which replica."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class SiblingPartSeen:
    """A part of all that such a router knows, as an answer to our question."""

    part: TriePart


@dataclass(frozen=True, slots=True)
class TrieAsked:
    """A router of that region missed something of what this one told."""

    ask: TrieAsk
    region: RegionId
    inbox: str


@dataclass(frozen=True, slots=True)
class LeaseHeard:
    """The stream of a region's lease took a write, and numbered it."""

    lease: Lease
    seq: int


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """What that stream says to our own claim: `seq` is the number of its newest write, then.

    None: nobody answers for the stream.
    """

    number: int
    granted: bool
    seq: int | None


@dataclass(frozen=True, slots=True)
class PlacedByPeer:
    """A peer's router found a place for a forwarded request."""

    key: int
    attempt: int
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    """Not taken. `replica` is None when a whole peer region refuses. -1: count unknown."""

    key: int
    attempt: int
    reason: str
    region: RegionId
    replica: ReplicaId | None
    pending: int
    running: int


@dataclass(frozen=True, slots=True)
class AttemptProgressed:
    """Frames of the answer arrive: the replica lives, whatever its heartbeats say."""

    key: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The client has been sent a first byte: from here on nothing may be placed again."""

    key: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Taken, or never delivered, and no answer came of it.

    `status`: the engine did answer, with this error, which the edge keeps to pass on.
    """

    key: int
    attempt: int
    detail: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The engine's whole answer is here. `served` is None if nothing can be learned from it: its
    end was lost, or it ended with an error of the engine's."""

    key: int
    attempt: int
    served: Served | None = NOTHING_SAID


@dataclass(frozen=True, slots=True)
class PrefixKept:
    """The edge keeps that prefix's text, in a body of so many bytes; None: it can't."""

    prefix: int
    body_bytes: int | None


@dataclass(frozen=True, slots=True)
class BusLost:
    """Nothing is heard any more and nothing can be said."""


@dataclass(frozen=True, slots=True)
class BusReturned:
    """The bus was away: work sent and answers under way may have been lost with it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; finish what is there."""


@dataclass(frozen=True, slots=True)
class DrainOver:
    """There is no more time to finish in: whoever still waits is to be told so."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: at least ten times a second."""


Event = (
    RequestArrived
    | ClientGone
    | HeartbeatSeen
    | DigestSeen
    | RttMeasured
    | TrieSeen
    | TriePartSeen
    | SiblingSeen
    | SiblingPartSeen
    | TrieAsked
    | LeaseHeard
    | LeaseAnswered
    | PlacedByPeer
    | AttemptRefused
    | AttemptProgressed
    | AnswerStarted
    | AttemptFailed
    | AnswerEnded
    | PrefixKept
    | BusLost
    | BusReturned
    | Drain
    | DrainOver
    | Tick
)
