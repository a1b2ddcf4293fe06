"""A small HTTP page about one process: /metrics, /health and /ready."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from infra.address import Address
from infra.metrics_page import metrics_page
from schemas import http

SHUTDOWN_S = 0.25
BODY_BYTES_MAX = 1024  # nobody sends a body


class ProcessPage:
    """One process's. `open`, then `close`."""

    def __init__(
        self, registry: CollectorRegistry, not_ready_because: Callable[[], str | None]
    ) -> None:
        """`not_ready_because`: None where it is ready."""
        self._registry = registry
        self._not_ready_because = not_ready_because
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port that is served: the configured one, or the free one that port 0 became."""
        assert self._runner is not None, "not open"
        return int(self._runner.addresses[0][1])

    async def open(self, where: Address) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get(http.METRICS, self._metrics)
        app.router.add_get(http.HEALTH, self._health)
        app.router.add_get(http.READY, self._ready)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, *where).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall("accept", ()))
        page, content_type = metrics_page(self._registry, accept)
        return web.Response(body=page, headers={"content-type": content_type})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        why = self._not_ready_because()
        if why is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": why}, status=503)
