"""The HTTP server of one port: its connections, their limits, and aiohttp for unusual requests.

`ClientConnection` owns each socket. It serves requests for work itself, and passes all others to an
`AiohttpConnection`. Requests that aiohttp can't even parse go to the handler like all others, so
every error has the shape and the headers that one place gives it.

A connection is a descriptor and up to some 20 KB. Without a limit, descriptors run out, and then a
process can't even report that it is full: it accepts no connection, not even of monitoring. A
client beyond the limit gets a 503. The last places are for probes: such a connection may request
`/health`, `/ready` and the like, and must do so at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, cast

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from mesh.adapters.client_connection import HEADER_BYTES_MAX, HEADERS_MAX, ClientConnection
from mesh.adapters.cors import Cors
from mesh.adapters.front_door import FrontDoor
from mesh.adapters.read_request import RequestReader, RequestRefused, request_id
from schemas import http
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import Fault
from schemas.ids import RegionId

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 32_768  # one process; at 20 KB each that is two thirds of a gigabyte
PROBES = 64
RESERVED = 192  # descriptors of probes, refusals on their way out, bus, files, large bodies
REFUSALS = 64  # connections that are sent a 503 at one time; others are cut
PAGE_CONNECTIONS = 256  # of a page of metrics and the like
DESCRIPTORS_KEPT = RESERVED + PROBES + REFUSALS + PAGE_CONNECTIONS
BODY_BYTES_READ = 64 * 1024  # of a body; at twice that, unread, the socket is paused
REFUSAL_S = 1.0  # for one that is refused to read why
NO_IDLE_LIMIT_S = 365 * 86_400.0  # of aiohttp's: `ClientConnection` has its own
UNPARSABLE = web.RequestKey("UNPARSABLE", RequestRefused)  # the error to answer with
FULL = "this router has as many connections as it may; use another region, or try again"

NO_ROUTE = "-"  # of a request that could not be read

HttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """How long a connection may take, in seconds."""

    headers_s: float = 20.0  # from its beginning, or a next request's, to the end of the headers
    idle_s: float = 75.0  # between requests; nginx and AWS' balancers let go after 60 themselves


@dataclass(slots=True)
class CompletionRoutes:
    """What connections need to serve requests for work without aiohttp."""

    paths: Mapping[bytes, str]  # by the request's first line
    reader: RequestReader
    door: FrontDoor
    region: RegionId
    cors: Cors | None


class ConnectionSlot(Enum):
    """What a new connection may request."""

    ANY = "any"
    PROBE = "probe"
    NONE = "none"


def connections_max(descriptors: int) -> int:
    """How many a router may have that may open so many descriptors, for `ConnectionLimit`."""
    return min(CONNECTIONS_MAX, max(descriptors // 4, descriptors - DESCRIPTORS_KEPT))


class ConnectionLimit:
    """Counts the connections of one port."""

    def __init__(self, most: int = CONNECTIONS_MAX, probes: int = PROBES) -> None:
        """`probes`: places beyond `most`."""
        self.most, self._probes = most, probes
        self.open = 0

    def enter(self) -> ConnectionSlot:
        """The place of a connection that was accepted. `leave` any but NONE."""
        if self.open < self.most:
            self.open += 1
            return ConnectionSlot.ANY
        if self.has_probes:
            self.open += 1
            return ConnectionSlot.PROBE
        return ConnectionSlot.NONE

    def leave(self) -> None:
        self.open -= 1
        assert self.open >= 0, "more connections left than came"

    @property
    def is_full(self) -> bool:
        """Whether the next connection may request probes only."""
        return self.open >= self.most

    @property
    def has_probes(self) -> bool:
        """Whether there is a place for one more probe."""
        return self.open < self.most + self._probes


class AiohttpConnection(RequestHandler):
    """Serves the requests that a `ClientConnection` passes to it."""

    __slots__ = ("_server", "client")

    def __init__(self, server: "HttpServer", client: ClientConnection) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=NO_IDLE_LIMIT_S,
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            read_bufsize=BODY_BYTES_READ,
            auto_decompress=False,  # without end, and without regard to others
        )
        self._server, self.client = server, client

    @property
    def has_request(self) -> bool:
        """Whether it has the head of a request that is not answered yet."""
        return self._current_request is not None or bool(self._messages)

    @property
    def is_behind(self) -> bool:
        """Whether it has paused reading the body."""
        return self._reading_paused

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer, and report when that is done."""
        if self.client.is_last:
            resp.force_close()
        response, is_gone = await super().finish_response(request, resp, start_time)
        if response.keep_alive and not is_gone:  # else it closes the connection
            self.client.aiohttp_answered()
        return response, is_gone

    def _make_error_handler(self, err_info: Any) -> HttpHandler:
        handle, refused = self._request_handler, _refused(err_info.exc, err_info.message)
        assert handle is not None, "a request on a connection that is gone"

        async def answered(request: web.BaseRequest) -> web.StreamResponse:
            request[UNPARSABLE] = refused
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
        """Cut an answer that began; `HttpApi` answers all others."""
        if request.writer.output_size == 0:
            log.error("no answer could be made", exc_info=exc)
        raise ConnectionError("an answer that began, or could not, is cut") from exc

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log all but what is still wrong with the rest of a body that was refused."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


