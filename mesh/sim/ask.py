"""One request on its way through the world: what its client wants and what has come of it.

Work messages of the twin carry headers as live ones do, but no body: this object goes along in
its place, so that the replica's engine knows what is really asked.
"""

from dataclasses import dataclass

from mesh.core.model.prompt import Prompt
from mesh.replay.tally import RequestOutcome
from mesh.sim.workload import ClosedLoopClient, ContentKeys, RequestNode
from schemas.ids import RegionId, ReplicaId, RequestId

_PREFIX = "twin-"


@dataclass(slots=True)
class Tree:
    """One tree of nodes in play. `left`: nodes that are open or will be."""

    client: ClosedLoopClient | None  # whose it is, in a closed loop
    left: int = 1


@dataclass(slots=True)
class Ask:
    """Times are the client's own, in seconds of the world."""

    number: int
    region: RegionId
    node: RequestNode
    tree: Tree
    keys: ContentKeys
    prompt: Prompt  # as its router sees it
    asked_at: float
    first_at: float | None = None
    ended: bool = False

    @property
    def request_id(self) -> RequestId:
        """The id on the bus."""
        return RequestId(f"{_PREFIX}{self.number}")

    @property
    def session(self) -> str | None:
        """What its client names the conversation."""
        return str(self.node.session) if self.node.session else None


def number_of(request_id: RequestId) -> int:
    """Which request of the world an id on the bus names."""
    return int(request_id.removeprefix(_PREFIX))


@dataclass(frozen=True, slots=True)
class Answered:
    """How one request ended, as its router tells its client."""

    outcome: RequestOutcome
    reason: str = ""
    retry_after_s: float | None = None
    replica: ReplicaId | None = None
    cached_tokens: int = 0
    hops: int = 0
    attempts: int = 0
