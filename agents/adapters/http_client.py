"""The agent's own HTTP/1.1 client: connections to one engine, kept for a while and lent for one
request each.

Every token of every response passes here, so it has to be cheap: it goes from the socket through
the parser (llhttp) into the sink of the response, and no task is woken for it. With aiohttp's
client a token cost a buffer, a future and a task that woke up. RFC 9112 is the parser's; what is
done here is when a connection may be used again (section 9.3), and responses that end with it
(section 6.3).
"""

import asyncio
import base64
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httptools

from infra.address import Address
from schemas.passed_headers import ALLOWED, ALLOWED_PREFIXES, chosen

SILENT_BYTES_MAX = 64 * 1024  # of a head, or of trailers: without a byte of a body
BUFFERED_BYTES = 32 * 1024  # not read yet: beyond it the socket is paused
_INFORMATION = range(100, 200)  # statuses before the one that counts


class HttpLost(ConnectionError):
    """The connection ended before the response did, or never began."""


class HttpUnreached(HttpLost):
    """The connection never began."""


class HttpBroken(ValueError):
    """The bytes that came are no response in HTTP/1.1."""


_MAY_PASS = tuple(begin.encode() for begin in (*ALLOWED_PREFIXES, *ALLOWED))


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status, `content_type` as it came (empty if none), and the `headers` that are for the client,
    by `schemas.passed_headers`."""

    status: int
    content_type: str
    headers: tuple[str, ...] = ()


class Connection(asyncio.Protocol):
    """`send`, then `head`, then `read` or `stream_to` to the end; then it may send again. A caller
    that stops before the end closes it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.opened_at = float("inf")  # by time.monotonic
        self.on_lost: Callable[[Connection], None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._is_busy = False
        self._body: list[bytes] = []  # came, and was not given out
        self.on_body = self._body.append  # the parser calls it for each chunk
        self._forget()

    def _forget(self) -> None:
        """As before a first request."""
        self._head: ResponseHead | None = None
        self._silent_bytes = 0
        self._content_type = b""
        self._passed: list[tuple[str, str]] = []
        self._has_length = False  # or is chunked: its end does not depend on the connection's
        self._keeps = False
        self._body.clear()
        self.is_ended = False  # whether the response was received to the end
        self._problem: Exception | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._is_held = False

    @property
    def is_usable(self) -> bool:
        """Whether it may be kept: the request was sent, and its response received, to the end."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._keeps and self.is_ended and not self._transport.get_write_buffer_size()

    @property
    def is_untouched(self) -> bool:
        """Whether no byte of this response came."""
        return self._head is None and not self._silent_bytes

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the connection's end shows where the response ends."""
        return not self._has_length

    @property
    def is_closing(self) -> bool:
        """Whether nothing more will come."""
        return self._transport is None or self._transport.is_closing()

    def send(self, request: Sequence[bytes]) -> None:
        """Send a request, in pieces as they lie in memory. Raises HttpLost where it can't."""
        if self._transport is None or self._transport.is_closing():
            raise HttpLost("the engine has closed the connection")
        self._is_busy = True
        self._transport.writelines(request)

    def reset(self) -> None:
        """The response was read to its end: the connection is idle."""
        self._is_busy = False
        self._forget()
        self._steer()

    def close(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    async def head(self) -> ResponseHead:
        """Wait for the response's head. Raises HttpLost and HttpBroken."""
        while self._head is None:
            await self._more()
        return self._head

    async def read(self) -> bytes:
        """The bytes of the body since the last call; empty at its end. Raises as `head`."""
        while not self._body:
            if self.is_ended:
                return b""
            await self._more()
        return self._taken()

    async def stream_to(self, sink: Callable[[bytes], None]) -> None:
        """Pass the rest of the body to `sink`, as it comes. Raises as `head`."""
        self._sink = sink
        if self._body:
            sink(self._taken())
        while not self.is_ended:
            await self._more()

    def pause(self) -> None:
        """Stop reading the socket until `resume`; what was read already still comes."""
        self._is_held = True
        self._steer()

    def resume(self) -> None:
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
            # A new one: an exception that is kept here would hold all that its traceback does.
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
        if self._problem is None and not self.is_ended:
            self._problem = problem
        self._wake()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.opened_at = time.monotonic()
        self._parser = parser = httptools.HttpResponseParser(self)
        # These leniencies are safe: one client sends and one engine answers.
        parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:  # bytes without a request, as before closing an idle connection
            self.close()
            return
        if self._problem is not None or self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(HttpBroken(f"no response in HTTP/1.1: {_described(error)}"))
        if self._body:
            self._silent_bytes = 0
        else:
            self._count_silence(len(data))
        if self._sink is None:
            self._steer()
            self._wake()
            return
        if self._body:
            self._pass_on(self._sink)
        if self.is_ended:
            self._wake()

    def _count_silence(self, size: int) -> None:
        self._silent_bytes += size
        if self._silent_bytes > SILENT_BYTES_MAX:
            self._fail(HttpBroken(f"a head or a trailer has more than {SILENT_BYTES_MAX} bytes"))

    def _pass_on(self, sink: Callable[[bytes], None]) -> None:
        try:
            sink(self._taken())
        except Exception as fault:  # not the engine's: the caller of `stream_to` gets it
            self.is_ended = False
            self._fail(fault)
            self.close()

    def eof_received(self) -> None:
        """Nothing more comes, though what we send may still be on its way."""
        self._end_of_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None  # it and its parser hold each other
        if self.on_lost is not None:
            self.on_lost(self)
        if exc is None:
            self._end_of_bytes()
        else:
            self._lose()

    def _end_of_bytes(self) -> None:
        if self._head is not None and not self._has_length and self._problem is None:
            self.is_ended = True
            self._keeps = False
        self._lose()

    def _lose(self) -> None:
        where = "before" if self._head is None else "inside"
        self._fail(HttpLost(f"the engine closed the connection {where} its answer"))

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.is_ended:
            raise HttpBroken("more than one response came")

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
        self._head = ResponseHead(
            status, content_type, chosen(self._passed) if self._passed else ()
        )
        self._keeps = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self.is_ended = self._head is not None


def _described(error: Exception) -> str:
    cause = error.__context__ if isinstance(error.__context__, HttpBroken) else error
    return str(cause) or type(error).__name__


KEEPALIVE_S = 2.0
CLOSED_IN_PASSING_S = 2.5  # a close that comes later may have ended work on the request
CONNECT_TIMEOUT_S = 5.0
_PORTS = {"http": 80, "https": 443}


class HttpClient:
    """Requests below one URL. `release` what `request` returns; close it at the end.

    The name is resolved for each new connection, and its addresses are tried in turn.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url`: http or https, with a user and a password if the engine requires them.

        `key`: sent with every request as a bearer token, instead of them.
        """
        parts = urlsplit(url)
        self.url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # for logs
        self.address = Address(parts.hostname or "", parts.port or _PORTS[parts.scheme])
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        self._always = _lines({"Host": parts.netloc.rpartition("@")[2]} | _login(url, key))
        self._idle: dict[Connection, asyncio.TimerHandle] = {}  # used last at the end
        self.on_kept_lost: Callable[[], None] | None = None  # the engine closed an idle one

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Connection:
        """Send a request and wait for the head of its response. Raises OSError (HttpLost among
        them), HttpBroken, and ValueError for headers with a line end.

        An engine may close a kept connection while a request is on its way to it: llama.cpp does so
        right after each streamed response, though its headers promise to keep the connection. So
        where a kept one ends at once and before any byte of a response, the request is sent once
        more, on a new one. An engine that closes later may have computed it: it is not repeated.
        """
        first = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        sized = body or method == "POST"  # without its length some would wait for a body
        length = b"Content-Length: %d\r\n\r\n" % len(body) if sized else b"\r\n"
        head = b"".join((first, self._always, _lines(headers), length))
        pieces = (head, body) if body else (head,)
        if (kept := self._kept()) is not None:
            sent_at = asyncio.get_running_loop().time()
            try:
                return await self._exchange(kept, pieces)
            except HttpLost:
                if not kept.is_untouched or _since(sent_at) > CLOSED_IN_PASSING_S:
                    raise
        return await self._exchange(await self._connected(), pieces)

    async def _exchange(self, connection: Connection, pieces: Sequence[bytes]) -> Connection:
        try:
            connection.send(pieces)
            await connection.head()
        except BaseException:  # cancelled too: only this closes it
            connection.close()
            raise
        return connection

    def release(self, connection: Connection) -> None:
        """The caller is done with it; it is closed if its response was not read to the end."""
        if not connection.is_usable:
            connection.close()
            return
        connection.reset()
        expire = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._expire, connection)
        self._idle[connection] = expire

    def close(self) -> None:
        while (connection := self._kept()) is not None:
            connection.close()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection, expire = self._idle.popitem()
            expire.cancel()
            if not connection.is_closing:
                return connection
        return None

    @property
    def is_connected(self) -> bool:
        """Whether a connection is kept that nobody uses."""
        return any(not connection.is_closing for connection in self._idle)

    def _lost(self, connection: Connection) -> None:
        expire = self._idle.pop(connection, None)
        if expire is not None:
            expire.cancel()
            if self.on_kept_lost is not None:
                self.on_kept_lost()

    def _expire(self, connection: Connection) -> None:
        """Engines would soon close it themselves."""
        del self._idle[connection]
        connection.close()

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    Connection, *self.address, ssl=self._tls
                )
        except TimeoutError as error:
            late = f"no connection to {self._where} in {CONNECT_TIMEOUT_S:g} s"
            raise HttpUnreached(late) from error
        except (OSError, UnicodeError) as error:  # the latter of names that can be no host's
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HttpUnreached(f"no connection to {self._where}: {why}") from error
        connection.on_lost = self._lost
        return connection

    @property
    def _where(self) -> str:
        return f"{self.address.host}:{self.address.port}"


def _lines(headers: Mapping[str, str]) -> bytes:
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    lines = len(headers)
    if text.count("\r") != lines or text.count("\n") != lines or "\0" in text:
        raise ValueError("a header has a line end or a zero in it")
    return text.encode("utf-8", "replace")


def origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]


def _login(url: str, key: str | None) -> dict[str, str]:
    if key is not None:
        return {"Authorization": f"Bearer {key}"}
    parts = urlsplit(url)
    if parts.username is None:
        return {}
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(words.encode()).decode()}


def _since(loop_time: float) -> float:
    return asyncio.get_running_loop().time() - loop_time
