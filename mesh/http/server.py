"""The HTTP server of one port: its connections, their limits, and how it ends.

`ClientConnection` owns each socket.

A connection is a descriptor and up to some 20 KB. Without a limit, descriptors run out, and then a
process can't even report that it is full: it accepts no connection, not even of monitoring. A
client beyond the limit gets a 503. The last places are for probes: such a connection may request
`/health`, `/ready` and the like, and must do so at once.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import cast

from infra.process import end_all
from mesh.adapters.refused import RequestRefused
from mesh.http.answer_head import answer_head
from mesh.http.callers import Callers
from mesh.http.connection import FULL, ClientConnection
from mesh.http.cors import Cors
from mesh.http.front_door import FrontDoor
from mesh.http.http_request import Handler
from mesh.http.read_request import RequestReader, request_id
from mesh.http.tls import ServerTls, TlsListener
from schemas import http
from schemas.http import Fault
from schemas.ids import RegionId

CONNECTIONS_MAX = 32_768  # one process; at 20 KB each that is two thirds of a gigabyte
PROBES = 64
RESERVED = 192  # descriptors of probes, refusals on their way out, bus, files, large bodies
REFUSALS = 64  # connections that are sent a 503 at one time; others are cut
PAGE_CONNECTIONS = 256  # of a page of metrics and the like
DESCRIPTORS_KEPT = RESERVED + PROBES + REFUSALS + PAGE_CONNECTIONS
REFUSAL_S = 1.0  # for one that is refused to read why
NOT_PLAIN = "this port speaks TLS: write https:// in place of http://"
BACKLOG = 1024  # connections that the kernel keeps for it

NO_ROUTE = "-"  # of a request that could not be read


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """How long a connection may take, in seconds."""

    headers_s: float = 20.0  # from its beginning, or a next request's, to the end of the headers
    idle_s: float = 75.0  # between requests; nginx and AWS' balancers let go after 60 themselves


@dataclass(slots=True)
class CompletionRoutes:
    """What connections need to serve usual requests for work without a handler."""

    paths: Mapping[bytes, str]  # by the request's first line
    reader: RequestReader
    door: FrontDoor
    region: RegionId
    callers: Callers
    cors: Cors | None = None


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


class _Refusal(asyncio.Protocol):
    """A connection that is sent an error without being read, and closed.

    Closed at once, its own bytes, unread, would make the kernel drop ours; so it has a moment.
    """

    def __init__(self, server: "HttpServer", why: str, fault: Fault, message: str) -> None:
        """`why`: what it is counted as."""
        self._server, self._why, self._fault, self._message = server, why, fault, message
        self._over: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's only looks like one
        self._server.count(self._why)
        if not self._server.begin_refusal():
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._over = loop.call_later(REFUSAL_S, transport.abort)  # what it sends is not kept
        transport.write(self._server.raw_error(self._fault, self._message))

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._over is not None:
            self._over.cancel()
            self._server.end_refusal()


class HttpServer:
    """Calls `handler` with each request that connections do not serve themselves.

    `listen`, then `close`.
    """

    def __init__(
        self,
        handler: Handler,
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
        "connections", "headers_late", "handshakes" or "plain_http"."""
        self.handler = handler
        self._region = region
        self.times, self.count, self.completions = times, count, completions
        self.places = connections or ConnectionLimit()
        self.probes = frozenset(probes)
        self._refusals = 0
        self.clients: set[ClientConnection] = set()
        self._listeners: asyncio.Server | TlsListener | None = None
        self._tls: TlsListener | None = None
        self._certificate: ServerTls
        self._is_closing = False
        self.is_retired = False
        self._answered = asyncio.Event()

    def __call__(self) -> asyncio.Protocol:
        return ClientConnection(self) if self.places.has_probes else self._full()

    def _full(self) -> _Refusal:
        return _Refusal(self, "connections", Fault.OVERLOADED, FULL)

    def _plain(self) -> _Refusal:
        return _Refusal(self, "plain_http", Fault.INVALID, NOT_PLAIN)

    async def listen(
        self,
        host: str = "",
        port: int = 0,
        *,
        shared: bool = False,
        listener: socket.socket | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """Accept connections at that address, or from that socket. `shared`: other processes accept
        there too. `tls`: with that certificate, no others. Raises OSError."""
        loop = asyncio.get_running_loop()
        if tls is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            plug = listener or socket.create_server(
                (host, port), family=family, backlog=BACKLOG, reuse_port=shared
            )
            self._certificate = tls
            self._tls = self._listeners = TlsListener(
                plug,
                lambda: self._certificate,
                connected=self,
                plain=self._plain,
                failed=lambda: self.count("handshakes"),
            )
        elif listener is not None:
            self._listeners = await loop.create_server(self, sock=listener, backlog=BACKLOG)
        else:
            self._listeners = await loop.create_server(
                self, host, port, backlog=BACKLOG, reuse_port=shared or None
            )

    def renew(self, tls: ServerTls) -> None:
        """Use that certificate for connections that come from now on."""
        self._certificate = tls

    @property
    def port(self) -> int:
        """Where it listens: that port, or the free one that port 0 became."""
        assert self._listeners is not None, "it does not listen"
        return int(self._listeners.sockets[0].getsockname()[1])

    async def retire(self, within_s: float) -> None:
        """Accept no more, and let each open connection bring a last request, whose answer says that
        it closes. Returns when all have gone, or after that time, when those that are idle are
        closed."""
        self._is_closing = True
        await self._stop_listening()
        for client in list(self.clients):
            client.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                if self._tls is not None and self._tls.handshakes:
                    await asyncio.wait(self._tls.handshakes)
                while self.clients:
                    self._answered.clear()
                    await self._answered.wait()
        self.is_retired = True
        for client in list(self.clients):
            client.close_if_idle()

    async def _stop_listening(self) -> None:
        """Who is connected already, in the kernel's backlog, is accepted, not reset."""
        listeners, self._listeners = self._listeners, None
        if listeners is None:
            return
        # Duplicates listen on while the loop accepts no more.
        plugs = [socket.socket(fileno=os.dup(plug.fileno())) for plug in listeners.sockets]
        listeners.close()
        for plug in plugs:
            with plug, contextlib.suppress(OSError):
                plug.setblocking(False)
                while True:
                    client, _ = plug.accept()
                    if self._tls is not None:
                        self._tls.begin(client)
                        continue
                    client.setblocking(False)
                    await asyncio.get_running_loop().connect_accepted_socket(self, client)

    async def close(self, timeout_s: float) -> None:
        """Accept no more; give answers that time, and then cut them."""
        self._is_closing = True
        if self._listeners is not None:
            self._listeners.close()
        for client in list(self.clients):
            client.close_after_answer()
        try:
            async with asyncio.timeout(timeout_s):
                while any(client.is_answering for client in self.clients):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            pass
        tasks = [client.task for client in self.clients if client.task is not None]
        for client in list(self.clients):
            client.transport.abort()
        if self._tls is not None:
            await end_all(self._tls.handshakes)
        if tasks:  # which are cancelled by that
            await asyncio.wait(tasks, timeout=timeout_s)
        await asyncio.sleep(0)  # in which transports report it

    def opened(self, client: ClientConnection, transport: asyncio.BaseTransport) -> ConnectionSlot:
        """A connection is open. Where its slot is NONE it is another protocol's from now on."""
        slot = self.places.enter()
        if slot is ConnectionSlot.NONE:  # taken since the connection was accepted
            refusal = self._full()
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
        else:
            self.clients.add(client)
            if self._is_closing:  # it was shaking hands until now
                client.retire()
        return slot

    def closed(self, client: ClientConnection) -> None:
        self.clients.remove(client)
        self.places.leave()
        if self._is_closing:
            self._answered.set()

    def raw_error(self, fault: Fault, message: str) -> bytes:
        """The whole answer on a connection on which no request could be read."""
        body = http.error_body(fault, message)
        new_id = request_id({})
        if self.completions is not None:
            refused = RequestRefused(fault, message)
            self.completions.door.ended.refused(new_id, NO_ROUTE, refused, method="")
        headers = {
            http.H_REQUEST_ID: new_id,
            http.H_REGION: self._region,
            "content-type": "application/json",
            "content-length": str(len(body)),
            **http.error_headers(fault),
        }
        return answer_head(fault.value.status, headers, 1, keep_alive=False) + body

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
