"""The OpenAI-compatible face of a region: routes, error shapes, answers relayed to sockets.

A handler reads and checks, asks the front door for a ticket, waits, and relays. It decides
nothing about placement. A client that hangs up cancels its handler, whatever it is waiting for;
the ticket is then left, and the front door tells whoever is still working for it.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from math import ceil
from typing import Protocol

import orjson
from aiohttp import web
from opentelemetry.context import Context
from prometheus_client import CollectorRegistry, generate_latest

from infra import tracing
from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.connections import Connections
from mesh.adapters.cors import Cors
from mesh.adapters.http_server import FULL, UNPARSABLE
from mesh.adapters.near import read_near
from mesh.adapters.own_headers import refuse_misread
from mesh.adapters.problem import Problem
from mesh.adapters.read_request import RequestReader, request_id
from mesh.adapters.relay import Door, relay
from mesh.adapters.ticket import Ask, Ticket
from mesh.adapters.upload import no_room
from mesh.adapters.wishes import read_wishes
from mesh.core.federation.geo import Location
from schemas import http
from schemas.decision import header_value, without_matches
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, RequestId
from schemas.residency import Labels
from schemas.state import ModelCard

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest, RequestId], Awaitable[web.StreamResponse]]


class FrontDoor(Door, Protocol):
    """What the face needs from the router behind it."""

    @property
    def bodies(self) -> BodyBudget:
        """What requests may keep in memory together."""
        ...

    def models(self) -> tuple[ModelId, ...]:
        """Models that some ready replica serves."""
        ...

    def model_card(self, model: ModelId) -> ModelCard:
        """What an engine says of it."""
        ...

    def known_models(self) -> tuple[ModelId, ...]:
        """Models that can be asked for, if only to wait for a replica's return."""
        ...

    def regions(self, near: Location | None) -> tuple[http.Region, ...]:
        """The regions as this router sees them, nearest first."""
        ...

    def not_ready_because(self) -> tuple[Fault, str] | None:
        """Why requests can't be placed at present, or None if they can."""
        ...

    def residency(self, wanted: Labels, headers: Mapping[str, str]) -> Labels:
        """Where a request that wants these may go. Raises Problem if that is nowhere."""
        ...

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """Whose request it is; empty for nobody's, None where tenants are not told apart."""
        ...

    def readiness(self) -> http.Readiness:
        """How well they can be placed."""
        ...

    def admit(self, ask: Ask, taken: int, parent: Context | None) -> Ticket:
        """Take a request in, with the bytes that `bodies` set aside; it is being placed."""
        ...


# What is about one process, where several share the port that clients use.
OF_ONE_PROCESS = frozenset({http.METRICS, http.HEALTH, http.READY, http.REGIONS})
MODEL_PREFIX = http.MODEL.partition("{")[0]
EVERY_PATH = frozenset(route.path for route in http.ROUTES)


