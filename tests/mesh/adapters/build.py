"""Requests and answers in any state, as the router's edge finds them."""

from dataclasses import replace

from mesh.session.answer import AnswerReceiver
from mesh.session.client_request import ClientRequest
from mesh.session.record import Failure
from schemas import exchange, wire
from schemas.exchange import Frame, FrameView, Outcome
from schemas.http import Fault
from tests.mesh.core.build import request

EVENTS, JSON = "text/event-stream", "application/json"
LOST = Failure(Fault.ENGINE_FAILED, "the engine was lost")


def client_request(*, deadline: float = float("inf")) -> ClientRequest:
    asked = replace(request(1), deadline=deadline, arrived_at=0.0)
    return ClientRequest(request=asked, body=b"{}")


class Feeder:
    """Gives a request an answer and feeds it, as the session does with frames off the bus."""

    def __init__(
        self, client_request: ClientRequest, content_type: str = EVENTS, status: int = 200
    ) -> None:
        self.client_request = client_request
        self.answer = client_request.answer = AnswerReceiver(
            client_request.request.key, 1, "_INBOX.us.r1.1"
        )
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
        self.client_request.failure = failure
        self.client_request.changed()

    def _feed(self, kind: Frame, payload: bytes, *, wakes: bool = True) -> None:
        self.answer.feed(FrameView(kind, self._number, payload), 0.0)
        self._number += 1
        if wakes:
            self.client_request.changed()
