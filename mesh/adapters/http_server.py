"""aiohttp's low-level server; requests that it can't even parse go to the handler like all others.

So every error has the shape and the headers that one place gives it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from mesh.adapters.problem import Problem
from mesh.adapters.read_request import encoding_not_taken
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import Fault

log = logging.getLogger(__name__)

HEADER_BYTES_MAX = 16 * 1024  # one header line; agents' tokens are long, but not that long
HEADERS_MAX = 100
UNPARSABLE = web.RequestKey("UNPARSABLE", Problem)  # where a request is no more than that

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Protocol(RequestHandler):
    """Leaves to the handler what is said of unparsable requests, and closes the connection."""

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


def _problem(error: BaseException | None, message: str) -> Problem:
    if isinstance(error, http_exceptions.LineTooLong) or (
        isinstance(error, http_exceptions.BadHttpMessage) and "many headers" in str(error)
    ):
        return Problem(Fault.HEADERS_TOO_LARGE, "the request's headers are too large")
    if isinstance(error, http_exceptions.ContentEncodingError):  # aiohttp's tell what to install
        return encoding_not_taken()
    return Problem(Fault.INVALID, message or "not an HTTP request")


class HttpServer(web.Server):
    """Calls `handler` with each request; cancels it when the client hangs up.

    A request that can't be parsed has an UNPARSABLE, and nothing else that is true of it.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__(handler, request_factory=self._request, handler_cancellation=True)

    def __call__(self) -> RequestHandler:
        return _Protocol(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            max_field_size=HEADER_BYTES_MAX,
            max_line_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
        )

    def _request(self, message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=BODY_BYTES_MAX,
        )