class HttpApi:
    """The routes of one router, all or some."""

    def __init__(
        self,
        region: RegionId,
        door: FrontDoor,
        registry: CollectorRegistry,
        paths: Collection[str] = EVERY_PATH,
        elsewhere: str = "",
        connections: Connections | None = None,
        count: Callable[[str], None] = lambda why: None,
        cors_origins: Collection[str] = (),
    ) -> None:
        """`elsewhere`: words about the paths that are left out. `connections`: of the port where
        clients come. `count` is called with why a body is refused: the code of the fault."""
        self._connections, self._count = connections, count
        self._cors = Cors(cors_origins) if cors_origins else None
        self._reader = RequestReader(door.bodies, self._precheck)
        self._region = region
        self._elsewhere = elsewhere
        self._with_model = http.MODEL in paths
        self._door = door
        self._registry = registry
        self._handlers: dict[str, Handler] = {
            "createChatCompletion": self._ask,
            "createCompletion": self._ask,
            "listModels": self._models,
            "listRegions": self._regions,
            "health": self._health,
            "ready": self._ready,
            "metrics": self._metrics,
        }
        self._by_path: dict[str, dict[str, Handler]] = {}
        for route in http.ROUTES:
            if route.path in paths and route.path != http.MODEL:  # the one with a variable part
                methods = self._by_path.setdefault(route.path, {})
                methods[route.method] = self._handlers[route.name]

    async def close(self) -> None:
        """End what it began."""
        await self._reader.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is.

        Where the answer came before the body it is the connection's last: a client that had waited
        for leave to send a body need not send it, and what comes next would be taken for it.
        """
        answer = await self._answered(request)
        if not request.content.is_eof():
            answer.force_close()
        return answer

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        known_id = request_id(request)
        try:
            if UNPARSABLE in request:
                raise request[UNPARSABLE]
            handler = self._handler(request)
            refuse_misread(request)
            return await handler(request, known_id)
        except Problem as problem:
            headers = self._headers(request, known_id) | problem.headers
            return _error(problem.fault, problem.message, headers, param=problem.param)
        except Exception as error:
            if request.writer.output_size > 0:
                raise  # the answer had begun: the connection is cut
            log.error("request failed inside the router", exc_info=error)
            message = "the router failed on this request; its log says why"
            answer = _error(Fault.INTERNAL, message, self._headers(request, known_id))
            answer.force_close()
            return answer

    def _handler(self, request: web.BaseRequest) -> Handler:
        path = _path(request)
        methods = self._methods(path)
        if methods is None:
            known = ", ".join([*self._by_path, *([http.MODEL] if self._with_model else [])])
            words = f"no path {path}; there are {known}{self._elsewhere}"
            raise Problem(Fault.PATH_UNKNOWN, words)
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None and request.method == "OPTIONS" and self._cors is not None:
            return self._preflight
        if handler is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            message = f"{path} takes {allowed}"
            raise Problem(Fault.METHOD_WRONG, message, headers={http.H_ALLOW: allowed})
        return handler

    def _methods(self, path: str) -> dict[str, Handler] | None:
        methods = self._by_path.get(path)
        if methods is None and self._with_model and path.startswith(MODEL_PREFIX):
            return {"GET": self._model}
        return methods

    async def _preflight(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        assert self._cors is not None
        methods = self._methods(_path(request)) or {}
        origin = request.headers.get(http.H_ORIGIN)
        told = self._cors.preflight(origin, request.headers, methods)
        if told is None:
            message = "not a preflight request, or the page's origin is not in cors_origins"
            raise Problem(Fault.METHOD_WRONG, message, headers={http.H_ALLOW: ", ".join(methods)})
        return web.Response(status=204, headers=self._headers(request, known_id) | dict(told))

    async def _ask(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        ticket = await self._admitted(request, known_id)
        try:
            await ticket.until_startable()
            return await self._answer(request, ticket)
        except BaseException:  # the client hung up, or we failed: nobody waits any more
            self._door.leave(ticket)
            raise

    async def _admitted(self, request: web.BaseRequest, known_id: RequestId) -> Ticket:
        try:
            ask, taken = await self._reader.read(request, _path(request), known_id)
        except Problem as problem:
            self._count(problem.fault.value.code)
            raise
        try:
            ask.residency = self._door.residency(ask.wishes.residency, request.headers)
            ask.tenant = self._door.tenant(request.headers)
            models = self._door.known_models()
            if models and ask.model not in models:
                raise Problem(
                    Fault.MODEL_UNKNOWN,
                    f"the model {ask.model!r} is not served here; known: {', '.join(models)}",
                    "model",
                )
        except BaseException:
            self._door.bodies.give_back(taken)
            raise
        return self._door.admit(ask, taken, tracing.extract(request.headers))

    def _precheck(self, request: web.BaseRequest) -> None:
        """Raise Problem for what is wrong whatever the body will be."""
        wishes = read_wishes(request.headers, {})
        self._door.residency(wishes.residency, request.headers)
        if self._door.bodies.is_full:
            raise no_room()

    async def _answer(self, request: web.BaseRequest, ticket: Ticket) -> web.StreamResponse:
        headers = self._headers(request, ticket.ask.request_id)
        receipt = ticket.receipt
        if ticket.ask.wishes.debug and receipt is not None:
            shown = without_matches(receipt) if ticket.ask.tenant == "" else receipt
            headers[http.H_DECISION] = header_value(shown)
        failure = ticket.failure
        if failure is not None:
            self._door.failed(ticket)
            retry_after_s = ceil(failure.retry_after_s or 1.0)
            headers.update(http.error_headers(failure.fault, retry_after_s))
            return _json(
                failure.fault.value.status, http.error_body(failure.fault, failure.message), headers
            )
        if ticket.pass_engine_error:
            error = ticket.engine_error
            assert error is not None, "told to pass on an error answer that never came"
            self._door.failed(ticket)
            headers = {**error.headers, **headers, "content-type": error.content_type}
            return web.Response(status=error.status, body=error.body, headers=headers)
        return await relay(request, ticket, self._door, headers)

    async def _models(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        models = tuple(self._described(model) for model in self._models_served())
        return self._json(request, known_id, http.ModelList(data=models))

    async def _model(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        asked = _path(request).removeprefix(MODEL_PREFIX)
        models = self._models_served()
        if asked not in models:
            raise Problem(
                Fault.MODEL_UNKNOWN,
                f"the model {asked!r} is not served here; known: {', '.join(models)}",
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

    def _models_served(self) -> tuple[ModelId, ...]:
        """Raises Problem where there is none: a client takes an empty list for all that will be."""
        models = self._door.models()
        if not models and (because := self._door.not_ready_because()) is not None:
            raise Problem(*because)
        return models

    async def _regions(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        return self._json(
            request, known_id, http.RegionList(data=self._door.regions(read_near(request)))
        )

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
        page = generate_latest(self._registry)
        headers = self._headers(request, known_id) | {"content-type": "text/plain; version=0.0.4"}
        return web.Response(body=page, headers=headers)

    def _headers(self, request: web.BaseRequest, known_id: RequestId) -> dict[str, str]:
        """Of every answer."""
        headers = {http.H_REQUEST_ID: known_id, http.H_REGION: self._region}
        if self._cors is not None:
            headers.update(self._cors.headers(request.headers.get(http.H_ORIGIN)))
        return headers

    def _json(self, request: web.BaseRequest, known_id: RequestId, value: object) -> web.Response:
        return _json(200, orjson.dumps(value), self._headers(request, known_id))


def _path(request: web.BaseRequest) -> str:
    """The path that is asked for; a slash at its end says nothing."""
    path = request.path
    return path[:-1] if path[-1:] == "/" and len(path) > 1 else path


def _error(
    fault: Fault, message: str, headers: dict[str, str], *, param: str | None = None
) -> web.Response:
    headers = headers | dict(http.error_headers(fault))
    return _json(fault.value.status, http.error_body(fault, message, param), headers)


def _json(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(
        status=status, body=body, headers=headers | {"content-type": "application/json"}
    )
