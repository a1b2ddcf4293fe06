"""One request as the core sees it: no body, no socket, only what decides its place."""

from dataclasses import dataclass

from mesh.core.prompt import Prompt
from schemas.ids import ModelId, RegionId, RequestId


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
