"""The clients' requests that are open in one router, by key, by client and by inbox.

Keys go on over a router's restarts, so that no two attempts ever answer to one inbox.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mesh.core.requests.request import Request
from mesh.replay.tally import Outcome
from mesh.sim.ask import Answered, Ask
from mesh.sim.place import STATUS_OK, Asker, End, Worker
from schemas import subjects
from schemas.ids import RegionId, RouterId

ROUTER = RouterId("r1")  # every region has this one


@dataclass(slots=True)
class Ticket:
    """A client's request in this router."""

    key: int
    ask: Ask
    arrived_at: float
    deadline: float
    attempt: int = 0
    inbox: str = ""  # of the attempt under way; empty while there is none
    peer: RegionId | None = None  # asked in this attempt
    replica: Worker | None = None  # who answers, as soon as it is known

    def answered(self, end: End) -> Answered:
        """What the client hears of an answer that ended so."""
        ok = end.status == STATUS_OK
        return Answered(
            Outcome.OK if ok else Outcome.FAILED,
            "" if ok else f"http_{end.status}",
            replica=None if self.replica is None else self.replica.name,
            cached_tokens=max(0, end.usage.cached_tokens),
            hops=int(self.peer is not None),
            attempts=self.attempt,
        )


class Guest(NamedTuple):
    """A peer's request that waits to be placed, and the router that asked."""

    headers: dict[str, str]
    ask: Ask
    asker: Asker
    request: Request


class Tickets:
    """From `open` to `close`."""

    def __init__(self, site: RegionId, router: RouterId = ROUTER) -> None:
        self._site = site
        self._router = router
        self._last_key = 0
        self._by_key: dict[int, Ticket] = {}
        self._by_ask: dict[int, Ticket] = {}
        self._streams: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._by_key.values())

    def new_key(self) -> int:
        """A key that nothing in this router had before."""
        self._last_key += 1
        return self._last_key

    def open(self, ask: Ask, arrived_at: float, deadline: float, key: int | None = None) -> Ticket:
        """Enter a client's request, or a warm-up under the key that the core gave it."""
        ticket = Ticket(self.new_key() if key is None else key, ask, arrived_at, deadline)
        self._by_key[ticket.key] = self._by_ask[ask.number] = ticket
        return ticket

    def get(self, key: int) -> Ticket | None:
        """The open ticket of that key."""
        return self._by_key.get(key)

    def of(self, ask: Ask) -> Ticket | None:
        """The open ticket of that client's request."""
        return self._by_ask.get(ask.number)

    def answering(self, inbox: str) -> Ticket | None:
        """Whose attempt under way answers to this inbox."""
        return self._streams.get(inbox)

    def begin(self, key: int, attempt: int) -> Ticket:
        """A new attempt, with an inbox of its own."""
        ticket = self._by_key[key]
        self._streams.pop(ticket.inbox, None)
        ticket.attempt, ticket.peer, ticket.replica = attempt, None, None
        stream = f"{key:x}-{attempt}"
        if key < 0:  # a core that starts anew gives such keys anew
            stream += f"-{self.new_key():x}"
        ticket.inbox = subjects.inbox(self._site, self._router, stream)
        self._streams[ticket.inbox] = ticket
        return ticket

    def stop_listening(self, inbox: str) -> Ticket | None:
        """Nothing more of this attempt is wanted; whose it was."""
        return self._streams.pop(inbox, None)

    def close(self, ticket: Ticket) -> None:
        """It is over."""
        del self._by_key[ticket.key], self._by_ask[ticket.ask.number]
        self._streams.pop(ticket.inbox, None)

    def clear(self) -> None:
        """All of them are over."""
        self._by_key.clear()
        self._by_ask.clear()
        self._streams.clear()
