"""From a ticket's answer to the client's socket: the bytes as the engine sent them.

`write` waits while the client reads slowly; then nothing is taken from the answer, no credit
goes to the agent, and the agent stops reading its engine: the pressure reaches the GPU's own
buffers, and no process in between grows.
"""

import asyncio
from typing import Protocol

from aiohttp import web

from mesh.adapters.ticket import Ticket
from schemas.http import H_REGION, error_event

DEADLINE_GRACE_S = 5.0  # for the core's own word on the deadline to reach the client first


class Door(Protocol):
    """What a relay tells the router."""

    def started(self, ticket: Ticket) -> None:
        """The client is being sent the first byte."""
        ...

    def passed(self, ticket: Ticket) -> None:
        """Bytes have left for the client."""
        ...

    def finished(self, ticket: Ticket) -> None:
        """The client has the whole answer."""
        ...

    def failed(self, ticket: Ticket) -> None:
        """The client has been told of `ticket.failure`, or of the engine's own error."""
        ...

    def leave(self, ticket: Ticket) -> None:
        """The client is gone."""
        ...


async def relay(
    request: web.BaseRequest, ticket: Ticket, door: Door, headers: dict[str, str]
) -> web.StreamResponse:
    """Send a startable answer to its end. Raises ConnectionError when the client is gone."""
    answer = ticket.answer
    assert answer is not None and answer.head is not None, "relay needs a startable answer"
    headers["content-type"] = answer.head.content_type
    headers[H_REGION] = answer.head.region
    door.started(ticket)
    if answer.is_complete and not answer.is_event_stream:
        response = web.Response(status=answer.head.status, body=answer.take(), headers=headers)
        door.finished(ticket)
        return response
    if answer.is_event_stream:
        headers["cache-control"] = "no-cache"
    stream = web.StreamResponse(status=answer.head.status, headers=headers)
    try:
        async with asyncio.timeout_at(ticket.deadline + DEADLINE_GRACE_S):
            await stream.prepare(request)
            await _pump(stream, ticket, door)
    except TimeoutError:
        # The core ends what an engine still sends at the deadline; this ends a client that
        # has stopped reading what is already here.
        door.leave(ticket)
        _cut(request)
    return stream


async def _pump(stream: web.StreamResponse, ticket: Ticket, door: Door) -> None:
    while chunk := await ticket.next_bytes():
        await stream.write(chunk)
        door.passed(ticket)
    if ticket.failure is None:
        await stream.write_eof()
        door.finished(ticket)
        return
    door.failed(ticket)
    if ticket.answer is not None and ticket.answer.is_event_stream:
        await stream.write(error_event(ticket.failure.fault, ticket.failure.message))
        await stream.write_eof()
    else:
        # A plain answer can't carry an error after its bytes: only the cut tells the client.
        raise ConnectionAbortedError(ticket.failure.message)


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()
