"""aiohttp's low-level server; requests that it can't even parse go to the handler like all others.

So every error has the shape and the headers that one place gives it. Beside that: limits on
connections and on what they may take of time and memory, which aiohttp lacks. A client that sends
its headers byte by byte, or none, is let go after `headers_s`; an idle one after `idle_s`.

A connection may hold, besides the request that is answered, what one read of the socket brings
(256 KiB): the head of a request has HEAD_BYTES_MAX as a whole, and requests that are sent before
the one in hand is answered are read no further than EARLY_REQUESTS.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import http_exceptions, web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from mesh.adapters.connections import REFUSALS, Connections, Place
from mesh.adapters.problem import Problem
from mesh.adapters.raw_answer import raw_error
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import Fault

log = logging.getLogger(__name__)

HEADER_BYTES_MAX = 16 * 1024  # one header line; agents' tokens are long, but not that long
HEADERS_MAX = 100
HEAD_BYTES_MAX = 32 * 1024  # the request's line and all headers; Apache and nginx allow as much
EARLY_REQUESTS = 2  # with so many waiting behind the one in hand, the socket is read no further
BODY_BYTES_READ = 64 * 1024  # of a body that nobody takes; twice that, and it is read no further
PROBE_S = 2.0  # for the headers of who came when the router was full
REFUSAL_S = 1.0  # for one that is refused to read why
UNPARSABLE = web.RequestKey("UNPARSABLE", Problem)  # all that is to be said of a request
FULL = "this router has as many connections as it may; use another region, or try again"
LATE = "the request's headers did not arrive in time"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """How long a connection may take, in seconds."""

    headers_s: float = 20.0  # from its beginning, or a next request's, to the end of the headers
    idle_s: float = 75.0  # between requests; nginx and AWS' balancers let go after 60 themselves


class _Protocol(RequestHandler):
    """Leaves to the handler what is said of unparsable requests, and closes the connection."""

    __slots__ = ("_began", "_body", "_head_bytes", "_late", "_place", "_server", "_since_bytes")

    def __init__(self, server: "HttpServer", **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._place = Place.NONE
        self._late: asyncio.TimerHandle | None = None  # while headers are awaited
        self._began = False  # some of them are here
        self._body: StreamReader = EMPTY_PAYLOAD  # of the newest request
        self._head_bytes = 0  # of the next one's head that came in reads of their own
        self._since_bytes = 0  # at least those of the next one's head
        self._max_msg_queue_size, self._msg_queue_resume_size = EARLY_REQUESTS, EARLY_REQUESTS - 1

    @property
    def is_probe(self) -> bool:
        """Whether it may ask for nothing but how the router is."""
        return self._place is Place.PROBE

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._place = self._server.places.enter()
        if self._place is Place.NONE:  # taken since the connection was accepted
            refusal = _Refusal(self._server)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._place is not Place.NONE:
            self._place = Place.NONE
            self._server.places.leave()
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        known, is_head = len(self._messages), self._body.is_eof()
        self._since_bytes += len(data)
        super().data_received(data)
        if len(self._messages) > known:
            self._requests_came(known, len(data))
        elif is_head and data and not self._close:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._head_too_long()
            elif not self._messages and self._current_request is None:
                self._began = True
                if self._late is None:
                    self._await_headers()

    def _requests_came(self, first: int, read_bytes: int) -> None:
        """The one at that place of the queue, and those after it, came with a read so large."""
        messages = self._messages
        if self._since_bytes > HEAD_BYTES_MAX:  # else no head is too long
            for place in range(first, len(messages)):
                if _head_bytes(messages[place][0]) > HEAD_BYTES_MAX:
                    messages[place] = _TOO_LONG
        self._body = messages[-1][1]
        self._head_bytes, self._since_bytes = 0, read_bytes
        if self._late is not None:
            self._headers_came()

    def _head_too_long(self) -> None:
        """Answer so, and read nothing more; a request in hand is answered, and then closed."""
        self._headers_came()
        self._messages.append(_TOO_LONG)
        self._close = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _await_headers(self) -> None:
        wait_s = PROBE_S if self.is_probe else self._server.times.headers_s
        self._late = self._loop.call_later(wait_s, self._headers_late)

    def _headers_came(self) -> None:
        self._began = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _headers_late(self) -> None:
        self._late = None
        if self.transport is None or self._messages or self._waiter is None:
            return
        self._server.count("headers_late")
        if self._began:  # else a client might take it for the answer to what it is about to send
            self.transport.write(self._server.raw_error(Fault.REQUEST_TIMEOUT, LATE))
        self.force_close()

    def _make_error_handler(self, err_info: Any) -> Handler:
        handle, problem = self._request_handler, _problem(err_info.exc, err_info.message)
        assert handle is not None, "a request on a connection that is gone"

        async def answered(request: web.BaseRequest) -> web.StreamResponse:
            request[UNPARSABLE] = problem
            answer = await handle(request)
            answer.force_close()
            return answer

        return answered

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size == 0:
            log.error("no answer could be made", exc_info=exc)
        raise ConnectionError("an answer that began, or could not, is cut") from exc

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What is still wrong with the rest of a body that was refused is no news."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


_TOO_LONG = (
    _ErrInfo(400, http_exceptions.LineTooLong(b"all headers", HEAD_BYTES_MAX), ""),
    EMPTY_PAYLOAD,
)


def _head_bytes(message: RawRequestMessage | _ErrInfo) -> int:
    """What its line and headers take, in bytes, less the spaces between them."""
    if isinstance(message, _ErrInfo):
        return 0
    return len(message.path) + sum(
        len(name) + len(value) + 4 for name, value in message.raw_headers
    )


def _problem(error: BaseException | None, message: str) -> Problem:
    if isinstance(error, http_exceptions.LineTooLong) or (
        isinstance(error, http_exceptions.BadHttpMessage) and "many headers" in str(error)
    ):
        return Problem(Fault.HEADERS_TOO_LARGE, "the request's headers are too large")
    return Problem(Fault.INVALID, message or "not an HTTP request")


class _Refusal(asyncio.Protocol):
    """A connection beyond all places: it is told so without being read, and closed.

    Closed at once, its own bytes, unread, would make the kernel drop ours; so it has a moment.
    """

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._over: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's only looks like one
        self._server.count("connections")
        if not self._server.begin_refusal():
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._over = loop.call_later(REFUSAL_S, transport.abort)  # what it sends is not kept
        transport.write(self._server.raw_error(Fault.OVERLOADED, FULL))

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._over is not None:
            self._over.cancel()
            self._server.end_refusal()


class HttpServer(web.Server):
    """Calls `handler` with each request; cancels it when the client hangs up.

    A request that can't be parsed, or came when the server was full, has an UNPARSABLE: answer it
    with that.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        region: str = "",
        times: HttpTimes = HttpTimes(),
        connections: Connections | None = None,
        probes: Collection[str] = (),
        count: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`region`: for errors that are no answer to a request. `probes`: paths that may be asked
        for when it is full. `count` is called with why a connection is refused or cut:
        "connections" or "headers_late"."""
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)
        self._region = region
        self.times, self.count = times, count
        self.places = connections or Connections()
        self._probes = frozenset(probes)
        self._refusals = 0

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]
        if not self.places.has_probes:
            return _Refusal(self)
        return _Protocol(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=self.times.idle_s,
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            read_bufsize=BODY_BYTES_READ,
            auto_decompress=False,  # without end, and without regard to others
        )

    def raw_error(self, fault: Fault, message: str) -> bytes:
        """The answer on a connection on which no request was read."""
        return raw_error(fault, message, self._region)

    def begin_refusal(self) -> bool:
        """Whether one more may be told why it is refused."""
        if self._refusals >= REFUSALS:
            return False
        self._refusals += 1
        return True

    def end_refusal(self) -> None:
        """It has been told."""
        self._refusals -= 1

    def _request(self, message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        is_probe = protocol.is_probe
        if is_probe:
            message = message._replace(should_close=True)  # its place is wanted
        request = web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=BODY_BYTES_MAX,
        )
        if is_probe and request.path not in self._probes:
            self.count("connections")
            request[UNPARSABLE] = Problem(Fault.OVERLOADED, FULL)
        return request
