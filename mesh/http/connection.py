"""One client's connection: it reads requests, and passes each on to be answered, one at a time.

A usual request for work (`POST /v1/chat/completions` and the like, with its length) is admitted
here, and answered by an `AnswerWriter`, with no task and no future. Any other one (another path, a
chunked, compressed or large body, `Expect`, `Upgrade`, a repeated header) is an `HttpRequest`, for
which the server's handler runs as a task.

Heads are parsed by httptools. A connection may hold, besides the current request, HEAD_BYTES_MAX
and what one read of the socket brings (256 KiB).
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
import termios
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, cast

import httptools

from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.core.view.bus_status import STOOD_STILL_S
from mesh.http.answer_writer import BEHIND_BYTES, DEADLINE_GRACE_S, AnswerWriter
from mesh.http.http_request import HttpRequest, IncomingBody, Work, parsed_target, with_labels
from mesh.http.read_request import are_known, may_be_own, request_id
from mesh.http.request_body import WINDOW_BYTES, ChunkedBody, Upload, UploadRate, too_slow
from schemas.exchange import LARGE_BYTES
from schemas.http import H_EXPECT, H_ORIGIN, H_REGION, H_REQUEST_ID, Fault
from schemas.ids import RequestId

if TYPE_CHECKING:
    from mesh.http.server import HttpServer

log = logging.getLogger(__name__)

HEADER_BYTES_MAX = 16 * 1024  # one header line; agents' tokens are long, but not that long
HEADERS_MAX = 100
HEAD_BYTES_MAX = 32 * 1024  # the request's line and all headers; Apache and nginx allow as much
PROBE_S = 2.0  # for the headers of a client that came when the router was full
LINGER_S = 10.0  # for the rest of a body that is refused: closed at once, the error may be lost
LENGTH_DIGITS_MAX = 19  # of a content-length that fits any counter
WITHOUT_END = 1 << 62  # bytes
ACKED_AT = 120  # tcpi_bytes_acked in Linux' struct tcp_info, of 64 bits
NEVER = float("inf")
LATE = "the request's headers did not arrive in time"
TOO_LONG = "the request's headers are too large"
SHUTTING_DOWN = Fault.DRAINING, "this router is shutting down"
FULL = "this router has as many connections as it may; use another region, or try again"

_HEAD_END = b"\r\n\r\n"
_VERSIONS = {"1.0": 0, "1.1": 1}
_UNUSUAL = frozenset(("transfer-encoding", "content-encoding", H_EXPECT, "upgrade"))
# Each means one thing (RFC 9110, 5.3): a server behind a proxy must not take the other one.
_SINGLE = (
    *("host", "content-length", "transfer-encoding", "content-type", "user-agent"),
    *("content-location", "content-range", "etag", "max-forwards", "server"),
)


_NO_HEADERS: dict[str, str] = {}


class _HeadRefused(Exception):
    """A head that httptools takes, and this server doesn't."""

    def __init__(self, message: str, fault: Fault = Fault.INVALID) -> None:
        super().__init__(message)
        self.fault = fault


class Phase(Enum):
    """What the connection waits for."""

    FIRST = "first"  # the first byte of the first request
    IDLE = "idle"  # the first byte of a next one
    HEAD = "head"  # the rest of a head
    BODY = "body"  # the rest of a body
    ANSWER = "answer"  # the end of an answer
    NEXT = "next"  # the loop's next turn, or a client that reads
    HANDLED = "handled"  # a handler
    REFUSED = "refused"  # the rest of a body that was refused
    CLOSED = "closed"


class _RawHeaders(dict[bytes, bytes]):
    """Headers as httptools reports them; of a repeated one the last."""

    on_header = dict.__setitem__


_NO_RAW_HEADERS = _RawHeaders()
ANSWERING = frozenset((Phase.ANSWER, Phase.HANDLED, Phase.REFUSED))


