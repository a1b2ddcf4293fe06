"""The short way of a stream's bytes: from the bus message that brings them to the socket.

Waking the handler's task for each token costs more than writing it. So while the handler waits, a
frame that is just the next event goes straight through; of others the answer makes what it can, and
whoever would wake the handler lets the outlet write that first. The handler sleeps on. It is woken
for all that is no token: the end with what comes beside it, a failure, a client that is gone. And
for a socket that is behind: then the handler waits for the socket, and what comes meanwhile goes
out in one piece.

This runs for every token of every client, so it makes no more calls than it must.
"""

import asyncio
from collections.abc import Callable

from mesh.adapters.answer import Answer

BEHIND_BYTES = 32 * 1024  # unsent, above the kernel's own buffer; half of asyncio's high water


class Outlet:
    """For one answer whose first bytes have been written; `passed` is called for its credit."""

    __slots__ = ("_answer", "_chunked", "_passed", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        answer: Answer,
        passed: Callable[[], None],
        *,
        chunked: bool,
    ) -> None:
        self._transport = transport
        self._answer = answer
        self._passed = passed
        self._chunked = chunked

    def pass_on(self, frame: bytes, now: float) -> bool:
        """Write what a frame brings, past the answer's buffer. False if it is to be fed to it."""
        transport = self._transport
        if transport.get_write_buffer_size() > BEHIND_BYTES or transport.is_closing():
            return False
        data = self._answer.passing(frame, now)
        if data:
            self._write(data)
        return bool(data)

    def pour(self) -> bool:
        """Write what may be given out. False if it is the handler's turn."""
        transport, answer = self._transport, self._answer
        if answer.end is not None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > BEHIND_BYTES:
            return False
        if data := answer.take():
            self._write(data)
        return True

    def _write(self, data: bytes) -> None:
        # RFC 9112, section 7.1; an HTTP/1.0 client gets the bytes as they are.
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        answer = self._answer
        if answer.taken_bytes >= answer.credit_at_bytes:
            self._passed()
