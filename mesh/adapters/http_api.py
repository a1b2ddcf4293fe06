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
from mesh.adapters.http_server import UNPARSABLE
from mesh.adapters.near import read_near
from mesh.adapters.own_headers import refuse_misread
from mesh.adapters.problem import Problem
from mesh.adapters.read_request import read_ask, request_id
from mesh.adapters.relay import Door, relay
from mesh.adapters.ticket import Ask, Ticket
from mesh.core.federation.geo import Location
from schemas import http
from schemas.decision import header_value, without_matches
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, RequestId
from schemas.residency import Labels

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
    ) -> None:
        """`elsewhere`: words about the paths that are left out."""
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

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        known_id = request_id(request)
        try:
            if UNPARSABLE in request:
                raise request[UNPARSABLE]
            handler = self._handler(request)
            refuse_misread(request)
            return await handler(request, known_id)
        except Problem as problem:
            headers = self._headers(known_id) | problem.headers
            return _error(problem.fault, problem.message, headers, param=problem.param)
        except Exception as error:
            if request.writer.output_size > 0:
                raise  # the answer had begun: the connection is cut
            log.error("request failed inside the router", exc_info=error)
            message = "the router failed on this request; its log says why"
            answer = _error(Fault.INTERNAL, message, self._headers(known_id))
            answer.force_close()
            return answer

    def _handler(self, request: web.BaseRequest) -> Handler:
        prefix = http.MODEL.partition("{")[0]
        methods = self._by_path.get(request.path)
        if methods is None and self._with_model and request.path.startswith(prefix):
            methods = {"GET": self._model}
        if methods is None:
            known = ", ".join([*self._by_path, *([http.MODEL] if self._with_model else [])])
            words = f"no path {request.path}; there are {known}{self._elsewhere}"
            raise Problem(Fault.PATH_UNKNOWN, words)
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            message = f"{request.path} takes {allowed}"
            raise Problem(Fault.METHOD_WRONG, message, headers={http.H_ALLOW: allowed})
        return handler

    async def _ask(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        ticket = await self._admitted(request, known_id)
        try:
            await ticket.until_startable()
            return await self._answer(request, ticket)
        except BaseException:  # the client hung up, or we failed: nobody waits any more
            self._door.leave(ticket)
            raise

    async def _admitted(self, request: web.BaseRequest, known_id: RequestId) -> Ticket:
        bodies = self._door.bodies
        taken = bodies.take(request.content_length)
        if taken is None:
            raise Problem(Fault.SATURATED, "this router holds as many bytes of requests as it may")
        try:
            ask = await read_ask(request, known_id)
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
            bodies.give_back(taken)
            raise
        return self._door.admit(ask, taken, tracing.extract(request.headers))

    async def _answer(self, request: web.BaseRequest, ticket: Ticket) -> web.StreamResponse:
        headers = self._headers(ticket.ask.request_id)
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
            headers["content-type"] = error.content_type
            return web.Response(status=error.status, body=error.body, headers=headers)
        return await relay(request, ticket, self._door, headers)

    async def _models(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        models = tuple(http.Model(id=model) for model in self._models_served())
        return self._json(known_id, http.ModelList(data=models))

    async def _model(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        asked = request.path.removeprefix(http.MODEL.partition("{")[0])
        models = self._models_served()
        if asked not in models:
            raise Problem(
                Fault.MODEL_UNKNOWN,
                f"the model {asked!r} is not served here; known: {', '.join(models)}",
            )
        return self._json(known_id, http.Model(id=asked))

    def _models_served(self) -> tuple[str, ...]:
        """Raises Problem where there is none: a client takes an empty list for all that will be."""
        models = self._door.models()
        if not models and (because := self._door.not_ready_because()) is not None:
            raise Problem(*because)
        return models

    async def _regions(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        return self._json(known_id, http.RegionList(data=self._door.regions(read_near(request))))

    async def _health(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        return web.Response(text="ok\n", headers=self._headers(known_id))

    async def _ready(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        problem = self._door.not_ready_because()
        if problem is not None:
            return _error(*problem, self._headers(known_id))
        return self._json(known_id, self._door.readiness())

    async def _metrics(self, request: web.BaseRequest, known_id: RequestId) -> web.StreamResponse:
        page = generate_latest(self._registry)
        headers = self._headers(known_id) | {"content-type": "text/plain; version=0.0.4"}
        return web.Response(body=page, headers=headers)

    def _headers(self, known_id: RequestId) -> dict[str, str]:
        return {http.H_REQUEST_ID: known_id, http.H_REGION: self._region}

    def _json(self, known_id: RequestId, value: object) -> web.Response:
        return _json(200, orjson.dumps(value), self._headers(known_id))


def _error(
    fault: Fault, message: str, headers: dict[str, str], *, param: str | None = None
) -> web.Response:
    headers = headers | dict(http.error_headers(fault))
    return _json(fault.value.status, http.error_body(fault, message, param), headers)


def _json(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(
        status=status, body=body, headers=headers | {"content-type": "application/json"}
    )
