"""Tickets and answers in any state, as the router's edge finds them."""

from mesh.adapters.answer import Answer
from mesh.adapters.spans import RequestSpans
from mesh.adapters.ticket import Ask, Failure, Ticket
from mesh.core.prefixes.prompt import NO_PROMPT, NO_TEXT
from schemas import exchange, wire
from schemas.exchange import Frame, FrameView, Outcome
from schemas.http import CHAT, Fault
from schemas.ids import ModelId, RequestId

EVENTS, JSON = "text/event-stream", "application/json"
LOST = Failure(Fault.ENGINE_FAILED, "the engine was lost")


def ticket(*, deadline: float = float("inf")) -> Ticket:
    ask = Ask(RequestId("q-1"), ModelId("tiny"), CHAT, b"{}", NO_PROMPT, None)
    spans = RequestSpans(ask.request_id, ask.model, None)
    return Ticket(key=1, ask=ask, deadline=deadline, arrived_at=0.0, spans=spans, size=NO_TEXT)


class Feeder:
    """Gives a ticket an answer and feeds it, as the desk does with frames off the bus."""

    def __init__(self, ticket: Ticket, content_type: str = EVENTS, status: int = 200) -> None:
        self.ticket = ticket
        self.answer = ticket.answer = Answer(ticket.key, 1, "_INBOX.us.r1.1")
        self._number = 0
        head = exchange.Head(status, content_type, "eu", "g1")
        self._feed(Frame.HEAD, wire.encode(head))

    def data(self, data: bytes) -> None:
        self._feed(Frame.DATA, data)

    def end(self, last: bytes = b"") -> None:
        """The end, and with it, in one parcel, what comes last."""
        if last:
            self._feed(Frame.DATA, last, wakes=False)
        self._feed(Frame.END, wire.encode(exchange.End(Outcome.DONE, "", 9, 4, 2, 0.1)))

    def fail(self, failure: Failure = LOST) -> None:
        self.ticket.failure = failure
        self.ticket.wake()

    def _feed(self, kind: Frame, payload: bytes, *, wakes: bool = True) -> None:
        self.answer.feed(FrameView(kind, self._number, payload), 0.0)
        self._number += 1
        if wakes:
            self.ticket.wake()
