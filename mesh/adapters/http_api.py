"""The OpenAI-compatible routes of a region, as aiohttp handlers.

A request for work is read and checked here where it is unusual, and else by `ClientConnection`; in
both cases the front door admits it and an `AnswerWriter` answers it. A client that hangs up cancels
its handler.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from typing import cast

import orjson
from aiohttp import HttpVersion11, web
from multidict import MultiMapping
from prometheus_client import CollectorRegistry

from infra.metrics_page import metrics_page
from mesh.adapters.answer_writer import ROUTER_FAILED, AnswerWriter
from mesh.adapters.batch_api import BATCH_ROUTES, NOT_CONFIGURED, BatchApi
from mesh.adapters.cors import Cors
from mesh.adapters.front_door import FrontDoor
from mesh.adapters.http_server import (
    FULL,
    UNPARSABLE,
    AiohttpConnection,
    CompletionRoutes,
    ConnectionLimit,
)
from mesh.adapters.read_request import (
    ParsedRequest,
    RequestReader,
    RequestRefused,
    check_given_once,
    check_header_names,
    no_room,
    request_id,
)
from mesh.adapters.request_body import BodyReader
from mesh.adapters.response_calls import parsed_call
from mesh.core.model.geo import GeoLocation, parse_location
from schemas import http
from schemas.engine_routes import ALIASES, ENGINE_PATHS, error_form
from schemas.http import H_CLIENT_LOCATION, NEAR, Fault
from schemas.ids import ModelId, RegionId, RequestId
from schemas.problems import did_you_mean
from schemas.request_headers import ENGINE_HEADERS
from schemas.response_calls import ID as RESPONSE_ID
from schemas.response_calls import ResponseCall
from schemas.routes import ROUTES

log = logging.getLogger(__name__)

RouteHandler = Callable[[web.BaseRequest, RequestId], Awaitable[web.StreamResponse]]


OTHER_WORK = (
    *("createResponse", "rerank", "score", "classify", "pool", "tokenize", "detokenize"),
    *("createTranscription", "createTranslation"),
)
RESPONSE_CALLS = ("retrieveResponse", "deleteResponse", "cancelResponse", "listInputItems")
# What is about one process, where several share the port that clients use.
OF_ONE_PROCESS = frozenset({http.METRICS, http.HEALTH, http.READY, http.REGIONS})
PROBED = frozenset({http.METRICS, http.HEALTH, http.READY})
ADMITTED = web.RequestKey("ADMITTED", bool)
FAULT = web.ResponseKey("FAULT", Fault)  # of the router's own error
MODEL = web.ResponseKey("MODEL", str)  # that was requested
# Of 426 (RFC 9110, 15.5.22 and 7.8). Clients go by the status: coding agents fall back to HTTP at
# once, where 400 ends their session and 404, 405, 501 or 503 are tried for seconds.
SERVED_INSTEAD = {"upgrade": "HTTP/1.1", "connection": "upgrade"}
MODEL_PREFIX = http.MODEL.partition("{")[0]
EVERY_PATH = frozenset(route.path for route in ROUTES)


class HttpApi:
    """The routes of one router, all or some."""

    def __init__(
        self,
        region: RegionId,
        door: FrontDoor,
        registry: CollectorRegistry,
        paths: Collection[str] = EVERY_PATH,
        elsewhere: str = "",
        connections: ConnectionLimit | None = None,
        count: Callable[[str], None] = lambda why: None,
        cors_origins: Collection[str] = (),
        batch: BatchApi | None = None,
        routes: Collection[str] = (),
    ) -> None:
        """`elsewhere`: where the paths are that are left out. `connections`: of the clients' port.
        `count` is called with why a body is refused: the code of the fault. `batch`: the routes of
        files and batches, where the region keeps any. `routes`: of engines, which the operator
        lists."""
        self._batch = batch
        self._connections = connections
        self._cors = Cors(cors_origins) if cors_origins else None
        self._reader = RequestReader(door.bodies, count)
        self._bodies = BodyReader(self._reader, door)
        self._region = region
        self._elsewhere = elsewhere
        self._door = door
        self._registry = registry
        self._handlers: dict[str, RouteHandler] = {
            "createChatCompletion": self._ask,
            "createCompletion": self._ask,
            "createEmbedding": self._ask,
            "createMessage": self._ask,
            "countMessageTokens": self._ask,
            **dict.fromkeys(OTHER_WORK, self._ask),
            "listModels": self._models,
            "retrieveModel": self._model,
            "listRegions": self._regions,
            "health": self._health,
            "ready": self._ready,
            "metrics": self._metrics,
            **dict.fromkeys(RESPONSE_CALLS, self._call),
            **{name: partial(self._files_and_batches, name) for name in BATCH_ROUTES},
        }
        self._by_path: dict[str, dict[str, RouteHandler]] = {}
        for route in ROUTES:
            if route.path in paths:
                methods = self._by_path.setdefault(route.path, {})
                methods[route.method] = self._handlers[route.name]
        for path in routes:
            self._by_path[path] = {"POST": self._ask}
        of_engines = [path for path in (*ENGINE_PATHS, *routes) if path in self._by_path]
        completions = {f"POST {path} HTTP/1.1".encode(): path for path in of_engines}
        # What connections need to serve requests for work themselves.
        self.completions = CompletionRoutes(completions, self._reader, door, region, self._cors)
        self._patterns = [(_pattern(path), path) for path in self._by_path if "{" in path]
        self._probed: dict[str, int] = {}  # the last status of each

    def allow_origins(self, origins: Collection[str]) -> None:
        """Answer pages of these from now on, on open connections too."""
        self._cors = self.completions.cors = Cors(origins) if origins else None

    async def close(self) -> None:
        await self._bodies.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is.

        Where the answer came before the body it is the connection's last: a client that had waited
        for "100 Continue" need not send the body, and its next request would be read as the body.
        """
        known_id, arrived_at = request_id(request.headers), asyncio.get_running_loop().time()
        try:
            answer = await self._answered(request, known_id)
        except asyncio.CancelledError:
            if ADMITTED not in request:
                route, method = self._route(request), request.method
                self._door.ended.client_gone(known_id, route, method, arrived_at)
            raise
        if not request.content.is_eof():
            answer.force_close()
        self._log(request, known_id, answer, arrived_at)
        return answer

    def _log(
        self,
        request: web.BaseRequest,
        known_id: RequestId,
        answer: web.StreamResponse,
        arrived_at: float,
    ) -> None:
        """Log a request that was not admitted; of probes the first that fails in a row."""
        route = self._route(request)
        if isinstance(answer, AlreadyWritten) or self._is_usual_probe(route, answer.status):
            return
        self._door.ended.of_http(
            known_id,
            route=route,
            status=answer.status,
            method=request.method,
            fault=answer.get(FAULT),
            model=answer.get(MODEL, ""),
            sent_bytes=answer.body_length if answer.prepared else answer.content_length or 0,
            arrived_at=arrived_at,
        )

    def _is_usual_probe(self, route: str, status: int) -> bool:
        """Whether it is a probe that went well, or as the one before it: load balancers send many
        to a router that isn't ready, and these would displace clients' requests."""
        if route not in PROBED:
            return False
        before, self._probed[route] = self._probed.get(route), status
        return status < HTTPStatus.BAD_REQUEST or status == before

    async def _answered(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        try:
            if UNPARSABLE in request:
                raise request[UNPARSABLE]
            handler = self._handler(request)
            check_header_names(request.headers)
            check_given_once(request.headers)
            return await handler(request, known_id)
        except RequestRefused as problem:
            headers = self._headers(request, known_id) | problem.headers
            path = _path(request)
            answer = _error(problem.fault, problem.message, headers, path, problem.param)
            answer[MODEL] = problem.model
            return answer
        except Exception as error:
            if request.writer.output_size > 0:
                raise  # the answer had begun: the connection is cut
            log.error("request failed inside the router", exc_info=error)
            headers = self._headers(request, known_id)
            answer = _error(Fault.INTERNAL, ROUTER_FAILED, headers, _path(request))
            answer.force_close()
            return answer

    def _handler(self, request: web.BaseRequest) -> RouteHandler:
        path = _path(request)
        if request.headers.get("upgrade", "").lower() == "websocket":
            message = 'websockets are not served here; use HTTP, with "stream": true for events'
            raise RequestRefused(Fault.UPGRADE, message, "upgrade", headers=SERVED_INSTEAD)
        methods = self._methods(path)
        if methods is None:
            message = f"no path {path}; there are {', '.join(self._by_path)}{self._elsewhere}"
            raise RequestRefused(Fault.PATH_UNKNOWN, message)
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None and request.method == "OPTIONS" and self._cors is not None:
            return self._preflight
        if handler is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            message = f"{path} takes {allowed}"
            raise RequestRefused(Fault.METHOD_WRONG, message, headers={http.H_ALLOW: allowed})
        return handler

    def _methods(self, path: str) -> dict[str, RouteHandler] | None:
        if (methods := self._by_path.get(path)) is not None and "{" not in path:
            return methods
        return next(
            (self._by_path[known] for pattern, known in self._patterns if pattern.fullmatch(path)),
            None,
        )

    def _route(self, request: web.BaseRequest) -> str:
        """The path as it is documented, or as it was requested if there is none such."""
        path = _path(request)
        if path in self._by_path:
            return path
        known = (known for pattern, known in self._patterns if pattern.fullmatch(path))
        return next(known, path)

    async def _preflight(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        assert self._cors is not None
        methods = self._methods(_path(request)) or {}
        origin = request.headers.get(http.H_ORIGIN)
        allowed = self._cors.preflight(origin, request.headers, methods)
        if allowed is None:
            message = "not a preflight request, or the page's origin is not in cors_origins"
            raise RequestRefused(
                Fault.METHOD_WRONG, message, headers={http.H_ALLOW: ", ".join(methods)}
            )
        return web.Response(status=204, headers=self._headers(request, known_id) | dict(allowed))

    async def _ask(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        headers = {name.lower(): request.headers[name] for name in request.headers}
        for name in ENGINE_HEADERS:
            if len(lines := request.headers.getall(name, ())) > 1:  # RFC 9110, 5.3: they are one
                headers[name] = ", ".join(lines)
        parsed = await self._bodies.read(request, _path(request), headers, known_id)
        return await self._work(request, known_id, parsed, headers)

    async def _call(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        """A call about a response. A body, which it need not have, is not read."""
        route = self._route(request)
        if request.method == "HEAD":
            allowed = ", ".join(self._by_path[route])
            message = f"{route} takes {allowed}"
            raise RequestRefused(Fault.METHOD_WRONG, message, headers={http.H_ALLOW: allowed})
        before, _, after = route.partition(RESPONSE_ID)
        name = _path(request).removeprefix(before).removesuffix(after)
        call = ResponseCall(request.method, route, name, request.rel_url.raw_query_string)
        headers = {name.lower(): request.headers[name] for name in request.headers}
        try:
            parsed = parsed_call(call, headers, known_id)
        except RequestRefused as error:
            self._reader.refused(error, charged=0)
            raise
        return await self._work(request, known_id, parsed, headers)

    async def _work(
        self,
        request: web.BaseRequest,
        known_id: RequestId,
        parsed: ParsedRequest,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        client = cast(AiohttpConnection, request.protocol).client
        over = asyncio.Event()
        writer = AnswerWriter(
            client,
            self._door,
            self._headers(request, known_id),
            over.set,
            keep_alive=request.keep_alive and not client.is_last and request.content.is_eof(),
            minor=int(request.version >= HttpVersion11),
        )
        client.answer_by(writer)
        try:
            admitted = self._door.admit(parsed, headers, writer.changed)
            request[ADMITTED] = True
            writer.begin(admitted)
            await over.wait()
        finally:  # also where the client hung up
            writer.leave()
            client.answer_by(None)
        return AlreadyWritten(keep_alive=writer.keep_alive)

    async def _models(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        models = tuple(self._described(model) for model in self._models_served())
        return self._json(request, known_id, http.ModelList(data=models))

    async def _model(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        asked = _path(request).removeprefix(MODEL_PREFIX)
        models = self._models_served()
        if asked not in models:
            raise RequestRefused(Fault.MODEL_UNKNOWN, self._door.unknown_model(asked))
        return self._json(request, known_id, self._described(ModelId(asked)))

    def _described(self, model: ModelId) -> http.Model:
        card = self._door.model_card(model)
        return http.Model(
            id=model,
            created=card.created or 0,
            owned_by=card.owned_by or http.OWNER,
            root=card.root,
            parent=card.parent,
            max_model_len=card.max_model_len,
        )

    def _models_served(self) -> tuple[ModelId, ...]:
        """Raise RequestRefused where there is none: clients take an empty list for final."""
        models = self._door.models()
        if not models and (because := self._door.not_ready_because()) is not None:
            raise RequestRefused(*because)
        return models

    async def _files_and_batches(
        self, name: str, request: web.BaseRequest, known_id: RequestId
    ) -> web.StreamResponse:
        if self._batch is None:
            raise RequestRefused(Fault.NO_BATCH, NOT_CONFIGURED)
        return await self._batch.handle(name, request, self._headers(request, known_id))

    async def _regions(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        near = client_location(request.query, request.headers)
        return self._json(request, known_id, http.RegionList(data=self._door.regions(near)))

    async def _health(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        return web.Response(text="ok\n", headers=self._headers(request, known_id))

    async def _ready(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        problem = self._door.not_ready_because()
        if problem is not None:
            return _error(*problem, self._headers(request, known_id))
        if self._connections is not None and self._connections.is_full:
            return _error(Fault.OVERLOADED, FULL, self._headers(request, known_id))
        if self._door.bodies.is_full:
            return _error(Fault.OVERLOADED, no_room().message, self._headers(request, known_id))
        return self._json(request, known_id, self._door.readiness())

    async def _metrics(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        accept = ",".join(request.headers.getall("accept", ()))
        page, content_type = metrics_page(self._registry, accept)
        headers = self._headers(request, known_id) | {"content-type": content_type}
        return web.Response(body=page, headers=headers)

    def _headers(self, request: web.BaseRequest, known_id: RequestId) -> dict[str, str]:
        headers: dict[str, str] = {http.H_REQUEST_ID: known_id, http.H_REGION: self._region}
        if self._cors is not None:
            headers.update(self._cors.headers(request.headers.get(http.H_ORIGIN)))
        return headers

    def _json(self, request: web.BaseRequest, known_id: RequestId, value: object) -> web.Response:
        return _json(200, orjson.dumps(value), self._headers(request, known_id))


def client_location(query: MultiMapping[str], headers: Mapping[str, str]) -> GeoLocation | None:
    """The client's location, by the query `near` or else by a header; None without both.

    Raises RequestRefused for what is no location, and for a query of another name: ignored, it
    would make another region the nearest.
    """
    for name in query:
        if name != NEAR:
            message = f"unknown query parameter {name!r:.60}{did_you_mean(name, (NEAR,))}"
            raise RequestRefused(Fault.INVALID, message, name[:60])
    if len(query.getall(NEAR, ())) > 1:
        raise RequestRefused(Fault.INVALID, f"{NEAR} is given more than once", NEAR)
    for given, name in (
        (query.get(NEAR), NEAR),
        (headers.get(H_CLIENT_LOCATION), H_CLIENT_LOCATION),
    ):
        if given is not None:
            try:
                return parse_location(given)
            except ValueError as error:
                raise RequestRefused(Fault.INVALID, f"{name}: {error}", name) from error
    return None


class AlreadyWritten(web.StreamResponse):
    """An answer that an `AnswerWriter` has already written, for aiohttp."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to write."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


def _pattern(path: str) -> re.Pattern[str]:
    """Of a path with one variable part. A model's name may have slashes; an id has none, and is not
    the last word of another path of the API."""
    before, _, after = re.split(r"(\{.*\})", path)
    words = [one.removeprefix(before) for one in http.UNSERVED if one.startswith(before)]
    other = f"(?!(?:{'|'.join(words)})(?:/|$))" if words else ""
    variable = ".+" if path == http.MODEL else other + "[^/]+"
    return re.compile(re.escape(before) + variable + after)


def _path(request: web.BaseRequest) -> str:
    """The path that is requested, by its first name and without a slash at its end."""
    path = request.path
    path = path[:-1] if path[-1:] == "/" and len(path) > 1 else path
    return ALIASES.get(path, path)


def _error(
    fault: Fault, message: str, headers: dict[str, str], path: str = "", param: str | None = None
) -> web.Response:
    headers = headers | dict(http.error_headers(fault))
    answer = _json(
        fault.value.status, http.error_body(fault, message, param, error_form(path)), headers
    )
    answer[FAULT] = fault
    return answer


def _json(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(
        status=status, body=body, headers=headers | {"content-type": "application/json"}
    )
