"""All effects of the router core. The edge executes them in order and decides nothing."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from schemas.decision import Candidate, Decision
from schemas.gossip import TrieAnswer, TrieAsk, TrieDelta
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.kv_transfer import TransferKind
from schemas.state import Digest, Lease


class KvPair(NamedTuple):
    """How the KV cache of an attempt's prompt gets from its prefill to its decode replica.

    The addresses are as heartbeats gave them.
    """

    kind: TransferKind
    prefill_address: str | None = None
    decode_address: str | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Publish the request on a replica's work subject.

    The answer to a client's request comes to this attempt's own inbox. The answer to a peer's goes
    to the peer's inbox, and the peer receives the replica's name.
    """

    key: int
    attempt: int
    replica: ReplicaId
    handoff: int
    answer_inbox: str | None
    prefill_tokens: int = 0  # prompt tokens that the replica is estimated not to hold
    may_queue: bool = False  # the replica may take it though other work is pending
    region: RegionId | None = None  # of an adopted replica; None: this one
    term: int | None = None  # of the lease by which this region owns it, if there is one
    with_blocks: bool = False  # its agent relates the prompt's blocks to what its engine holds
    pair: KvPair | None = None  # it is the decode stage: another replica computes the prompt


@dataclass(frozen=True, slots=True)
class DispatchPrefill:
    """Publish an attempt's prefill stage on a replica's work subject; it answers to an inbox of
    this router's own."""

    work: Dispatch
    pair: KvPair


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Cancel that stage of this attempt at its replica."""

    key: int
    attempt: int
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class StopForwarded:
    """Cancel the answer that a replica sends to a peer's inbox."""

    answer_inbox: str
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Forward:
    """Ask a peer region to place a client's request. `held_s`: in all queues so far."""

    key: int
    attempt: int
    peer: RegionId
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Retargeted:
    """Another model serves the request from now on, as nothing serves the one before."""

    key: int
    model: ModelId  # as in `served_names`


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Cancel this attempt at the replica, if that is known yet. `why`: for people, where it goes
    elsewhere."""

    key: int
    attempt: int
    region: RegionId
    replica: ReplicaId | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class RefusePeer:
    """Refuse the peer's request, with this region's digest as of now (a batch runner has none)."""

    key: int
    answer_inbox: str
    reason: str
    fresh: Digest | None = None


@dataclass(frozen=True, slots=True)
class TellHeld:
    """Report to the peer that its request is held here, after so many hops."""

    answer_inbox: str
    hops: int


@dataclass(frozen=True, slots=True)
class TellLost:
    """Report to a peer that the replica answering its request is lost."""

    answer_inbox: str
    replica: ReplicaId
    region: RegionId | None = None  # of an adopted replica; None: this one


@dataclass(frozen=True, slots=True)
class MayMove:
    """Find out whether another engine could go on with a stream that flows. The answer, if one
    could, is `Movable`."""

    key: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Continue:
    """A stream broke: find out what was said, and whether another engine can go on with it. The
    answer is `ContinuationRead`, with this detail or why not."""

    key: int
    attempt: int
    detail: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error. After its first byte: an error event inside the stream.

    `held_since`: if it ends in the hold queue."""

    key: int
    fault: Fault
    message: str
    retry_after_s: float | None = None
    held_since: float | None = None


@dataclass(frozen=True, slots=True)
class PassEngineError:
    """End the request with the error answer that the last engine gave."""

    key: int


class Unlisted(Protocol):
    """The candidates of a decision, kept to be listed if anybody asks."""

    def candidates(self) -> tuple[Candidate, ...]:
        """As a receipt lists them."""

    @property
    def considered(self) -> int:
        """How many there were."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The receipt of one placement, for the trace, the log and the debug header.

    `unlisted`: of a request whose receipts need not list candidates.
    """

    key: int
    decision: Decision
    unlisted: Unlisted | None = None


@dataclass(frozen=True, slots=True)
class PublishDigest:
    """Publish this region's state to peers."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class PublishTrie:
    """Publish to peers which prefixes this region has gained and lost."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class PublishToSiblings:
    """Publish to the other routers of this region what was placed on which replica."""

    delta: TrieDelta


@dataclass(frozen=True, slots=True)
class AskTrie:
    """Request missing deltas of a router of that region, which may be this one."""

    region: RegionId
    ask: TrieAsk


@dataclass(frozen=True, slots=True)
class AnswerTrie:
    """Answer such a request."""

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
    """Publish a keepalive to agents at once."""

    region: RegionId
    owned: bool


@dataclass(frozen=True, slots=True)
class AskHeld:
    """Ask an agent to publish all that its engine holds: deltas of that epoch are missing."""

    replica: ReplicaId
    epoch: int


@dataclass(frozen=True, slots=True)
class HearReplicas:
    """Subscribe to heartbeats of a peer region, or unsubscribe."""

    region: RegionId
    wanted: bool


@dataclass(frozen=True, slots=True)
class RequestAgain:
    """Messages over the link to that region were lost: request what its answers may lack, and give
    their agents the credits again."""

    region: RegionId


Effect = (
    Dispatch
    | DispatchPrefill
    | CancelPrefill
    | StopForwarded
    | Forward
    | Retargeted
    | CancelAttempt
    | RefusePeer
    | TellHeld
    | TellLost
    | Fail
    | PassEngineError
    | MayMove
    | Continue
    | Decided
    | PublishDigest
    | PublishTrie
    | PublishToSiblings
    | AskTrie
    | AnswerTrie
    | ClaimLease
    | OwnershipChanged
    | AskHeld
    | HearReplicas
    | RequestAgain
)
