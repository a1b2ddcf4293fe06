"""How replicas and routers know each other: where one is, and what it can be told.

Protocols, because both sides call each other: a replica answers to whoever asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agents.core.reading import NO_USAGE, Usage
from mesh.sim.ask import Ask
from schemas.exchange import Outcome, Refused
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat

STATUS_OK = 200


@dataclass(frozen=True, slots=True)
class End:
    """The END frame, and with it the status of the HEAD."""

    outcome: Outcome
    detail: str
    usage: Usage = NO_USAGE
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

    def hear_held(self, inbox: str, hops: int) -> None:
        """HELD: a peer has it in its line, after so many hops."""

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
