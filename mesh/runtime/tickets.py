"""The clients' requests that are open, by key and by the inbox of the attempt under way."""

import secrets
from collections.abc import Callable, Iterator

from mesh.adapters.answer import Answer
from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.ticket import Ticket
from mesh.core.requests.request import Request
from schemas.parcels import parcelled

INBOX_SECRET_BYTES = 12

InboxOf = Callable[[str], str]


class Tickets:
    """From `open` to `close`; `bodies` counts the bytes that they keep."""

    def __init__(self, inbox_of: InboxOf) -> None:
        """`inbox_of` makes the subject of an inbox of its last token."""
        self._inbox_of = inbox_of
        self.bodies = BodyBudget()
        self._kept_bytes: dict[int, int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._requests: dict[int, Request] = {}
        self._streams: dict[str, Ticket] = {}  # by the inbox of the attempt under way

    def __len__(self) -> int:
        return len(self._tickets)

    def buffered_bytes(self) -> int:
        """Bytes of answers that wait for their clients."""
        answers = (ticket.answer for ticket in self._tickets.values())
        return sum(answer.buffered_bytes for answer in answers if answer is not None)

    def open(self, ticket: Ticket, request: Request, taken_bytes: int) -> None:
        """Enter a request; `taken_bytes` is what was set aside for its body."""
        self._kept_bytes[ticket.key] = len(ticket.ask.body) + len(ticket.ask.text.data)
        self.bodies.settle(taken_bytes, self._kept_bytes[ticket.key])
        self._tickets[ticket.key], self._requests[ticket.key] = ticket, request

    def get(self, key: int) -> Ticket | None:
        """The open ticket of that key."""
        return self._tickets.get(key)

    def request(self, key: int) -> Request:
        """What the core was told of an open ticket."""
        return self._requests[key]

    def answering(self, subject: str) -> Ticket | None:
        """Whose attempt under way answers to this subject."""
        return self._streams.get(subject)

    def answers(self) -> Iterator[Answer]:
        """Of attempts under way."""
        return (ticket.answer for ticket in self._streams.values() if ticket.answer is not None)

    def begin(self, key: int, attempt: int) -> tuple[Ticket, Answer]:
        """A new attempt of an open ticket, with an inbox of its own."""
        ticket = self._tickets[key]
        self.stop_listening(ticket)
        # Who knows an inbox may answer there, cancel and credit: so nobody may guess one.
        token = parcelled(f"{key:x}-{attempt}-{secrets.token_hex(INBOX_SECRET_BYTES)}")
        inbox = self._inbox_of(token)
        answer = ticket.answer = Answer(key, attempt, inbox)
        self._streams[inbox] = ticket
        return ticket, answer

    def stop_listening(self, ticket: Ticket) -> None:
        """Nothing more of the attempt under way is wanted."""
        if ticket.answer is not None:
            self._streams.pop(ticket.answer.inbox, None)

    def drop_body(self, ticket: Ticket) -> None:
        """It won't be placed again, so nobody needs its body any more."""
        self.bodies.give_back(self._kept_bytes.pop(ticket.key, 0))
        ticket.ask.forget()

    def close(self, ticket: Ticket) -> bool:
        """It is over. False if it was before."""
        if self._tickets.pop(ticket.key, None) is None:
            return False
        del self._requests[ticket.key]
        self.drop_body(ticket)
        self.stop_listening(ticket)
        return True
