"""The OpenAI-compatible routes of a region, as handlers of an `HttpRequest`.

A request for work is read and checked here where it is unusual, and else by its connection.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import orjson
from prometheus_client import CollectorRegistry

from infra.metrics_page import metrics_page
from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.core.membership.known_models import LOOKS_EVERY_S
from mesh.core.model.geo import GeoLocation, parse_location
from mesh.http.answer_writer import ROUTER_FAILED
from mesh.http.batch_api import BATCH_ROUTES, NOT_CONFIGURED, BatchApi
from mesh.http.callers import Callers, models_for
from mesh.http.connection import FULL
from mesh.http.cors import Cors
from mesh.http.front_door import FrontDoor
from mesh.http.http_request import Answer, HttpRequest, Query, Work
from mesh.http.read_request import (
    ParsedRequest,
    RequestReader,
    check_given_once,
    check_header_names,
    no_room,
    request_id,
)
from mesh.http.request_body import BodyReader
from mesh.http.response_calls import parsed_call
from mesh.http.server import CompletionRoutes, ConnectionLimit
from schemas import http
from schemas.engine_routes import ALIASES, ENGINE_PATHS, error_form
from schemas.http import H_CLIENT_LOCATION, NEAR, Fault
from schemas.ids import ModelId, RegionId, RequestId
from schemas.keys import Scope
from schemas.problems import did_you_mean
from schemas.request_headers import ENGINE_HEADERS
from schemas.response_calls import ID as RESPONSE_ID
from schemas.response_calls import ResponseCall
from schemas.routes import ROUTES

log = logging.getLogger(__name__)

RouteHandler = Callable[[HttpRequest, RequestId], Awaitable[Answer | Work]]

OTHER_WORK = (
    *("createResponse", "rerank", "score", "classify", "pool", "tokenize", "detokenize"),
    *("createTranscription", "createTranslation"),
)
RESPONSE_CALLS = ("retrieveResponse", "deleteResponse", "cancelResponse", "listInputItems")
# What is about one process, where several share the port that clients use.
OF_ONE_PROCESS = frozenset({http.METRICS, http.HEALTH, http.READY, http.REGIONS})
PROBED = frozenset({http.METRICS, http.HEALTH, http.READY})
# Of 426 (RFC 9110, 15.5.22 and 7.8). Clients go by the status: coding agents fall back to HTTP at
# once, where 400 ends their session and 404, 405, 501 or 503 are tried for seconds.
SERVED_INSTEAD = {"upgrade": "HTTP/1.1", "connection": "upgrade"}
MODEL_PREFIX = http.MODEL.partition("{")[0]
EVERY_PATH = frozenset(route.path for route in ROUTES)


@dataclass(frozen=True, slots=True)
class Served:
    """What one port serves: these paths, and `routes`, of engines, which the operator lists.

    `elsewhere`: where the paths are that are left out. `cors_origins`: whose pages may ask.
    `callers`: who may ask; None for everybody who reaches the port.
    """

    paths: Collection[str] = EVERY_PATH
    routes: Collection[str] = ()
    elsewhere: str = ""
    cors_origins: Collection[str] = ()
    callers: Callers | None = None


class HttpApi:
    """The routes of one port of a router."""

    def __init__(
        self,
        region: RegionId,
        door: FrontDoor,
        registry: CollectorRegistry,
        served: Served = Served(),
        connections: ConnectionLimit | None = None,
        count: Callable[[str], None] = lambda why: None,
        batch: BatchApi | None = None,
    ) -> None:
        """`connections`: of the clients' port. `count` is called with why a body is refused: the
        code of the fault. `batch`: the routes of files and batches, where the region keeps any."""
        self._batch = batch
        self._connections = connections
        self._reader = RequestReader(door.bodies, count)
        self._bodies = BodyReader(self._reader, door)
        self._region = region
        self._elsewhere = served.elsewhere
        self._door = door
        self._callers = served.callers or Callers(region)
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
        # What a key needs for each. All else is for everybody: probes, and the regions, which a
        # client has to know before it chooses where to send its key.
        asked: tuple[RouteHandler, ...] = (self._ask, self._call, self._models, self._model)
        self._scopes = dict.fromkeys(asked, Scope.INFERENCE)
        self._scopes |= {self._handlers[name]: Scope.BATCH for name in BATCH_ROUTES}
        self._scopes[self._metrics] = Scope.ADMIN
        self._by_path: dict[str, dict[str, RouteHandler]] = {}
        for route in ROUTES:
            if route.path in served.paths:
                methods = self._by_path.setdefault(route.path, {})
                methods[route.method] = self._handlers[route.name]
        for path in served.routes:
            self._by_path[path] = {"POST": self._ask}
        of_engines = [path for path in (*ENGINE_PATHS, *served.routes) if path in self._by_path]
        # What connections need to serve requests for work themselves; at first none does.
        self._usual = {f"POST {path} HTTP/1.1".encode(): path for path in of_engines}
        self.completions = CompletionRoutes({}, self._reader, door, region, self._callers)
        self._serve_directly()
        self.allow_origins(served.cors_origins)
        self._patterns = [(_pattern(path), path) for path in self._by_path if "{" in path]
        self._probed: dict[str, int] = {}  # the last status of each

    def allow_origins(self, origins: Collection[str]) -> None:
        """Answer pages of these from now on, on open connections too."""
        self.completions.cors = Cors(origins) if origins else None

    @property
    def _cors(self) -> Cors | None:
        return self.completions.cors

    async def close(self) -> None:
        await self._bodies.close()

    async def handle(self, request: HttpRequest) -> Answer | Work:
        """Answer one request, whatever it is; it is logged, unless it is work to be placed."""
        known_id, arrived_at = request_id(request.headers), asyncio.get_running_loop().time()
        try:
            answer = await self._answered(request, known_id)
        except asyncio.CancelledError:
            route, method = self._route(request), request.method
            self._door.ended.client_gone(known_id, route, method, arrived_at)
            raise
        except Exception:  # the answer had begun: its client sees that it is cut
            self._log(request, known_id, Answer(500, {}, fault=Fault.INTERNAL), arrived_at)
            raise
        if isinstance(answer, Answer):
            self._log(request, known_id, answer, arrived_at)
        return answer

    def _log(
        self, request: HttpRequest, known_id: RequestId, answer: Answer, arrived_at: float
    ) -> None:
        """Log a request that was not admitted; of probes the first that fails in a row."""
        route = self._route(request)
        if self._is_usual_probe(route, answer.status):
            return
        self._door.ended.of_http(
            known_id,
            route=route,
            status=answer.status,
            method=request.method,
            fault=answer.fault,
            model=answer.model,
            tenant=answer.tenant,
            detail=answer.detail,
            sent_bytes=request.sent_bytes if request.has_begun else len(answer.body),
            arrived_at=arrived_at,
        )

    def _is_usual_probe(self, route: str, status: int) -> bool:
        """Whether it is a probe that went well, or as the one before it: load balancers send many
        to a router that isn't ready, and these would displace clients' requests."""
        if route not in PROBED:
            return False
        before, self._probed[route] = self._probed.get(route), status
        return status < HTTPStatus.BAD_REQUEST or status == before

    async def _answered(self, request: HttpRequest, known_id: RequestId) -> Answer | Work:
        try:
            if request.refused is not None:
                raise request.refused
            handler = self._handler(request)
            check_header_names(request.headers)
            check_given_once(request.lines)
            await self._identify(request, handler)
            return await handler(request, known_id)
        except RequestRefused as problem:
            headers = self._headers(request, known_id) | problem.headers
            path = _path(request)
            answer = _error(problem.fault, problem.message, headers, path, problem.param)
            answer.model, answer.tenant = problem.model, problem.tenant
            answer.detail = problem.detail
            return answer
        except Exception as error:
            if request.has_begun:
                raise  # the connection is cut
            log.error("request failed inside the router", exc_info=error)
            headers = self._headers(request, known_id)
            answer = _error(Fault.INTERNAL, ROUTER_FAILED, headers, _path(request))
            answer.closes = True
            return answer

    async def _identify(self, request: HttpRequest, handler: RouteHandler) -> None:
        """Find out who asks, where the route is not for everybody. Raises RequestRefused."""
        if (scope := self._scopes.get(handler)) is not None:
            peer = request.socket.transport.get_extra_info("peername") or ("",)
            address = str(peer[0])
            request.caller = await self._callers.identified(request.headers, scope, address)

    def _handler(self, request: HttpRequest) -> RouteHandler:
        path = _path(request)
        if request.headers.get("upgrade", "").lower() == "websocket":
            message = 'websockets are not served here; use HTTP, with "stream": true for events'
            raise RequestRefused(Fault.UPGRADE, message, "upgrade", headers=SERVED_INSTEAD)
        methods = self._by_path.get(self._route(request))
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

    def _route(self, request: HttpRequest) -> str:
        """The path as it is documented, or as it was requested if there is none such."""
        path = _path(request)
        if path in self._by_path:
            return path
        known = (known for pattern, known in self._patterns if pattern.fullmatch(path))
        return next(known, path)

    async def _preflight(self, request: HttpRequest, known_id: RequestId) -> Answer:
        assert self._cors is not None
        methods = self._by_path[self._route(request)]
        origin = request.headers.get(http.H_ORIGIN)
        allowed = self._cors.preflight(origin, request.headers, methods)
        if allowed is None:
            message = "not a preflight request, or the page's origin is not in cors_origins"
            raise RequestRefused(
                Fault.METHOD_WRONG, message, headers={http.H_ALLOW: ", ".join(methods)}
            )
        return Answer(204, self._headers(request, known_id) | dict(allowed))

    async def _ask(self, request: HttpRequest, known_id: RequestId) -> Work:
        headers = dict(request.headers)
        for name in ENGINE_HEADERS:
            if len(values := request.lines.get(name, ())) > 1:  # RFC 9110, 5.3: they are one
                headers[name] = ", ".join(values)
        parsed = await self._bodies.read(request, _path(request), headers, known_id)
        await self._until_heard_of(parsed)
        return Work(parsed, headers)

    async def _until_heard_of(self, parsed: ParsedRequest) -> None:
        """Wait while what serves it may yet be heard of: what is not there is not asked again."""
        if self.completions.paths:
            return
        names = self._door.names_of(parsed)
        try:
            await self._until_known(names)
        except BaseException:
            self._door.bodies.give_back(parsed.kept_bytes)
            raise
        self._serve_directly()

    async def _until_known(self, names: Collection[ModelId]) -> None:
        while self._door.may_hear_of(names):  # noqa: ASYNC110 - LISTENS_S at most
            await asyncio.sleep(LOOKS_EVERY_S)

    def _serve_directly(self) -> None:
        """Let connections serve work themselves, once none has to wait here."""
        if self._door.has_listened():
            self.completions.paths = self._usual

    async def _call(self, request: HttpRequest, known_id: RequestId) -> Work:
        """A call about a response. A body, which it need not have, is not read."""
        route = self._route(request)
        if request.method == "HEAD":
            allowed = ", ".join(self._by_path[route])
            message = f"{route} takes {allowed}"
            raise RequestRefused(Fault.METHOD_WRONG, message, headers={http.H_ALLOW: allowed})
        before, _, after = route.partition(RESPONSE_ID)
        name = _path(request).removeprefix(before).removesuffix(after)
        call = ResponseCall(request.method, route, name, request.query_string)
        try:
            parsed = parsed_call(call, request.headers, known_id)
        except RequestRefused as error:
            self._reader.refused(error, charged=0)
            raise
        await self._until_heard_of(parsed)
        return Work(parsed, request.headers)

    async def _models(self, request: HttpRequest, known_id: RequestId) -> Answer:
        models = tuple(self._described(model) for model in self._models_served(request.caller))
        return self._json(request, known_id, http.ModelList(data=models))

    async def _model(self, request: HttpRequest, known_id: RequestId) -> Answer:
        asked = _path(request).removeprefix(MODEL_PREFIX)
        if not self.completions.paths:
            await self._until_known((ModelId(asked),))
        models = self._models_served(request.caller)
        if asked not in models:
            raise RequestRefused(
                Fault.MODEL_UNKNOWN, self._door.unknown_model(asked, request.caller)
            )
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

    def _models_served(self, caller: Caller | None) -> tuple[ModelId, ...]:
        """Those that the caller may name. Raise RequestRefused where none is served: clients take
        an empty list for final."""
        models = self._door.models()
        if not models and (because := self._door.not_ready_because()) is not None:
            raise RequestRefused(*because)
        return models_for(caller, models)

    async def _files_and_batches(
        self, name: str, request: HttpRequest, known_id: RequestId
    ) -> Answer:
        if self._batch is None:
            raise RequestRefused(Fault.NO_BATCH, NOT_CONFIGURED)
        return await self._batch.handle(name, request, self._headers(request, known_id))

    async def _regions(self, request: HttpRequest, known_id: RequestId) -> Answer:
        near = client_location(request.query, request.headers)
        return self._json(request, known_id, http.RegionList(data=self._door.regions(near)))

    async def _health(self, request: HttpRequest, known_id: RequestId) -> Answer:
        headers = self._headers(request, known_id) | {"content-type": "text/plain; charset=utf-8"}
        return Answer(200, headers, b"ok\n")

    async def _ready(self, request: HttpRequest, known_id: RequestId) -> Answer:
        problem = self._door.not_ready_because()
        if problem is not None:
            return _error(*problem, self._headers(request, known_id))
        if self._connections is not None and self._connections.is_full:
            return _error(Fault.OVERLOADED, FULL, self._headers(request, known_id))
        if self._door.bodies.is_full:
            return _error(Fault.OVERLOADED, no_room().message, self._headers(request, known_id))
        return self._json(request, known_id, self._door.readiness())

    async def _metrics(self, request: HttpRequest, known_id: RequestId) -> Answer:
        accept = ",".join(request.lines.get("accept", ()))
        page, content_type = metrics_page(self._registry, accept)
        headers = self._headers(request, known_id) | {"content-type": content_type}
        return Answer(200, headers, page)

    def _headers(self, request: HttpRequest, known_id: RequestId) -> dict[str, str]:
        headers: dict[str, str] = {http.H_REQUEST_ID: known_id, http.H_REGION: self._region}
        if self._cors is not None:
            headers.update(self._cors.headers(request.headers.get(http.H_ORIGIN)))
        return headers

    def _json(self, request: HttpRequest, known_id: RequestId, value: object) -> Answer:
        return _json(200, orjson.dumps(value), self._headers(request, known_id))


def client_location(query: Query, headers: Mapping[str, str]) -> GeoLocation | None:
    """The client's location, by the query `near` or else by a header; None without both.

    Raises RequestRefused for what is no location, and for a query of another name: ignored, it
    would make another region the nearest.
    """
    for name in query:
        if name != NEAR:
            message = f"unknown query parameter {name!r:.60}{did_you_mean(name, (NEAR,))}"
            raise RequestRefused(Fault.INVALID, message, name[:60])
    near = query.get(NEAR, [])
    if len(near) > 1:
        raise RequestRefused(Fault.INVALID, f"{NEAR} is given more than once", NEAR)
    for given, name in (
        (near[0] if near else None, NEAR),
        (headers.get(H_CLIENT_LOCATION), H_CLIENT_LOCATION),
    ):
        if given is not None:
            try:
                return parse_location(given)
            except ValueError as error:
                raise RequestRefused(Fault.INVALID, f"{name}: {error}", name) from error
    return None


def _pattern(path: str) -> re.Pattern[str]:
    """Of a path with one variable part. A model's name may have slashes; an id has none, and is not
    the last word of another path of the API."""
    before, _, after = re.split(r"(\{.*\})", path)
    words = [one.removeprefix(before) for one in http.UNSERVED if one.startswith(before)]
    other = f"(?!(?:{'|'.join(words)})(?:/|$))" if words else ""
    variable = ".+" if path == http.MODEL else other + "[^/]+"
    return re.compile(re.escape(before) + variable + after)


def _path(request: HttpRequest) -> str:
    """The path that is requested, by its first name and without a slash at its end."""
    path = request.path
    path = path[:-1] if path[-1:] == "/" and len(path) > 1 else path
    return ALIASES.get(path, path)


def _error(
    fault: Fault, message: str, headers: dict[str, str], path: str = "", param: str | None = None
) -> Answer:
    headers = dict(http.error_headers(fault)) | headers  # what this refusal says goes first
    body = http.error_body(fault, message, param, error_form(path))
    answer = _json(fault.value.status, body, headers)
    answer.fault = fault
    return answer


def _json(status: int, body: bytes, headers: dict[str, str]) -> Answer:
    return Answer(status, headers | {"content-type": "application/json"}, body)
