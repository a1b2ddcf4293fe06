"""One request as the core sees it: no body, no socket, only what decides its place."""

from dataclasses import dataclass

from mesh.core.model.prompt import Prompt
from schemas.exchange import Priority
from schemas.ids import ModelId, RegionId, RequestId
from schemas.residency import Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A client's request, or a peer's (then `answer_inbox` says where its answer goes).

    `key` tells requests apart inside this router; `request_id` is the client's name for it and
    may repeat. Times are seconds on the router's clock.
    """

    key: int
    request_id: RequestId
    model: ModelId
    prompt: Prompt
    arrived_at: float
    deadline: float
    hops: int
    origin: RegionId
    answer_inbox: str | None = None
    priority: Priority = Priority.NORMAL
    slo_ttft_s: float | None = None  # its client has no use for a first token later than this
    session: str | None = None  # whose conversation it is part of, if the client says
    warm: bool = False  # nobody asks: it is computed to be held (`mesh.core.warming`)
    residency: Labels = ()  # it may go only where one of these is carried; empty: anywhere
    wants_receipt: bool = True  # somebody reads the candidates that each decision weighed
    held_before_s: float = 0.0  # a peer's: seconds in its own region's line


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine said that an answer cost, in tokens; None where it said nothing."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


NOTHING_SAID = Served()
