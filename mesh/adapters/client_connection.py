"""One client's connection: it serves usual requests for work, and passes all others to aiohttp.

`POST /v1/chat/completions` and `/v1/completions` are parsed by httptools, admitted, and answered by
an `AnswerWriter`, with no task and no future per request. Anything unusual about a request (another
path, a chunked, compressed or large body, `Expect`, `Upgrade`, a repeated header, bytes that are no
HTTP) makes it aiohttp's, whose part gets the bytes as they came.

Requests are taken one at a time: aiohttp is given one, and not a byte of the next. A connection may
hold, besides the current request, HEAD_BYTES_MAX and what one read of the socket brings (256 KiB).
"""

import asyncio
import socket
from enum import Enum
from typing import TYPE_CHECKING, cast

import httptools

from mesh.adapters.answer_writer import AnswerWriter
from mesh.adapters.large_bodies import LARGE_BYTES
from mesh.adapters.read_request import RequestRefused, are_known, may_be_own, request_id
from mesh.adapters.request_body import ChunkedBody, Upload, UploadRate, too_slow
from schemas.http import H_EXPECT, H_ORIGIN, H_REGION, H_REQUEST_ID, Fault
from schemas.ids import RequestId

if TYPE_CHECKING:
    from mesh.adapters.http_server import AiohttpConnection, HttpServer

HEADER_BYTES_MAX = 16 * 1024  # one header line; agents' tokens are long, but not that long
HEADERS_MAX = 100
HEAD_BYTES_MAX = 32 * 1024  # the request's line and all headers; Apache and nginx allow as much
PROBE_S = 2.0  # for the headers of a client that came when the router was full
LINGER_S = 10.0  # for the rest of a body that is refused: closed at once, the error may be lost
LENGTH_DIGITS_MAX = 19  # of a content-length that fits any counter
WITHOUT_END = 1 << 62  # bytes
NEVER = float("inf")
LATE = "the request's headers did not arrive in time"
TOO_LONG = "the request's headers are too large"

_HEAD_END = b"\r\n\r\n"
_FOR_AIOHTTP = frozenset(
    ("transfer-encoding", "content-encoding", H_EXPECT, "upgrade", "sec-websocket-key1")
)


class Phase(Enum):
    """What the connection waits for."""

    FIRST = "first"  # the first byte of the first request
    IDLE = "idle"  # the first byte of a next one
    HEAD = "head"  # the rest of a head
    BODY = "body"  # the rest of a body
    ANSWER = "answer"  # the end of an answer
    NEXT = "next"  # the loop's next turn, or a client that reads
    AIOHTTP = "aiohttp"  # the end of what aiohttp does
    REFUSED = "refused"  # the rest of a body that was refused
    CLOSED = "closed"


class _RawHeaders(dict[bytes, bytes]):
    """Headers as httptools reports them; of a repeated one the last."""

    on_header = dict.__setitem__


