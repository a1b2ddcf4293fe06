"""The console's own HTTP server: its page, the fleet as JSON, and orders with the admin key.

It has nothing in common with the OpenAI endpoint: its address is for operators, as it names
requests, tenants and models. Nothing it serves may be read by other sites' pages: there is no CORS
and there are no cookies, and a name that another site's DNS points here is refused.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from importlib import resources
from math import ceil
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from infra.bus import BusUnreachable
from infra.process import end_all
from mesh.adapters.operator_orders import OrderInvalid
from mesh.adapters.region_records import RecordsUnavailable
from mesh.console.admin_key import AdminKey, KeyRefused
from mesh.console.config import ConsoleConfig
from mesh.console.connections import Connections, TurnedAway
from mesh.console.frames import shown_orders
from mesh.console.orders import OrderRefused, Orders, OrdersBusy, read_order
from mesh.console.request_page import shown_request
from mesh.console.viewing import Viewing
from mesh.explain.terminal import printable
from mesh.http.tls import TlsListener
from schemas.explain import ID_CHARS_MAX
from schemas.ids import RegionId, ReplicaId

log = logging.getLogger(__name__)

OPEN_MAX = 32  # requests at once
LOOKUPS_MAX = 2  # requests looked up at once: each asks every router
BODY_BYTES_MAX = 4096
KEEPALIVE_S = 20.0
SHUTDOWN_S = 0.25
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
JSON = "application/json"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Console:
    """One router's console: `open`, then `close`."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._viewing = Viewing(config)
        self._orders = Orders(config)
        self._key = AdminKey(config.admin_key, asyncio.get_running_loop().time)
        self._hosts = LOOPBACK | {config.address.host.lower()}
        self._open = 0
        self._lookups = 0
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | TlsListener | None = None
        self._connections: Connections

    @property
    def port(self) -> int:
        """The port that is served: the configured one, or the free one that port 0 became."""
        assert self._server is not None, "not open"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def is_watching(self) -> bool:
        """Whether it listens on the buses now."""
        return self._viewing.is_watching

    async def open(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        for path, answer in page_files().items():
            app.router.add_get(path, answer)
        app.router.add_get("/api/fleet", self._fleet)
        app.router.add_get("/api/replica", self._replica)
        app.router.add_get("/api/request", self._request)
        app.router.add_get("/api/changes", self._changes)
        app.router.add_post("/api/key", self._check_key)
        app.router.add_post("/api/orders", self._order)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=SHUTDOWN_S, keepalive_timeout=KEEPALIVE_S
        )
        await self._runner.setup()
        served = self._runner.server
        assert served is not None
        self._connections = Connections(served)
        try:
            self._server = await self._listen()
        except OSError:
            await self._runner.cleanup()
            raise

    async def _listen(self) -> asyncio.Server | TlsListener:
        where, accept = self._config.address.listen, self._connections.accept
        if (tls := self._config.tls) is None:
            return await asyncio.get_running_loop().create_server(accept, *where)
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        plug = socket.create_server(where, family=family)
        return TlsListener(plug, tls, connected=accept, plain=TurnedAway, failed=lambda: None)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if isinstance(self._server, TlsListener):
            await end_all(self._server.handshakes)
        if self._runner is not None:
            await self._runner.cleanup()
        await self._viewing.close()

    # What every answer has, and who may ask at all.

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse
        self._connections.requested(request.protocol)
        if self._open >= OPEN_MAX:
            response = problem(503, "the console is busy; try again", {"retry-after": "1"})
        else:
            self._open += 1
            try:
                response = await self._answer(request, handler)
            finally:
                self._open -= 1
        response.headers.update(HEADERS)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (refusal := self._foreign(request)) is not None:
            return problem(403, refusal)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return problem(error.status, error.reason)
        except KeyRefused as error:
            wait = error.retry_after_s
            retry = {} if wait is None else {"retry-after": str(ceil(wait))}
            return problem(401 if wait is None else 429, str(error), retry)
        except (OrderRefused, OrderInvalid) as error:
            return problem(409 if isinstance(error, OrderInvalid) else 400, str(error))
        except (OrdersBusy, RecordsUnavailable, BusUnreachable) as error:
            return problem(503, str(error), {"retry-after": "2"})

    def _foreign(self, request: web.Request) -> str | None:
        """Why another site's page may have sent it; None of one that none did."""
        host = host_name(request.headers.get("host", ""))
        if host not in self._hosts:
            return (
                f"this is not {printable(host)[:100]!r}: use the host of the console's address, or "
                "localhost through a tunnel"
            )
        origin = request.headers.get("origin")
        if origin is not None and origin != f"{request.scheme}://{request.headers.get('host')}":
            return "pages of other sites may not use the console"
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "pages of other sites may not use the console"
        return None

    # To look at.

    async def _fleet(self, request: web.Request) -> web.Response:
        frame = self._viewing.frame()
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers = {"content-encoding": "gzip"}
            return web.Response(body=frame.gzipped, content_type=JSON, headers=headers)
        return web.Response(body=frame.plain, content_type=JSON)

    async def _replica(self, request: web.Request) -> web.Response:
        region, replica = RegionId(request.query.get("region", "")), request.query.get("name", "")
        if region not in self._config.topology.regions:
            return problem(404, "no such region")
        fleet = self._viewing.watch.fleet
        fields = fleet.heartbeat_fields(region, ReplicaId(replica))
        return plain_json({"fields": [[name, printable(text)] for name, text in fields]})

    async def _request(self, request: web.Request) -> web.Response:
        name = request.query.get("id", "")
        region = request.query.get("region")
        if not 0 < len(name) <= ID_CHARS_MAX:
            return problem(400, f"give an id of 1 to {ID_CHARS_MAX} characters")
        if self._lookups >= LOOKUPS_MAX:
            return problem(
                503, "other requests are being looked up; try again", {"retry-after": "1"}
            )
        self._lookups += 1
        try:
            found, problems = await self._viewing.watch.stories(name)
        finally:
            self._lookups -= 1
        fitting = [
            one for one in found if region is None or region in {x.region for x in one.lives}
        ]
        notes = [printable(text) for text in problems]
        if not fitting:
            text = f"no router keeps {printable(name)} any more"
            return plain_json({"error": text, "notes": notes}, 404)
        return plain_json({**shown_request(fitting[-1]), "notes": notes})

    # To change.

    async def _check_key(self, request: web.Request) -> web.Response:
        self._require_key(request)
        return plain_json({"can_change": True})

    async def _changes(self, request: web.Request) -> web.Response:
        self._require_key(request)
        known = await self._orders.history(RegionId(request.query.get("region", "")))
        shown = [{"seq": one.seq, **shown_orders(one.record)} for one in known]
        return plain_json({"changes": shown})

    async def _order(self, request: web.Request) -> web.Response:
        self._require_key(request)
        if request.content_type != JSON:
            return problem(415, f"send {JSON}")
        address = request.remote or "an unknown address"
        written = await self._orders.give(read_order(await request.read()), address)
        orders = shown_orders(written.record)
        log.warning("console: %s, by %s: %s", orders["command"], orders["by"], orders["reason"])
        return plain_json({"seq": written.seq, **orders})

    def _require_key(self, request: web.Request) -> None:
        self._key.require(request.headers.get("authorization"), request.remote or "")


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def page_files() -> dict[str, Callable[[web.Request], Any]]:
    """What answers each path of the page; read once."""
    found = {}
    for file in resources.files("mesh.console").joinpath("page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in KINDS:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = _file_answer(file.read_bytes(), KINDS[suffix])
    return found


def _file_answer(body: bytes, kind: str) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"content-type": kind})

    return answer


def plain_json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=JSON, status=status)


def problem(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    response = plain_json({"error": text}, status)
    response.headers.update(headers or {})
    return response
