"""Finds out which optional paths an engine answers: by tiny requests of the agent's own, one after
the other, and by clients' requests. What follows from an answer is `agents.core.model_routes`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

import orjson

from agents.adapters.engine_call import JSON_BODY, UnexpectedAnswer, call_engine
from agents.adapters.http_client import HttpBroken, HttpClient
from agents.core.loaded_models import States, loads_on_demand
from agents.core.model_routes import ANY, ModelRoutes, is_about_model
from schemas.engine_routes import ENGINE_ROUTES
from schemas.http_statuses import (
    INVALID,
    NOT_IMPLEMENTED,
    NOT_THIS_PATH,
    PATH_UNKNOWN,
    SERVER_ERROR,
    SUCCESS,
    TOO_MANY,
    UNAUTHORIZED,
)
from schemas.ids import ModelId
from schemas.state import KnownRoutes, ModelCard

log = logging.getLogger(__name__)

CONFIRMED_S = 30.0  # for so long a path is known to be there whatever one request's answer is
PATIENCE_S = 30.0  # for the answer that tells whether there is a path: an engine at work is slow
BOUNDARY = "mesh-probe"
FORM_BODY = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
GIVEN_UP = "%s: whether it answers %s is not asked any more; clients' requests will show it"


class OptionalPaths:
    """Of one engine. Close it at the end."""

    def __init__(
        self,
        api: HttpClient,
        clock: Callable[[], float],
        *,
        finds: bool,
        listed: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        """`finds`: whether to send requests; `listed`: paths that its operator says that it
        answers; `timeout_s`: how long a scrape waits for answers."""
        self._api, self._clock = api, clock
        self._finds, self._listed, self._timeout_s = finds, listed, timeout_s
        self.routes = ModelRoutes()
        self._failed: dict[tuple[str, ModelId], int] = {}  # by a server error, and which
        self._asking: asyncio.Task[None] | None = None
        self._maybe_lacking: set[str] = set()  # a request was answered as if it had not the path
        self._confirmed_at: dict[str, float] = {}  # but it has

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    def lacks(self, path: str) -> bool:
        """It answered a request on that optional path as one that it doesn't know: whether it does
        is to be found out at once, as one request's answer must not decide that for all.

        False where that was found out a short while ago: the answer is about the request itself;
        and where the answer itself has to tell (`answered`).
        """
        if self._clock() - self._confirmed_at.get(path, float("-inf")) < CONFIRMED_S:
            return False
        if self.routes.learns(path):
            return False
        self.routes.ask_again(path)
        self._maybe_lacking.add(path)
        return True

    def answered(self, model: ModelId, path: str, status: int, body: bytes) -> bool:
        """It answered a client's request on an optional path, well or as one that it doesn't know;
        `body`: as far as it came. Whether that is new."""
        has = status in SUCCESS
        if not self.routes.learns(path) or (not has and is_about_model(body)):
            return False
        is_new = self.routes.answered(model, path, has=has, now=self._clock())
        if is_new and not has:
            log.info("%s answers %d for %s on %s", self._api.url, status, model, path)
        return is_new

    @property
    def to_try(self) -> bool:
        """Whether the next scrape may find out about more of them."""
        return self._finds and bool(self._is_asking or self.routes.to_ask(self._clock()))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Those of which it is not known whether the engine answers them."""
        return tuple(self.routes.unasked)

    @property
    def failed(self) -> dict[str, int]:
        """Those that it answered by a server error last, and for no model well; and which error."""
        has = self.routes.paths
        return {path: each for (path, _), each in sorted(self._failed.items()) if path not in has}

    def failed_scrape(self, *, was_away: bool) -> None:
        """The engine may be gone; `was_away`: another process may have its place."""
        self._confirmed_at.clear()
        if was_away:
            self.routes.restarted()  # until they are told it is taken for the same

    async def find(
        self,
        models: tuple[ModelId, ...],
        cards: Mapping[ModelId, ModelCard],
        states: States,
        *,
        may_ask: bool,
    ) -> tuple[tuple[str, ...], KnownRoutes | None]:
        """Those that it answers, and what else is known of them. `may_ask`: it is known whether it
        says which models are loaded.

        Lists of routes, where engines have them, name what the server knows and not what its model
        can do. The scrape waits for answers as for its pages; later ones count at the next.
        """
        if not self._finds:
            return self._listed, None
        now, routes = self._clock(), self.routes
        if models != routes.names:
            self._confirmed_at.clear()
            self._failed.clear()
        on_demand = loads_on_demand(models, cards, states)
        routes.listed(models, on_demand=on_demand, now=now)
        if may_ask and not self._is_asking and (paths := routes.to_ask(now)):
            self._asking = asyncio.create_task(self._ask(paths, None if on_demand else models[0]))
            await asyncio.wait([self._asking], timeout=self._timeout_s)
        return (*routes.paths, *self._listed), routes.known()

    async def ask_of(self, model: ModelId) -> bool:
        """Find out, for an operator, what this model answers, which is loaded on an engine that
        loads on demand. False where a request was not answered at all: then no more are sent."""
        known = self.routes.known()
        for path in () if known is None else known.unknown:
            if (answer := await self._answer_of(path, model)) is None:
                return False
            if (status := self._told_by(path, model, *answer)) is not None:
                has = status in SUCCESS
                self.routes.answered(model, path, has=has, now=self._clock())
        return True

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None and not self._asking.done()

    async def _ask(self, paths: list[str], model: ModelId | None) -> None:
        """Find out about these paths, one after the other, as long as it has the same models."""
        generation = self.routes.generation
        for path in paths:
            answer = await self._answer_of(path, model)
            status = None if answer is None else self._told_by(path, model, *answer)
            if generation != self.routes.generation:
                return
            if status is None:  # it has other troubles
                if self.routes.told_nothing(path, self._clock()):
                    log.info(GIVEN_UP, self._api.url, path)
                continue
            has = status in SUCCESS or (model is None and status not in PATH_UNKNOWN)
            self.routes.told(path, has=has)
            if path in self._maybe_lacking and has:
                self._confirmed_at[path] = self._clock()
            self._maybe_lacking.discard(path)

    async def _answer_of(self, path: str, model: ModelId | None) -> tuple[int, bytes] | None:
        """To a tiny request for that model on that path, or to one without a body; None if none
        came in time."""
        headers, body = _without_body(path) if model is None else smallest_request(path, model)
        try:
            return await call_engine(self._api, "POST", path, PATIENCE_S, body, headers)
        except (OSError, HttpBroken, UnexpectedAnswer):  # a timeout too
            return None

    def _told_by(self, path: str, model: ModelId | None, status: int, page: bytes) -> int | None:
        """The status of such an answer; None where that says nothing about the path."""
        for name in (ANY, model or ANY):  # a model's answer says more than one to no body
            self._failed.pop((path, name), None)
        if status >= SERVER_ERROR and status != NOT_IMPLEMENTED:
            self._failed[path, model or ANY] = status
        if model is None:
            is_told = status < SERVER_ERROR or status == NOT_IMPLEMENTED
            is_told = is_told and status not in (UNAUTHORIZED, TOO_MANY)
            return None if not is_told else INVALID if is_about_model(page) else status
        return status if status in SUCCESS or status in NOT_THIS_PATH else None


def smallest_request(path: str, model: ModelId) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request for one token, or for the vector of one."""
    route = ENGINE_ROUTES[path]
    if route.takes_json:
        return JSON_BODY, orjson.dumps({"model": model, **route.smallest})
    parts = []
    for name, value in {"model": model, **route.smallest}.items():
        is_file = isinstance(value, bytes)
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
        head += '; filename="silence.wav"' if is_file else ""
        parts.append(head.encode() + b"\r\n\r\n")
        parts.append(value if isinstance(value, bytes) else str(value).encode())
        parts.append(b"\r\n")
    return FORM_BODY, b"".join((*parts, f"--{BOUNDARY}--\r\n".encode()))


def _without_body(path: str) -> tuple[Mapping[str, str], bytes]:
    """A request that no engine computes anything for: its HTTP server refuses it, as one for a path
    that it has, or hasn't."""
    return (JSON_BODY if ENGINE_ROUTES[path].takes_json else FORM_BODY), b""