class _Head:
    """A whole head as httptools reads it, with all its headers in their order."""

    def __init__(self, data: bytes) -> None:
        self.target, self.method, self.version = b"", b"", ""
        self.keeps_alive = False
        self.lines: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.lines.append((name, value))

    def on_headers_complete(self) -> None:  # later, without a body, it forgets them
        self.method, self.version = self._parser.get_method(), self._parser.get_http_version()
        self.keeps_alive = self._parser.should_keep_alive()

    def checked_lines(self) -> dict[str, list[str]]:
        """All values of each header, by names in lower case. Raises _HeadRefused for a head that
        httptools takes, and this server doesn't."""
        if self.version not in _VERSIONS:
            raise _HeadRefused("only versions 1.0 and 1.1 of HTTP are served here")
        sizes = (len(name) + len(value) for name, value in self.lines)
        if len(self.lines) > HEADERS_MAX or max((len(self.target), *sizes)) > HEADER_BYTES_MAX:
            raise _HeadRefused(TOO_LONG, Fault.HEADERS_TOO_LARGE)
        found: dict[str, list[str]] = {}
        for name, value in self.lines:
            text = value.strip(b" \t").decode("utf-8", "surrogateescape")
            found.setdefault(name.decode().lower(), []).append(text)
        for single in _SINGLE:
            if len(found.get(single, ())) > 1:
                raise _HeadRefused(f"{single} is given twice; give it once")
        if self.version == "1.1" and "host" not in found:
            raise _HeadRefused("a request has a header host")
        return found


