"""From a ticket's answer to the client's socket: the bytes as the engine sent them.

`write` waits while the client reads slowly; then nothing is taken from the answer, no credit
goes to the agent, and the agent stops reading its engine: the pressure reaches the GPU's own
buffers, and no process in between grows.

An answer is finished when its last byte has left this process, not when it was written: until
then it counts for the drain and its deadline holds.

Nothing follows the last event of an answer: once it is here, whatever becomes of the request, the
client's answer ends well.
"""

import asyncio
from typing import Protocol

from aiohttp import web

from mesh.adapters.answer import Answer
from mesh.adapters.outlet import Outlet
from mesh.adapters.ticket import Ticket
from schemas.http import H_REGION, error_event

SHORT_BYTES = 32 * 1024  # below the high-water mark: writing that never waits
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
        """The whole answer has left for the client."""
        ...

    def failed(self, ticket: Ticket) -> None:
        """The client has been told of `ticket.failure`, or of the engine's own error."""
        ...

    def leave(self, ticket: Ticket) -> None:
        """The client is gone."""
        ...


class _Stream(web.StreamResponse):
    """Its headers wait for its first bytes, which are here already: one write for both."""

    _send_headers_immediately = False


async def relay(
    request: web.BaseRequest, ticket: Ticket, door: Door, headers: dict[str, str]
) -> web.StreamResponse:
    """Send a startable answer to its end. Raises ConnectionError when the client is gone."""
    answer = ticket.answer
    assert answer is not None and answer.head is not None, "relay needs a startable answer"
    headers = {**answer.passed, **headers} if answer.passed else headers
    headers["content-type"] = answer.head.content_type
    headers[H_REGION] = answer.head.region
    door.started(ticket)
    response = _response(answer, answer.head.status, headers)
    try:
        if not await _sent_at_once(request, response):
            async with asyncio.timeout_at(ticket.deadline + DEADLINE_GRACE_S):
                await response.prepare(request)
                rest = b""
                if not isinstance(response, web.Response):
                    rest = await _pump(request, response, ticket, door)
                await response.write_eof(rest)
                await _flush(request)
    except TimeoutError:
        # The core ends what an engine still sends at the deadline; this ends a client that
        # has stopped reading what is already here.
        door.leave(ticket)
        _cut(request)
        return response
    if ticket.failure is None or answer.is_whole:
        door.finished(ticket)
    else:
        door.failed(ticket)
    return response


def _response(answer: Answer, status: int, headers: dict[str, str]) -> web.StreamResponse:
    """What is complete goes out with its length; anything else as it comes."""
    if answer.is_event_stream:
        return _Stream(status=status, headers=headers | {"cache-control": "no-cache"})
    if answer.is_complete:
        return web.Response(status=status, headers=headers, body=answer.take())
    return _Stream(status=status, headers=headers)


async def _sent_at_once(request: web.BaseRequest, response: web.StreamResponse) -> bool:
    """Send an answer that is whole and short. Whether it has left; if not, nothing was waited for.

    Nearly all plain answers end here, so they cost no timer.
    """
    body = response.body if isinstance(response, web.Response) else None
    if not isinstance(body, bytes) or len(body) > SHORT_BYTES:
        return False
    await response.prepare(request)
    await response.write_eof()
    return _unsent_bytes(request) == 0


async def _pump(
    request: web.BaseRequest, stream: web.StreamResponse, ticket: Ticket, door: Door
) -> bytes:
    """Write until the answer ends, well or with an error that the client can read.

    Returns what is left to go out with the end, in one write.
    """
    answer = ticket.answer
    assert answer is not None
    if request.transport is None:
        raise ConnectionResetError("the client hung up")
    chunked = stream.headers.get("Transfer-Encoding") == "chunked"
    outlet = Outlet(request.transport, answer, lambda: door.passed(ticket), chunked=chunked)
    while chunk := await ticket.next_bytes(outlet):
        if answer.is_complete and ticket.failure is None:
            return chunk
        await stream.write(chunk)
        await request.writer.drain()  # `write` counts its own bytes only
        door.passed(ticket)
    if ticket.failure is None or answer.is_whole:
        return b""
    if answer.is_event_stream:
        if not answer.is_between_events:
            await stream.write(b"\n\n")  # the client must not read the error as part of it
        return error_event(ticket.failure.fault, ticket.failure.message)
    # A plain answer can't carry an error after its bytes: only the cut tells the client.
    door.failed(ticket)
    raise ConnectionAbortedError(ticket.failure.message)


async def _flush(request: web.BaseRequest) -> None:
    """Wait until the kernel has every byte. Raises ConnectionError when the client is gone."""
    transport = request.transport
    if transport is not None and _unsent_bytes(request):
        # Otherwise a drain waits only for what is above the transport's high-water mark.
        transport.set_write_buffer_limits(high=0)
        await request.writer.drain()
        transport.set_write_buffer_limits()
    if _unsent_bytes(request) is None:
        raise ConnectionResetError("the client hung up before the end of its answer")


def _unsent_bytes(request: web.BaseRequest) -> int | None:
    """What the kernel has not taken yet; None when the client is gone."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return None
    return transport.get_write_buffer_size()


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()