class ClientConnection(asyncio.Protocol):
    """Owns the socket; made by `HttpServer`."""

    transport: asyncio.Transport

    def __init__(self, server: "HttpServer") -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self.is_probe = False  # it may request /health, /ready and the like only
        self._routes = server.completions
        self._phase = Phase.FIRST
        self._held = b""  # of an incomplete head, or what follows the current request
        self._raw = _RawHeaders()
        self._parser: httptools.HttpRequestParser | None = None  # of a head that is not whole
        self._path, self._headers = "", dict[str, str]()
        self._upload: Upload | None = None  # of a body that is not whole
        self._rate = UploadRate(0.0)
        self._missing_bytes = 0  # of the current request
        self._chunks: ChunkedBody | None = None  # where that is not known
        self._aiohttp: AiohttpConnection | None = None
        self._is_aiohttp_done = False
        self._writer: AnswerWriter | None = None
        self.is_last = False  # nothing is read after the current request
        self.is_paused = False  # for writing
        self._is_reading = True
        self._due_at = NEVER
        self._timer: asyncio.TimerHandle | None = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        slot = self._server.opened(self, transport)
        if slot.value == "none":
            return
        if slot.value == "probe":
            self.is_probe, self._routes = True, None
        self.transport = cast(asyncio.Transport, transport)  # uvloop's only looks like one
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
        if self._aiohttp is not None:
            self._aiohttp.connection_lost(exc)
        if self._writer is not None:
            self._writer.leave()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._aiohttp is not None:
            self._aiohttp.pause_writing()
        if self._writer is not None:
            self._writer.paused()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._aiohttp is not None:
            self._aiohttp.resume_writing()
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
        elif phase is Phase.AIOHTTP:
            self._for_aiohttp(data)
        elif phase is Phase.ANSWER or phase is Phase.NEXT:
            self._hold(data)
        elif phase is Phase.REFUSED:
            self._missing_bytes -= len(data)
            if self._missing_bytes <= 0:
                self._close()

    def close_after_answer(self) -> None:
        """Close at once, or when the current answer is over."""
        self.is_last = True
        if self._phase is Phase.ANSWER and self._writer is not None:
            self._writer.keep_alive = False
        elif self._phase is not Phase.AIOHTTP:
            self._close()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way that aiohttp knows nothing of."""
        return self._phase is Phase.ANSWER

    # What an `AnswerWriter` and aiohttp's side call.

    def wake_by(self, due_at: float) -> None:
        """Look at that time, on the loop's clock, whether this has taken too long."""
        self._due_at = due_at
        if self._timer is None or due_at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_at, self._on_timer)

    def answer_by(self, writer: AnswerWriter | None) -> None:
        """A handler of aiohttp's answers by this writer, until it passes None."""
        self._writer, self._due_at = writer, NEVER

    def aiohttp_answered(self) -> None:
        """aiohttp has written an answer that is not its last."""
        self._is_aiohttp_done = True
        if self._missing_bytes == 0 and self._chunks is None and self._phase is Phase.AIOHTTP:
            self._next()

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
        except httptools.HttpParserError:
            self._unparsable(data)
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
        if len(length) > LENGTH_DIGITS_MAX or data.startswith((b"CONNECT ", b"PRI ")):
            self._unparsable(data)
            return
        size = int(length)
        routes = self._routes
        if (
            routes is None
            or (path := routes.paths.get(data[: data.find(b"\r\n")])) is None
            or not 0 < size <= LARGE_BYTES
            or "host" not in headers
            or not _FOR_AIOHTTP.isdisjoint(headers)
            or len(headers) != data.count(b"\r\n", 0, start) - 2  # one is repeated
            or len(headers) > HEADERS_MAX
            or start > HEADER_BYTES_MAX
            or (any(map(may_be_own, headers)) and not are_known(headers))
        ):
            if "transfer-encoding" in headers:
                self._chunks = ChunkedBody()
            self._pass_on(data, start, size)
            return
        if not parser.should_keep_alive():
            self.is_last = True
        end = start + size
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
        assert self._upload is not None
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
        self._begin_answer(request_id(self._headers), self._headers).refuse(refused, self._path)

    def _serve(self, path: str, headers: dict[str, str], body: bytes, charged: int) -> None:
        """Admit a request that is whole; `charged`: what the budget was charged for it."""
        routes = self._routes
        assert routes is not None
        known_id = request_id(headers)
        writer = self._begin_answer(known_id, headers)
        try:
            parsed = routes.reader.read(path, headers, body, known_id, charged)
            writer.begin(routes.door.admit(parsed, headers, writer.changed))
        except RequestRefused as refused:
            writer.refuse(refused, path)
        except Exception as error:
            writer.fail(error, path)

    def _begin_answer(self, known_id: RequestId, headers: dict[str, str]) -> AnswerWriter:
        routes = self._routes
        assert routes is not None
        self._phase, self._due_at = Phase.ANSWER, NEVER
        of_answer: dict[str, str] = {H_REQUEST_ID: known_id, H_REGION: routes.region}
        if routes.cors is not None:
            of_answer.update(routes.cors.headers(headers.get(H_ORIGIN)))
        keep_alive = not self.is_last
        writer = AnswerWriter(self, routes.door, of_answer, self._answered, keep_alive=keep_alive)
        self._writer = writer
        return writer

    def _answered(self) -> None:
        """The writer is done."""
        writer, self._writer = self._writer, None
        if self._phase is not Phase.ANSWER:
            return
        assert writer is not None
        if writer.keep_alive and not self.is_last:
            self._next()
        elif self._missing_bytes:
            self._phase = Phase.REFUSED
            self.wake_by(self._loop.time() + LINGER_S)
        else:
            self._close()

    def _next(self) -> None:
        """The current answer is over."""
        self.wake_by(self._loop.time() + self._server.times.idle_s)
        if self.is_paused:  # a client that reads no answers is read no further
            self._phase = Phase.NEXT
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
            self._is_reading = True
            if self._aiohttp is None or not self._aiohttp.is_behind:
                self.transport.resume_reading()

    def _hold(self, data: bytes) -> None:
        """Keep what follows the current request."""
        self._held += data
        if len(self._held) > HEAD_BYTES_MAX and self.transport.is_reading():
            self._is_reading = False  # aiohttp may resume it, so the transport has the state
            self.transport.pause_reading()

    # aiohttp's requests.

    def _unparsable(self, data: bytes) -> None:
        """aiohttp finds what is wrong with it, answers, and closes the connection."""
        self.is_last = True
        self._parser, self._held = None, b""
        self.wake_by(self._loop.time() + self._server.times.headers_s)
        self._pass_on(data, len(data), WITHOUT_END)

    def _pass_on(self, data: bytes, head: int, body: int) -> None:
        """Pass a request with so many bytes of head and body to aiohttp."""
        self._phase, self._is_aiohttp_done = Phase.AIOHTTP, False
        if self._aiohttp is None:
            self._aiohttp = self._server.aiohttp_connection(self)
            self._aiohttp.connection_made(self.transport)
            if self.is_paused:
                self._aiohttp.pause_writing()
        self._missing_bytes = body
        # Together: aiohttp answers a broken body at once only if it came with its head.
        self._for_aiohttp(data[head:], data[:head])

    def _for_aiohttp(self, data: bytes, head: bytes = b"") -> None:
        """Bytes of the body of aiohttp's request, and perhaps of the next request."""
        assert self._aiohttp is not None
        if self._chunks is not None:
            try:
                end = self._chunks.end_in(data)
            except ValueError:
                self.is_last, self._missing_bytes, end = True, WITHOUT_END, 0
            if end is None:
                self._aiohttp.data_received(head + data)
                return
            self._missing_bytes, self._chunks = self._missing_bytes + end, None
        if len(data) > self._missing_bytes:
            self._hold(data[self._missing_bytes :])
            data = data[: self._missing_bytes]
        if data or head:
            self._missing_bytes -= len(data)
            self._aiohttp.data_received(head + data)
            if self._missing_bytes == 0 and self._is_aiohttp_done:
                self._next()

    # Ends.

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now < self._due_at:
            if self._due_at < NEVER:
                self._timer = self._loop.call_at(self._due_at, self._on_timer)
            return
        phase = self._phase
        if phase is Phase.FIRST or phase is Phase.HEAD:
            self._head_is_late()
        elif self._writer is not None:
            self._writer.deadline_passed()
        elif phase is Phase.BODY:
            self._refuse_body(too_slow())
        elif phase is Phase.CLOSED:
            self.transport.abort()
        elif phase is not Phase.AIOHTTP:
            self._close()
        elif self._aiohttp is not None and not self._aiohttp.has_request:
            self._head_is_late()

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

    def _close(self) -> None:
        self._phase, self._held = Phase.CLOSED, b""
        if self._upload is not None:
            self._upload.release()
            self._upload = None
        self.transport.close()
        self.wake_by(self._loop.time() + self._server.times.headers_s)  # for what is written