def _refused(error: BaseException | None, message: str) -> RequestRefused:
    if isinstance(error, http_exceptions.LineTooLong) or (
        isinstance(error, http_exceptions.BadHttpMessage) and "many headers" in str(error)
    ):
        return RequestRefused(Fault.HEADERS_TOO_LARGE, "the request's headers are too large")
    return RequestRefused(Fault.INVALID, message or "not an HTTP request")


class _Refusal(asyncio.Protocol):
    """A connection beyond the limit: it is sent a 503 without being read, and closed.

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
    """Calls `handler` with each request that connections do not serve themselves.

    It cancels the handler when the client hangs up. A request that can't be parsed, or came when
    the server was full, has an UNPARSABLE: answer it with that.
    """

    def __init__(
        self,
        handler: HttpHandler,
        *,
        region: str = "",
        times: HttpTimes = HttpTimes(),
        connections: ConnectionLimit | None = None,
        probes: Collection[str] = (),
        count: Callable[[str], None] = lambda why: None,
        completions: CompletionRoutes | None = None,
    ) -> None:
        """`region`: for errors that are no answer to a request. `probes`: paths that may be asked
        for when it is full. `count` is called with why a connection is refused or cut:
        "connections" or "headers_late"."""
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)
        self._region = region
        self.times, self.count, self.completions = times, count, completions
        self.places = connections or ConnectionLimit()
        self._probes = frozenset(probes)
        self._refusals = 0
        self.clients: set[ClientConnection] = set()
        self._is_closing = False
        self._answered = asyncio.Event()

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]
        return ClientConnection(self) if self.places.has_probes else _Refusal(self)

    def aiohttp_connection(self, client: ClientConnection) -> AiohttpConnection:
        return AiohttpConnection(self, client)

    def opened(self, client: ClientConnection, transport: asyncio.BaseTransport) -> ConnectionSlot:
        """A connection is open. Where its slot is NONE it is another protocol's from now on."""
        slot = self.places.enter()
        if slot is ConnectionSlot.NONE:  # taken since the connection was accepted
            refusal = _Refusal(self)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
        else:
            self.clients.add(client)
        return slot

    def closed(self, client: ClientConnection) -> None:
        self.clients.remove(client)
        self.places.leave()
        if self._is_closing:
            self._answered.set()

    def pre_shutdown(self) -> None:
        self._is_closing = True
        for client in list(self.clients):
            client.close_after_answer()
        super().pre_shutdown()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Give answers that time, in seconds, and aiohttp's as much again; then cut them."""
        try:
            async with asyncio.timeout(timeout):
                while any(client.is_answering for client in self.clients):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            pass
        await super().shutdown(timeout)
        for client in list(self.clients):
            client.transport.abort()

    def raw_error(self, fault: Fault, message: str) -> bytes:
        """The whole answer on a connection on which no request was read."""
        body = http.error_body(fault, message)
        status = HTTPStatus(fault.value.status)
        new_id = request_id({})
        if self.completions is not None:
            refused = RequestRefused(fault, message)
            self.completions.door.ended.refused(new_id, NO_ROUTE, refused, method="")
        headers = {
            http.H_REQUEST_ID: new_id,
            http.H_REGION: self._region,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **http.error_headers(fault),
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join((*lines, "", "")).encode() + body

    def upload_left(self, path: str, headers: Mapping[str, str]) -> None:
        """A client has hung up before its body was whole."""
        if self.completions is not None:
            self.completions.door.ended.client_gone(request_id(headers), path)

    def begin_refusal(self) -> bool:
        """Whether one more connection may be sent why it is refused."""
        if self._refusals >= REFUSALS:
            return False
        self._refusals += 1
        return True

    def end_refusal(self) -> None:
        self._refusals -= 1

    def _request(self, message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        is_probe = protocol.client.is_probe
        if is_probe:
            message = message._replace(should_close=True)  # to free its place
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
            request[UNPARSABLE] = RequestRefused(Fault.OVERLOADED, FULL)
        return request
