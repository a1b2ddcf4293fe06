"""The short way of a stream's bytes: from the bus message that brings them to the socket.

Waking the handler's task for each token costs more than writing it. So while the handler waits,
whoever wakes it lets the outlet write first, and the handler sleeps on. It is woken for all that
is no token: the end with what comes beside it, a failure, a client that is gone. And for a socket
that is behind: then the handler waits for the socket, and what comes meanwhile goes out in one
piece.

This runs for every token of every client, so it makes no more calls than it must.
"""

from collections.abc import Callable

from aiohttp import web

from mesh.adapters.answer import CREDIT_BYTES, Answer

BEHIND_BYTES = 32 * 1024  # unsent, above the kernel's own buffer; half of asyncio's high water


class Outlet:
    """For one answer whose first bytes have been written; `passed` is called for its credit."""

    __slots__ = ("_answer", "_chunked", "_passed", "_transport")

    def __init__(
        self,
        request: web.BaseRequest,
        stream: web.StreamResponse,
        answer: Answer,
        passed: Callable[[], None],
    ) -> None:
        self._transport = request.transport
        self._answer = answer
        self._passed = passed
        self._chunked = stream.headers.get("Transfer-Encoding") == "chunked"

    def pour(self) -> bool:
        """Write what may be given out. False if it is the handler's turn."""
        transport, answer = self._transport, self._answer
        if answer.end is not None or transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > BEHIND_BYTES:
            return False
        if data := answer.take():
            # RFC 9112, section 7.1; an HTTP/1.0 client gets the bytes as they are.
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
            if answer.uncredited_bytes >= CREDIT_BYTES:
                self._passed()
        return True
