"""aiohttp's low-level server with our words for requests it can't even parse."""

import asyncio
import logging

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from schemas.exchange import BODY_BYTES_MAX
from schemas.http import Fault, error_body

log = logging.getLogger(__name__)

HEADER_BYTES_MAX = 16 * 1024  # one header line; agents' tokens are long, but not that long
HEADERS_MAX = 100


class _Protocol(RequestHandler):
    """Answers unparsable requests in OpenAI's shape instead of plain text."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun; the connection must be cut")
        fault = Fault.INVALID if status < 500 else Fault.INTERNAL
        if _is_header_bomb(exc):
            fault, message = Fault.HEADERS_TOO_LARGE, "the request's headers are too large"
        elif fault is Fault.INTERNAL:
            log.error("request failed inside the router", exc_info=exc)
            message = "the router failed on this request; its log says why"
        answer = web.Response(
            status=fault.value.status,
            body=error_body(fault, message or "not an HTTP request"),
            content_type="application/json",
        )
        answer.force_close()
        return answer


def _is_header_bomb(problem: BaseException | None) -> bool:
    if isinstance(problem, http_exceptions.LineTooLong):
        return True
    return isinstance(problem, http_exceptions.BadHttpMessage) and "many headers" in str(problem)


class HttpServer(web.Server):
    """Calls `handler` with each request; cancels it when the client hangs up."""

    def __init__(self, handler: object) -> None:
        super().__init__(
            handler,  # type: ignore[arg-type]
            request_factory=self._request,
            handler_cancellation=True,
        )

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
