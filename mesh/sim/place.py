"""How replicas and routers reach each other, and what of the world a router can call.

Protocols, because both sides call each other: a replica answers to whoever asked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agents.core.events import NO_USAGE, TokenUsage
from mesh.core.gossip.remote_prefixes import Origin
from mesh.sim.ask import Answered, Ask
from schemas.exchange import Outcome, Refused
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat

STATUS_OK = 200


@dataclass(frozen=True, slots=True)
class End:
    """The END frame, and with it the status of the HEAD."""

    outcome: Outcome
    detail: str
    usage: TokenUsage = NO_USAGE
    status: int = STATUS_OK


class Worker(Protocol):
    """A replica, as messages on the bus reach it."""

    name: ReplicaId
    site: RegionId

    def hear_work(self, inbox: str, headers: dict[str, str], ask: Ask, asker: "Asker") -> None:
        """A request, to be answered to `inbox` of `asker`."""

    def hear_cancel(self, inbox: str) -> None:
        """Nobody waits for this answer any more."""

    def hear_alive(self, region: RegionId, router: RouterId, epoch: int, term: int | None) -> None:
        """A router lives, and owns this replica under that term, if it says so."""

    def answers_to(self, asker: "Asker") -> bool:
        """Whether that router waits for something from here."""


class Asker(Protocol):
    """A router, as messages on the bus reach it."""

    site: RegionId

    def hear_heartbeat(self, beat: Heartbeat) -> None:
        """A replica's state."""

    def hear_nobody(self, inbox: str) -> None:
        """The bus itself: nobody listens where this was sent."""

    def hear_refused(self, inbox: str, refused: Refused) -> None:
        """REFUSED, by a replica or for a whole region."""

    def hear_placed(self, inbox: str, replica: Worker) -> None:
        """PLACED: a peer found who will answer."""

    def hear_held(self, inbox: str) -> None:
        """HELD: a peer has it in its line."""

    def hear_lost(self, inbox: str, replica: ReplicaId) -> None:
        """LOST: a peer lost who was answering."""

    def hear_first(self, inbox: str, replica: Worker, status: int) -> None:
        """HEAD, and the first bytes of the answer."""

    def hear_progress(self, inboxes: Sequence[str]) -> None:
        """Frames of these answers keep coming."""

    def hear_end(self, inbox: str, end: End) -> None:
        """END."""


class PeerRouter(Asker, Protocol):
    """A router, as its peers reach it."""

    name: RouterId

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        ...

    def hear_ingress(self, inbox: str, headers: dict[str, str], ask: Ask, asker: Asker) -> None:
        """A request that a peer asks this region to place."""

    def hear_digest(self, digest: Digest) -> None:
        """A peer region's state."""


@dataclass(slots=True)
class Meter:
    """What deciding costs: the seconds `handle` took for requests, by a clock from outside."""

    clock: Callable[[], float] | None = None
    decisions: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The rest of the world, as a router sees it."""

    replicas: Mapping[ReplicaId, Worker]
    routers: Mapping[RegionId, Sequence[PeerRouter]]  # by where they stand
    first_byte: Callable[[Ask], None]  # the client sees it
    answered: Callable[[Ask, Answered], None]
    publish: Callable[[Origin, Digest], None]  # whose digest, to its peers
    gossip: Callable[[Origin], dict[type, Callable[[Any], None]]]  # whose effects, performed
    request_s: float  # a request's time, as no client of the twin says its own
    pick: Callable[[int], int]  # one of so many that listen in a queue group
    meter: Meter = field(default_factory=Meter)
