"""One request as the core sees it: no body, no socket, only what decides its place."""

from dataclasses import dataclass
from typing import NamedTuple

from mesh.core.model.model_targets import Asked
from mesh.core.model.prompt import Prompt
from schemas.exchange import Priority
from schemas.ids import ModelId, RegionId, RequestId
from schemas.residency import Labels


class Kind(NamedTuple):
    """Whose request it is, and all that follows from that alone."""

    name: str
    is_demand: bool = False  # counts in the region's rate of requests, which its digests tell
    waits: bool = True  # in the hold queue, and for another attempt
    may_leave: bool = False  # to be placed in a peer region
    # Its answer comes to this router, which learns from it. Otherwise it ends here as soon as a
    # replica has it, and is refused where a client's would fail.
    ends_here: bool = True
    may_pair: bool = True  # be computed on one replica, and answered by another
    loads_adapters: bool = True  # though one that clients use may have to make room


CLIENTS = Kind("a client's", is_demand=True, may_leave=True)
PEERS = Kind("a peer's", ends_here=False)
COPY = Kind("a copy, whose answer nobody gets", waits=False, loads_adapters=False)
LINE = Kind("a batch job's line", is_demand=True, may_leave=True, may_pair=False)
PEERS_LINE = Kind("a line of a peer's batch job", ends_here=False, may_pair=False)


class _HasKind:
    """What a request's fields say, told once; no field, as recordings and equality need none."""

    __slots__ = ("kind",)
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(_HasKind):
    """A client's request, or a peer's, whose answer goes to `answer_inbox`.

    `key` is unique inside this router; `request_id` is the client's name for it and
    may repeat. Times are seconds on the router's clock.
    """

    key: int
    request_id: RequestId
    model: ModelId  # as in `served_names`: of embeddings with the path
    prompt: Prompt
    arrived_at: float
    deadline: float
    hops: int
    origin: RegionId
    answer_inbox: str | None = None
    priority: Priority = Priority.NORMAL
    slo_ttft_s: float | None = None  # its objective: a later first token is of no use
    session: str | None = None  # of the conversation, if the client names one
    streams: bool = True  # its client asked for a stream, which shows when the first token comes
    asked: Asked | None = None  # of a request that was mapped to `model`
    shadow: bool = False  # a copy whose answer nobody gets
    offline: bool = False  # a batch job's line, computed with what online requests leave
    # The most that it may generate; None: not read. 0 of embeddings, which are a prompt's alone.
    answer_tokens: int | None = None
    residency: Labels = ()  # a place must carry one of these; empty: any place
    wants_receipt: bool = True  # its receipts must list candidates
    held_before_s: float = 0.0  # a peer's: seconds in its own region's hold queue
    is_whole_here: bool = True  # its body is at this router, and not to be fetched from a peer's
    # By the API key: whose request it is, and the key's id; empty where there is none.
    tenant: str = ""
    key_id: str = ""

    def __post_init__(self) -> None:
        if self.answer_inbox is not None:
            kind = PEERS_LINE if self.offline else PEERS
        elif self.shadow:
            kind = COPY
        else:
            kind = LINE if self.offline else CLIENTS
        object.__setattr__(self, "kind", kind)


@dataclass(frozen=True, slots=True)
class Served:
    """An answer's tokens as its engine reported them; None where it did not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


NOTHING_REPORTED = Served()
