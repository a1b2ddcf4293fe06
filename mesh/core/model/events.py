"""All events of a router. They carry no times: `handle` gets `now`."""

from dataclasses import dataclass

from mesh.core.model.prompt import Prompt
from mesh.core.model.request import NOTHING_REPORTED, Request, Served
from mesh.core.model.settings import RouterSettings
from schemas.gossip import TrieAsk, TrieDelta, TriePart
from schemas.held import HeldDelta, HeldPart
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.state import Digest, Heartbeat, Lease


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client's request, or a peer's."""

    request: Request


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client has hung up."""

    key: int


@dataclass(frozen=True, slots=True)
class CostEstimated:
    """A request has ended without its engine's counts; these are the edge's estimates, in tokens:
    of the prompt what was not cached, and of the answer what came."""

    key: int
    model: ModelId
    uncached: int
    output: int


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """The heartbeat of a replica of this region, or of an adopted one."""

    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class DigestSeen:
    """The digest of a peer region's router."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class RttMeasured:
    """A ping to a peer region came back; `rtt_s` is None for one that did not."""

    region: RegionId
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class TrieSeen:
    """A delta for peers of a router of a peer region, or of this one."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class TriePartSeen:
    """A part of a router's whole set, sent on request."""

    part: TriePart


@dataclass(frozen=True, slots=True)
class SiblingSeen:
    """A sibling's delta: what it placed on which replica."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class SiblingPartSeen:
    """A part of a sibling's whole index, sent on request."""

    part: TriePart


@dataclass(frozen=True, slots=True)
class TrieAsked:
    """A router of that region requests deltas of this one that it missed."""

    ask: TrieAsk
    region: RegionId
    inbox: str


@dataclass(frozen=True, slots=True)
class HeldDeltaSeen:
    """What a replica's engine came to hold, and holds no longer, by its agent."""

    replica: ReplicaId
    delta: HeldDelta


@dataclass(frozen=True, slots=True)
class HeldPartSeen:
    """A part of all that it holds, sent on request."""

    replica: ReplicaId
    part: HeldPart


@dataclass(frozen=True, slots=True)
class LeaseHeard:
    """The stream of a region's lease took a write, and numbered it."""

    lease: Lease
    seq: int


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """The stream's answer to this router's claim; `seq`: its newest write. None: no answer."""

    number: int
    granted: bool
    seq: int | None


@dataclass(frozen=True, slots=True)
class PlacedByPeer:
    """A peer's router placed a forwarded request."""

    key: int
    attempt: int
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill stage of the attempt is over: its decode replica can have the KV cache.

    `served`: what it cost; None if its engine computed nothing.
    """

    key: int
    attempt: int
    served: Served | None = None


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    """Refused. `replica`: None when a whole peer region refuses. -1: count unknown.

    `prefill`: the prefill replica of a pair refused.
    """

    key: int
    attempt: int
    reason: str
    region: RegionId
    replica: ReplicaId | None
    pending: int
    running: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class AttemptProgressed:
    """Frames of the answer arrive: the replica is alive, even without heartbeats."""

    key: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The client was sent a first byte: the request may not be placed again.

    `shows_ttft`: whether it came when the first token was there. The first byte of an answer that
    is not streamed comes with its last, that of an error at once. `may_continue`: the edge keeps
    what is said, so that another attempt may go on with it. `why_not`: for people, of a stream of
    which it does not.
    """

    key: int
    attempt: int
    shows_ttft: bool = True
    may_continue: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Movable:
    """The edge's answer to `MayMove`, where another engine could go on with the stream. `kinds`: of
    engines that can; empty: all."""

    key: int
    attempt: int
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContinuationRead:
    """The edge's answer to `Continue`. `prompt`: the request's and what was said; None where no
    other engine could go on. `kinds`: of engines that can; empty: all."""

    key: int
    attempt: int
    detail: str
    prompt: Prompt | None = None
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt failed. `status`: of the engine's error answer, which the edge keeps.

    `preempted`: its agent gave offline work back, for online requests. `prefill`: the prefill stage
    failed; with a client error as its `status`, the request would fail everywhere. `blameless`: by
    the bus, a link, or time; the engine may be well. `replica_lost`: so its region's router says.
    """

    key: int
    attempt: int
    detail: str
    status: int | None = None
    preempted: bool = False
    prefill: bool = False
    blameless: bool = False
    replica_lost: bool = False


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The whole answer has arrived. `served`: None if its end was lost or an engine's error.

    `shows_ttft`: as of `AnswerStarted`, which comes too late where the answer arrived at once.
    """

    key: int
    attempt: int
    served: Served | None = NOTHING_REPORTED
    shows_ttft: bool = False


@dataclass(frozen=True, slots=True)
class BusLost:
    """The router's bus connection is lost."""


@dataclass(frozen=True, slots=True)
class BusReturned:
    """It is back: work and frames sent meanwhile may have been lost."""


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Other settings hold from now on: by an operator's order, or a file that was read again.

    Of them the core takes `mesh.core.model.settings.CHANGEABLE`; the host has checked that they
    fit together.
    """

    settings: RouterSettings


@dataclass(frozen=True, slots=True)
class MoveStreams:
    """Which of the region's own replicas operators want empty from now on: streams of those that
    are drained go on elsewhere. `everywhere`: of all."""

    replicas: tuple[ReplicaId, ...] = ()
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; finish what is there."""


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The time to finish is over: requests that are left fail."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: at least ten times a second, five times while no request is under way."""


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
    | HeldDeltaSeen
    | HeldPartSeen
    | LeaseHeard
    | LeaseAnswered
    | PlacedByPeer
    | PrefillEnded
    | AttemptRefused
    | AttemptProgressed
    | AnswerStarted
    | Movable
    | ContinuationRead
    | AttemptFailed
    | AnswerEnded
    | BusLost
    | BusReturned
    | SettingsChanged
    | MoveStreams
    | Drain
    | DrainOver
    | Tick
)
