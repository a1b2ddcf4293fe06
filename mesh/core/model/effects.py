"""Everything a router may want done. The edge performs effects in order and decides nothing."""

from dataclasses import dataclass

from mesh.core.model.request import Request
from schemas.decision import Decision
from schemas.gossip import TrieAnswer, TrieAsk, TrieDelta
from schemas.http import Fault
from schemas.ids import RegionId, ReplicaId
from schemas.state import Digest, Lease


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Publish the request on a replica's work subject.

    For a client's request the answer comes to this attempt's own inbox; for a peer's request it
    goes to the inbox the peer gave, and the peer is told who will send it.
    """

    key: int
    attempt: int
    replica: ReplicaId
    handoff: int
    answer_inbox: str | None
    prefill_tokens: int = 0  # prompt tokens that the replica is not believed to hold
    may_queue: bool = False  # the replica may take it though other work is pending
    region: RegionId | None = None  # whose the replica was before it was adopted; None: this one's
    term: int | None = None  # of the lease by which this region owns it, if there is one


@dataclass(frozen=True, slots=True)
class Forward:
    """Ask a peer region to place a client's request. `held_s`: seconds that it was held here."""

    key: int
    attempt: int
    peer: RegionId
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Tell the replica, if it is known yet, that nobody waits for this attempt's answer."""

    key: int
    attempt: int
    region: RegionId
    replica: ReplicaId | None


@dataclass(frozen=True, slots=True)
class RefusePeer:
    """Tell the asking peer that this region does not take its request, and how it is now."""

    key: int
    answer_inbox: str
    reason: str
    fresh: Digest


@dataclass(frozen=True, slots=True)
class TellHeld:
    """Tell the asking peer that its request waits in this region's line, after so many hops."""

    answer_inbox: str
    hops: int


@dataclass(frozen=True, slots=True)
class TellLost:
    """Tell a peer that the replica answering its request is gone."""

    answer_inbox: str
    replica: ReplicaId
    region: RegionId | None = None  # whose the replica was before it was adopted; None: this one's


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error. After its first byte: an error event inside the stream."""

    key: int
    fault: Fault
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class PassEngineError:
    """End the request with the error answer that the last engine gave."""

    key: int


@dataclass(frozen=True, slots=True)
class Decided:
    """The receipt of one placement, for the trace, the log and the debug header."""

    key: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class PublishDigest:
    """Tell the peers how this region is."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class PublishTrie:
    """Tell the peers which prefixes this region has gained and lost."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class PublishToSiblings:
    """Tell the other routers of this region what was placed on which replica."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class AskTrie:
    """Ask a router of that region, which may be our own, for what was missed of its deltas."""

    region: RegionId
    ask: TrieAsk


@dataclass(frozen=True, slots=True)
class AnswerTrie:
    """Say it again to one who asked."""

    inbox: str
    answer: TrieAnswer


@dataclass(frozen=True, slots=True)
class ClaimLease:
    """Write this lease, if the newest write of its stream is number `expected`."""

    number: int
    expected: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class OwnershipChanged:
    """Tell agents at once."""

    region: RegionId
    owned: bool


@dataclass(frozen=True, slots=True)
class HearReplicas:
    """Listen, or not any more, to heartbeats of a region that is not our own."""

    region: RegionId
    wanted: bool


@dataclass(frozen=True, slots=True)
class KeepPrefix:
    """Keep the first `blocks` of this request's prompt, as a request, under the name `prefix`."""

    key: int
    prefix: int
    blocks: int


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """Keep it no more."""

    prefix: int


@dataclass(frozen=True, slots=True)
class OpenWarmUp:
    """What is kept as `prefix` is this request from now on: it is being placed."""

    request: Request
    prefix: int


@dataclass(frozen=True, slots=True)
class CloseWarmUp:
    """That one is over."""

    key: int


@dataclass(frozen=True, slots=True)
class StopWarmUp:
    """Tell the replica that a peer's warm-up must give way."""

    answer_inbox: str
    replica: ReplicaId


Effect = (
    Dispatch
    | Forward
    | CancelAttempt
    | RefusePeer
    | TellHeld
    | TellLost
    | Fail
    | PassEngineError
    | Decided
    | PublishDigest
    | PublishTrie
    | PublishToSiblings
    | AskTrie
    | AnswerTrie
    | ClaimLease
    | OwnershipChanged
    | HearReplicas
    | KeepPrefix
    | DropPrefix
    | OpenWarmUp
    | CloseWarmUp
    | StopWarmUp
)
