"""One kept HTTP/1.1 connection to an engine: a request at a time, and its answer as it comes.

A token has to be cheap: it goes from the socket through the parser (llhttp) into whatever the
answer is poured into, and no task is woken for it. RFC 9112 is the parser's; what is done here is
when a connection may be used again (section 9.3), and answers that end with it (section 6.3).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from schemas.passed_headers import ALLOWED, ALLOWED_PREFIXES, chosen

SILENT_BYTES_MAX = 64 * 1024  # of a head, or of trailers: what brings no byte of a body
BUFFERED_BYTES = 32 * 1024  # nobody takes them yet: the socket is read no further
_INFORMATION = range(100, 200)  # statuses before the one that counts


class HttpLost(ConnectionError):
    """The connection ended before the answer did, or never began."""


class HttpBroken(ValueError):
    """What came is no answer in HTTP/1.1."""


_MAY_PASS = tuple(begin.encode() for begin in (*ALLOWED_PREFIXES, *ALLOWED))


@dataclass(frozen=True, slots=True)
class Head:
    """What is known before the first byte of the body. `content_type` as it came, empty if none.

    `headers`: those that are for the client, as `schemas.passed_headers` has them.
    """

    status: int
    content_type: str
    headers: tuple[str, ...] = ()


class Connection(asyncio.Protocol):
    """`ask`, then `until_head`, then `read` or `pour` to the end; after that it may be asked again.

    Whoever stops before the end closes it.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._is_asked = False
        self._asked = 0
        self._body: list[bytes] = []  # came, and was not given out
        self.on_body = self._body.append  # the parser calls it for each chunk
        self._forget()

    def _forget(self) -> None:
        """As before a first request."""
        self._head: Head | None = None
        self._silent_bytes = 0
        self._content_type = b""
        self._passed: list[tuple[str, str]] = []
        self._has_length = False  # or is chunked: its end does not depend on the connection's
        self._keeps = False
        self._body.clear()
        self._is_ended = False
        self._problem: Exception | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._is_held = False

    @property
    def is_usable(self) -> bool:
        """Whether a next request may be sent on it: this one was answered, and sent, to its end."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._keeps and self._is_ended and not self._transport.get_write_buffer_size()

    @property
    def had_closed(self) -> bool:
        """Whether it was kept, and was lost before it brought anything of this answer."""
        return self._asked > 1 and self.is_closing and self._head is None and not self._silent_bytes

    @property
    def is_ended(self) -> bool:
        """Whether its answer was received to the end."""
        return self._is_ended

    @property
    def is_closing(self) -> bool:
        """Whether nothing more will come."""
        return self._transport is None or self._transport.is_closing()

    def ask(self, request: Sequence[bytes]) -> None:
        """Send a request, in pieces as they lie in memory. Raises HttpLost where it can't."""
        if self._transport is None or self._transport.is_closing():
            raise HttpLost("the engine has closed the connection")
        self._is_asked = True
        self._asked += 1
        self._transport.writelines(request)

    def rest(self) -> None:
        """Its answer was read to the end; nobody asks now."""
        self._is_asked = False
        self._forget()
        self._steer()

    def close(self) -> None:
        """At once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    async def until_head(self) -> Head:
        """Wait for it. Raises HttpLost and HttpBroken."""
        while self._head is None:
            await self._more()
        return self._head

    async def read(self) -> bytes:
        """What came of the body since the last time; empty at its end. Raises as `until_head`."""
        while not self._body:
            if self._is_ended:
                return b""
            await self._more()
        return self._taken()

    async def pour(self, sink: Callable[[bytes], None]) -> None:
        """Give the rest of the body to `sink`, as it comes. Raises as `until_head`."""
        self._sink = sink
        if self._body:
            sink(self._taken())
        while not self._is_ended:
            await self._more()

    def hold(self) -> None:
        """Read the socket no further until `go_on`; what was read already still comes."""
        self._is_held = True
        self._steer()

    def go_on(self) -> None:
        """Undo `hold`."""
        self._is_held = False
        self._steer()

    def _steer(self) -> None:
        pause = self._is_held or self._is_full()
        if pause is self._paused or self._transport is None or self._transport.is_closing():
            return
        self._paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _is_full(self) -> bool:
        return self._sink is None and sum(map(len, self._body)) > BUFFERED_BYTES

    def _taken(self) -> bytes:
        body = self._body
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        if self._paused:
            self._steer()
        return data

    async def _more(self) -> None:
        """Until something happens. Raises what went wrong."""
        if isinstance(self._problem, HttpLost | HttpBroken):
            # Anew: what is kept here and raised would hold all that its traceback does.
            raise type(self._problem)(*self._problem.args)
        if self._problem is not None:
            raise self._problem
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, problem: Exception) -> None:
        self._keeps = False
        if self._problem is None and not self._is_ended:
            self._problem = problem
        self._wake()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._parser = parser = httptools.HttpResponseParser(self)
        # Of what engines are allowed here nobody can be led astray: one asks and one answers.
        parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )

    def data_received(self, data: bytes) -> None:
        if not self._is_asked:  # it speaks unasked, as before closing an idle connection
            self.close()
            return
        if self._problem is not None or self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(HttpBroken(f"no answer in HTTP/1.1: {_described(error)}"))
        if self._body:
            self._silent_bytes = 0
        else:
            self._count_silence(len(data))
        if self._sink is None:
            self._steer()
            self._wake()
            return
        if self._body:
            self._pour_out(self._sink)
        if self._is_ended:
            self._wake()

    def _count_silence(self, size: int) -> None:
        self._silent_bytes += size
        if self._silent_bytes > SILENT_BYTES_MAX:
            self._fail(HttpBroken(f"a head or a trailer has more than {SILENT_BYTES_MAX} bytes"))

    def _pour_out(self, sink: Callable[[bytes], None]) -> None:
        try:
            sink(self._taken())
        except Exception as fault:  # not the engine's: whoever pours is to hear of it
            self._is_ended = False
            self._fail(fault)
            self.close()

    def eof_received(self) -> None:
        """Nothing more comes, though what we send may still be on its way."""
        self._end_of_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None  # it and its parser hold each other
        if exc is None:
            self._end_of_bytes()
        else:
            self._lose()

    def _end_of_bytes(self) -> None:
        if self._head is not None and not self._has_length and self._problem is None:
            self._is_ended = True
            self._keeps = False
        self._lose()

    def _lose(self) -> None:
        where = "before" if self._head is None else "inside"
        self._fail(HttpLost(f"the engine closed the connection {where} its answer"))

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_ended:
            raise HttpBroken("more came than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = self._content_type or value
        elif name == b"content-length":
            self._has_length = True
        elif name == b"transfer-encoding":
            self._has_length = value.lower().endswith(b"chunked")
        elif name.startswith(_MAY_PASS):
            self._passed.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status in _INFORMATION:
            self._content_type, self._has_length, self._passed = b"", False, []
            return
        content_type = self._content_type.decode("utf-8", "replace")
        if not content_type.isprintable():
            raise HttpBroken(f"content type {content_type!r}")
        self._head = Head(status, content_type, chosen(self._passed) if self._passed else ())
        self._keeps = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self._is_ended = self._head is not None


def _described(error: Exception) -> str:
    said = error.__context__ if isinstance(error.__context__, HttpBroken) else error
    return str(said) or type(error).__name__