class ClientConnection(asyncio.Protocol):
    """Owns the socket; made by `HttpServer`."""

    transport: asyncio.Transport

    __slots__ = (
        "_caller",
        "_chunks",
        "_due_at",
        "_handled",
        "_headers",
        "_held",
        "_is_reading",
        "_looks_at",
        "_loop",
        "_missing_bytes",
        "_parser",
        "_path",
        "_phase",
        "_rate",
        "_raw",
        "_routes",
        "_server",
        "_stood_still",
        "_timer",
        "_unread_bytes",
        "_upload",
        "_wants_writing",
        "_writer",
        "is_last",
        "is_paused",
        "is_probe",
        "task",
        "transport",
    )

    def __init__(self, server: "HttpServer") -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self.is_probe = False  # it may request /health, /ready and the like only
        self._routes = server.completions
        self._phase = Phase.FIRST
        self._held = b""  # of an incomplete head, or what follows the current request
        self._raw = _NO_RAW_HEADERS  # of a head that is not whole
        self._parser: httptools.HttpRequestParser | None = None
        self._path, self._headers = "", _NO_HEADERS
        self._caller: Caller | None = None  # who sent the current request
        self._upload: Upload | None = None  # of a body that is not whole
        self._rate: UploadRate | None = None
        self._missing_bytes = 0  # of the current request
        self._unread_bytes = 0  # of its answer
        self._chunks: ChunkedBody | None = None  # where that is not known
        self._handled: HttpRequest | None = None
        self.task: asyncio.Task[None] | None = None  # its handler's
        self._wants_writing: asyncio.Future[None] | None = None
        self._writer: AnswerWriter | None = None
        self.is_last = False  # nothing is read after the current request
        self.is_paused = False  # for writing
        self._is_reading = True
        self._due_at = NEVER
        self._timer: asyncio.Handle | None = None
        self._looks_at = NEVER  # when `_timer` is due
        self._stood_still = False  # this process, since the last answer

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        slot = self._server.opened(self, transport)
        if slot.value == "none":
            return
        if slot.value == "probe":
            self.is_probe, self._routes = True, None
        self.transport = cast(asyncio.Transport, transport)  # uvloop's only looks like one
        self.transport.set_write_buffer_limits(BEHIND_BYTES)
        plug = transport.get_extra_info("socket")
        if plug is not None:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        wait_s = PROBE_S if self.is_probe else self._server.times.headers_s
        self.wake_by(self._loop.time() + wait_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._phase = Phase.CLOSED
        self._server.closed(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._upload is not None:
            self._upload.release()
            self._server.upload_left(self._path, self._headers)
        if self.task is not None:
            self.task.cancel()
        if self._writer is not None:
            self._writer.leave()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._writer is not None:
            self._writer.paused()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._wants_writing is not None and not self._wants_writing.done():
            self._wants_writing.set_result(None)
        if self._writer is not None:
            self._writer.resumed()
        elif self._phase is Phase.NEXT:
            self._next()

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is Phase.IDLE or phase is Phase.FIRST or phase is Phase.HEAD:
            self._read(data)
        elif phase is Phase.BODY:
            self._body_arrived(data)
        elif phase is Phase.HANDLED:
            self._handled_body_arrived(data)
        elif phase is Phase.ANSWER or phase is Phase.NEXT:
            self._hold(data)
        elif phase is Phase.REFUSED:
            self._drop(data)

    def retire(self) -> None:
        """Close with the next answer whose head can say so."""
        self.is_last = True
        if self._writer is not None:
            self._writer.close_after()

    def close_if_idle(self) -> None:
        if self._phase is Phase.IDLE or self._phase is Phase.FIRST:
            self._close()

    def close_after_answer(self) -> None:
        """Close at once, or when the current answer is over."""
        self.is_last = True
        if self._phase is Phase.ANSWER and self._writer is not None:
            self._writer.keep_alive = False
        elif self._phase is Phase.BODY:
            self._refuse_body(RequestRefused(*SHUTTING_DOWN))
        elif self._phase is not Phase.HANDLED and self._phase is not Phase.REFUSED:
            self._close()

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered, or an answer still on its way."""
        return self._phase in ANSWERING or self.transport.get_write_buffer_size() > 0

    # What an `AnswerWriter` and an `HttpRequest` call.

    async def writable(self) -> None:
        """Wait until the client has read most of what was written."""
        while self.is_paused:
            self._wants_writing = self._loop.create_future()
            try:
                await self._wants_writing
            finally:
                self._wants_writing = None

    def wake_by(self, due_at: float) -> None:
        """Look at that time, on the loop's clock, whether this has taken too long."""
        self._due_at = due_at
        if self._timer is None or due_at < self._looks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._look_at(due_at)

    def _look_at(self, due_at: float) -> None:
        # uvloop's handle of a time that has passed does not know when it is due.
        self._looks_at, self._timer = due_at, self._loop.call_at(due_at, self._on_timer)

    # Reading.

    def _read(self, data: bytes) -> None:
        """Bytes came that begin, or go on, with a request's head."""
        held = len(self._held)
        if held:
            data = self._held + data
        elif data[0] in b"\r\n":  # RFC 9112, 2.2: empty lines before a request are ignored
            data = data.lstrip(b"\r\n")
            if not data:
                return
        end = data.find(_HEAD_END, max(0, held - 3))
        if end > HEAD_BYTES_MAX or (end < 0 and len(data) > HEAD_BYTES_MAX):
            self._cut(Fault.HEADERS_TOO_LARGE, TOO_LONG)
            return
        raw, parser = self._raw, self._parser
        if parser is None:
            raw = _RawHeaders()
            parser = httptools.HttpRequestParser(raw)
        try:
            parser.feed_data(data[held : end + 4] if end >= 0 else data[held:])
        except httptools.HttpParserUpgrade:
            pass  # what follows is still framed by the head
        except httptools.HttpParserError as error:
            self._cut(Fault.INVALID, f"not an HTTP request: {error}")
            return
        if end < 0:
            self._raw, self._parser = raw, parser
            self._held = data
            if self._phase is Phase.IDLE:
                self.wake_by(self._loop.time() + self._server.times.headers_s)
            self._phase = Phase.HEAD
            return
        self._parser, self._held, self._due_at = None, b"", NEVER
        self._head_arrived(data, end + 4, raw, parser)

    def _head_arrived(
        self, data: bytes, start: int, raw: _RawHeaders, parser: httptools.HttpRequestParser
    ) -> None:
        """A head is whole; the body begins at `start`."""
        headers = {
            name.lower().decode(): value.strip(b" \t").decode("utf-8", "surrogateescape")
            for name, value in raw.items()
        }
        length = headers.get("content-length", "0")
        size = int(length) if len(length) <= LENGTH_DIGITS_MAX else -1
        routes, caller = self._routes, None
        if routes is not None and routes.callers.are_told_apart:
            caller = routes.callers.known(headers)
        if (
            routes is None
            or (path := routes.paths.get(data[: data.find(b"\r\n")])) is None
            or not 0 < size <= LARGE_BYTES
            or "host" not in headers
            or not _UNUSUAL.isdisjoint(headers)
            or len(headers) != data.count(b"\r\n", 0, start) - 2  # one is repeated
            or len(headers) > HEADERS_MAX
            or start > HEADER_BYTES_MAX
            or (caller is None and routes.callers.are_told_apart)
            or (any(map(may_be_own, headers)) and not are_known(headers))
        ):
            self._begin_handled(data, start, size)
            return
        if not parser.should_keep_alive():
            self.is_last = True
        end, self._caller = start + size, caller
        if len(data) >= end:
            self._held = data[end:]
            self._serve(path, headers, data[start:end], 0)
            return
        self._phase, self._missing_bytes = Phase.BODY, size
        self._path, self._headers = path, headers
        self._upload = Upload(routes.door.bodies, None, size)
        now = self._loop.time()
        self._rate = UploadRate(now)
        self.wake_by(self._rate.due_at)
        if len(data) > start:
            self._body_arrived(data[start:])

    def _body_arrived(self, data: bytes) -> None:
        assert self._upload is not None and self._rate is not None
        if len(data) > self._missing_bytes:
            data, self._held = data[: self._missing_bytes], data[self._missing_bytes :]
        self._missing_bytes -= len(data)
        try:
            self._upload.arrived(data)
        except RequestRefused as refused:
            self._refuse_body(refused)
            return
        self._rate.arrived(len(data), self._loop.time())
        if self._missing_bytes:
            self.wake_by(self._rate.due_at)
            return
        upload, self._upload = self._upload, None
        self._serve(self._path, self._headers, b"".join(upload.chunks()), upload.taken)

    def _refuse_body(self, refused: RequestRefused) -> None:
        """Answer before the body has come; what is left of it is read and dropped."""
        assert self._upload is not None and self._routes is not None
        self._upload.release()
        self._upload = None
        if self._missing_bytes:
            self.is_last = True
        self._server.count(refused.fault.value.code)
        writer = self._begin_answer(request_id(self._headers), self._headers)
        writer.refuse(refused, self._path)

    def _serve(self, path: str, headers: dict[str, str], body: bytes, charged: int) -> None:
        """Admit a request that is whole; `charged`: what the budget was charged for it."""
        routes = self._routes
        assert routes is not None
        known_id = request_id(headers)
        writer = self._begin_answer(known_id, headers)
        try:
            parsed = routes.reader.read(path, headers, body, known_id, charged)
            writer.begin(routes.door.admit(parsed, headers, self._caller, writer.changed))
        except RequestRefused as refused:
            writer.refuse(refused, path)
        except Exception as error:
            writer.fail(error, path)

    def _begin_answer(
        self, known_id: RequestId, headers: Mapping[str, str], minor: int = 1
    ) -> AnswerWriter:
        routes = self._routes
        assert routes is not None
        self._phase, self._due_at = Phase.ANSWER, NEVER
        of_answer: dict[str, str] = {H_REQUEST_ID: known_id, H_REGION: routes.region}
        if routes.cors is not None:
            of_answer.update(routes.cors.headers(headers.get(H_ORIGIN)))
        writer = AnswerWriter(
            self, routes.door, of_answer, self._answered, keep_alive=not self.is_last, minor=minor
        )
        self._writer = writer
        return writer

    def _answered(self) -> None:
        """The writer is done."""
        writer, self._writer = self._writer, None
        if self._phase is not Phase.ANSWER:
            return
        assert writer is not None
        if writer.keep_alive:  # as its head said
            self._next()
        else:
            self._end()

    def _next(self) -> None:
        """The current answer is over."""
        self._stood_still = False
        if self.is_last and not self._held and self._server.is_retired:
            self._close()
            return
        self.wake_by(self._loop.time() + self._server.times.idle_s)
        if self.is_paused:  # a client that reads no answers is read no further
            self._phase, self._unread_bytes = Phase.NEXT, self._count_unread()
        elif self._held or not self._is_reading:
            self._phase = Phase.NEXT
            self._loop.call_soon(self._read_held)
        else:
            self._phase = Phase.IDLE

    def _read_held(self) -> None:
        """Read what came while the previous request was answered."""
        if self._phase is not Phase.NEXT:
            return
        data, self._held = self._held, b""
        self._phase = Phase.IDLE
        if data:
            self._read(data)
        if not self._is_reading and len(self._held) <= HEAD_BYTES_MAX:
            self._read_on(True)

    def _hold(self, data: bytes) -> None:
        """Keep what follows the current request."""
        self._held += data
        if len(self._held) > HEAD_BYTES_MAX:
            self._read_on(False)

    def _read_on(self, is_reading: bool) -> None:
        """Go on reading the socket, or stop."""
        if is_reading is not self._is_reading and not self.transport.is_closing():
            self._is_reading = is_reading
            if is_reading:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # Requests for handlers.

    def _begin_handled(self, data: bytes, start: int, size: int) -> None:
        """The head in `data[:start]` is no usual request for work; `size`: of its body."""
        try:
            request = self._parsed(data[:start], size)
        except _HeadRefused as refused:
            self._cut(refused.fault, str(refused))
            return
        if "transfer-encoding" in request.headers:
            self._chunks = ChunkedBody()
        if self.is_probe:
            self.is_last = True  # to free its place
            if request.path not in self._server.probes:
                self._server.count("connections")
                request.refused = RequestRefused(Fault.OVERLOADED, FULL)
        self._missing_bytes = size
        self._phase, self._handled = Phase.HANDLED, request
        if len(data) > start:
            self._handled_body_arrived(data[start:])
        self.task = self._loop.create_task(self._handle(request))

    def _parsed(self, data: bytes, size: int) -> HttpRequest:
        """Raises _HeadRefused."""
        head = _Head(data)
        lines = head.checked_lines()
        if size < 0:
            raise _HeadRefused("content-length has too many digits")
        method = head.method.decode()
        try:
            path, query = parsed_target(method, head.target.decode("utf-8", "replace"))
        except ValueError as error:
            raise _HeadRefused(f"not an HTTP request: {error}") from error
        if not head.keeps_alive:
            self.is_last = True
        path, problem = with_labels(path, lines)
        is_whole = size == 0 and "transfer-encoding" not in lines
        body = IncomingBody(self._read_on, is_whole=is_whole)
        request = HttpRequest(self, method, path, query, _VERSIONS[head.version], lines, body)
        request.refused = problem
        return request

    def _handled_body_arrived(self, data: bytes) -> None:
        """Bytes of the body of the handled request, and perhaps of the next request."""
        request = self._handled
        assert request is not None
        body = request.body
        if body.is_whole:
            self._hold(data)
            return
        if body.is_broken:
            return
        if self._chunks is not None:
            try:
                decoded, end = self._chunks.decoded(data)
            except ValueError:
                self.is_last, self._chunks, self._missing_bytes = True, None, WITHOUT_END
                body.broke()
                return
            body.arrived(decoded, is_whole=end is not None)
            if end is None:
                return
            self._chunks = None
        else:
            end = min(len(data), self._missing_bytes)
            self._missing_bytes -= end
            body.arrived(data[:end], is_whole=self._missing_bytes == 0)
        if end < len(data):
            self._hold(data[end:])

    async def _handle(self, request: HttpRequest) -> None:
        """Have the request answered, or placed. Cancelled when the client is gone."""
        try:
            done = await self._server.handler(request)
            self._handled = self.task = None
            if not request.body.is_whole:
                self.is_last = True
            if isinstance(done, Work):
                self._place(request, done)
                return
            if not request.has_begun:
                request.begin(done)
        except Exception as error:  # the answer had begun, or could not be made
            log.error("the answer to %s %s is cut", request.method, request.path, exc_info=error)
            self.transport.abort()
            return
        if request.keep_alive:  # as its head said
            self._next()
        else:
            self._end()

    def _place(self, request: HttpRequest, work: Work) -> None:
        parsed, headers = work.parsed, work.headers
        routes = self._routes
        assert routes is not None
        writer = self._begin_answer(parsed.request_id, headers, request.minor)
        try:
            writer.begin(routes.door.admit(parsed, headers, request.caller, writer.changed))
        except RequestRefused as refused:
            writer.refuse(refused, parsed.path)
        except Exception as error:
            writer.fail(error, parsed.path)

    # Ends.

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now < self._due_at:
            if self._due_at < NEVER:
                self._look_at(self._due_at)
            return
        phase = self._phase
        is_late = now - self._due_at > STOOD_STILL_S
        if is_late and phase is not Phase.BODY and not self._stood_still:
            # This process stood still: what came meanwhile is read first, once a request.
            self._stood_still = True
            self.wake_by(now + DEADLINE_GRACE_S)
            return
        if phase is Phase.FIRST or phase is Phase.HEAD:
            self._head_is_late()
        elif self._writer is not None:
            self._writer.deadline_passed()
        elif phase is Phase.BODY:
            self._body_is_late(now)
        elif (phase is Phase.CLOSED or phase is Phase.NEXT) and self._has_read_on():
            self.wake_by(now + self._server.times.headers_s)
        elif phase is Phase.CLOSED:
            self.transport.abort()
        elif phase is not Phase.HANDLED:
            self._close()

    def _has_read_on(self) -> bool:
        """Whether the client has read WINDOW_BYTES of its last answer since this was asked last, or
        since all was written. What the kernel holds counts: it may take megabytes at once."""
        before, self._unread_bytes = self._unread_bytes, self._count_unread()
        return before - self._unread_bytes >= WINDOW_BYTES

    def _count_unread(self) -> int:
        """Bytes written that the client's machine has not got; under TLS, less a constant."""
        unsent = self.transport.get_write_buffer_size()
        plug = self.transport.get_extra_info("socket")
        if self.transport.get_extra_info("ssl_object") is not None:
            # What is encrypted and not yet the kernel's is in no count.
            with contextlib.suppress(OSError, ValueError):
                info = plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED_AT + 8)
                return -int.from_bytes(info[ACKED_AT:], sys.byteorder)
            return 0
        if not unsent or plug is None or plug.fileno() < 0:
            return unsent
        in_kernel = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(plug.fileno(), termios.TIOCOUTQ, in_kernel)
        return unsent + int.from_bytes(in_kernel, sys.byteorder)

    def _body_is_late(self, now: float) -> None:
        assert self._rate is not None
        if self._rate.is_over(now):
            self._refuse_body(too_slow())
        else:
            self.wake_by(self._rate.due_at)

    def _head_is_late(self) -> None:
        self._server.count("headers_late")
        if self._phase is Phase.FIRST:  # a client might take it for the answer to what it sends
            self._close()
        else:
            self._cut(Fault.REQUEST_TIMEOUT, LATE)

    def _cut(self, fault: Fault, message: str) -> None:
        """End a connection on which no request could be read."""
        self.transport.write(self._server.raw_error(fault, message))
        self._close()

    def _end(self) -> None:
        """The connection's last answer is written; the rest of a body is read and dropped."""
        if not self._missing_bytes and self._chunks is None:
            if not self._held and self._is_reading:
                self._close()
                return
            # Further requests came. With a close at once, their unread bytes would make the kernel
            # drop what is written (RFC 9112, 9.6).
            self._missing_bytes = WITHOUT_END
            if self.transport.can_write_eof():  # TLS has no such thing
                self.transport.write_eof()
        self._phase = Phase.REFUSED
        self.wake_by(self._loop.time() + LINGER_S)
        data, self._held = self._held, b""
        self._read_on(True)
        self._drop(data)

    def _drop(self, data: bytes) -> None:
        """Bytes of a body that was refused."""
        if self._chunks is None:
            self._missing_bytes = max(0, self._missing_bytes - len(data))
        else:
            try:
                _, end = self._chunks.decoded(data)
            except ValueError:
                end = 0
            if end is not None:
                self._chunks = None
        if not self._missing_bytes and self._chunks is None:
            self._close()

    def _close(self) -> None:
        self._phase, self._held = Phase.CLOSED, b""
        if self._upload is not None:
            self._upload.release()
            self._upload = None
        self._unread_bytes = self._count_unread()
        if not self.transport.is_closing():  # a second time, asyncio forgets what it encrypts
            self.transport.close()
        self.wake_by(self._loop.time() + self._server.times.headers_s)  # for what is written
