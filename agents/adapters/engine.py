"""The engine beside this agent, over HTTP: scrapes of its models and metrics, and probes. Relays
use its `api` for requests.

Connections are kept for less time than engines keep them: uvicorn, under vLLM and SGLang, closes
an idle one after 5 s, and a request may be on its way at that moment.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from agents.adapters.engine_call import UnexpectedAnswer, UnexpectedStatus, call_engine
from agents.adapters.engine_kinds import EngineDialect, MetricsPage, kind_of_page, looks_like
from agents.adapters.http_client import Connection, HttpBroken, HttpClient, origin
from agents.adapters.listed_models import MODELS_PATH, NO_CARDS, NOT_READ, ListedModels, served
from agents.adapters.loaded_pages import LoadedPages
from agents.adapters.moved_turns import moves_system_turns
from agents.adapters.optional_paths import OptionalPaths, smallest_request
from agents.adapters.served_models import ServedModels
from agents.core.engine_pages import EnginePages, FaultKind, Look, PageFault, ScrapeResult
from agents.core.engine_results import ClientErrors
from agents.core.events import (
    NO_USAGE,
    NOTHING_KNOWN,
    EngineReading,
    EngineScraped,
    ScrapeFailed,
    TokenUsage,
)
from agents.core.loaded_models import NO_STATES
from agents.core.stream_end import PromisedEnds
from agents.core.usage import with_own_field
from schemas.http_statuses import OK, PATH_UNKNOWN, SERVER_ERROR, SUCCESS, UNAUTHORIZED
from schemas.ids import ModelId

log = logging.getLogger(__name__)
T = TypeVar("T")

SCRAPE_TIMEOUT_S = 1.0
MODELS_EVERY_S = 1.0
HEALTH_PATH = "/health"
SETTINGS_EVERY_S = 30.0  # reading SGLang's settings interrupts its scheduler
SILENT = (FaultKind.NO_CONNECTION, FaultKind.TIMED_OUT)
UNREADABLE = PageFault(FaultKind.UNREADABLE, "no series of the engine's kind")
NONE_CACHED = TokenUsage(cached_tokens=0)
KEY_REQUIRED = "answers HTTP 401: it requires an API key, or another one (--engine-key-file)"


class OtherKind(UnexpectedAnswer):
    """The engine is not of the kind that its agent was told; the message says of which it is."""

    kind = FaultKind.OTHER_KIND

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class FailedRead(NamedTuple):
    """A page that could not be read; `detail` is for the log."""

    fault: PageFault
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What its operator says of an engine.

    `models`: instead of the engine's own list; empty to read that. `key`: its API key, sent to its
    own origin alone. `reads_batch_max`: read its batch size where it shows that; not where the
    operator gave it. `asks_usage`: ask for the token counts of every stream; None: where its kind
    takes that. `routes`: other paths, which it is said to answer. `rank`: of data-parallel ones,
    that which is meant; None: all of them. `finds_paths`: send a tiny request on optional ones; not
    to an engine that waits for another one's KV cache.
    """

    scrape_timeout_s: float = SCRAPE_TIMEOUT_S
    key: str | None = None
    models: tuple[ModelId, ...] = ()
    reads_batch_max: bool = True
    asks_usage: bool | None = None
    routes: tuple[str, ...] = ()
    rank: int | None = None
    finds_paths: bool = True


NO_OPTIONS = EngineOptions()


class EngineClient:
    """One engine, as the agent reaches it. Close it at the end."""

    def __init__(
        self,
        api_url: str,
        metrics_url: str,
        kind: EngineDialect,
        clock: Callable[[], float],
        options: EngineOptions = NO_OPTIONS,
    ) -> None:
        usage, key = options.asks_usage, options.key
        self.asks_usage = kind.takes_usage_option if usage is None else usage
        self.takes_response_ids = kind.takes_response_ids
        self.kind, self._options = kind, options
        self._clock, self._scrape_timeout_s = clock, options.scrape_timeout_s
        self.api = HttpClient(api_url, key)
        one_server = kind.has_metrics and origin(metrics_url) == origin(api_url)
        page_key = key if one_server else None
        self._page = HttpClient(metrics_url, page_key) if kind.has_metrics else None
        self._watched = (self.api, self._page) if one_server and self._page else (self.api,)
        self._pages = EnginePages(has_metrics=kind.has_metrics, one_server=one_server)
        self._served = ServedModels(self._listed_models)
        self._tells_loaded = LoadedPages(self._get_quietly)
        self.optional = OptionalPaths(
            self.api,
            clock,
            finds=options.finds_paths,
            listed=options.routes,
            timeout_s=options.scrape_timeout_s,
        )
        self.ends = PromisedEnds(known=kind.ends_streams)
        self._models_due_at = self._settings_due_at = float("-inf")
        self.base_models: tuple[ModelId, ...] = ()  # as last listed, without adapters
        self.version: str | None = None  # of the engine, where its settings show it
        self.left_out = NO_USAGE  # what counts stand for that its answers leave out
        self._batch_max: int | None = None
        self._moves_turns: bool | None = False if not kind.may_move_turns else None
        self._lists_as: str | None = None  # another kind, by its list of models
        self._has_rank = True  # as far as its page shows
        self._has_refused_key = False
        # Relays write these:
        self.last_content_at = float("-inf")  # when a good response last brought content
        self.client_errors = ClientErrors()
        self.held: set[str] = set()  # inboxes of paused responses

    def close(self) -> None:
        self.optional.close()
        self.api.close()
        if self._page is not None:
            self._page.close()

    @property
    def is_connected(self) -> bool:
        """Whether a connection to it is open and idle, whose end `on_kept_lost` tells at once."""
        return any(client.is_connected for client in self._watched)

    def on_kept_lost(self, told: Callable[[], None]) -> None:
        """Call `told` when the engine closes an idle connection."""
        for client in self._watched:
            client.on_kept_lost = told

    def refused_key(self) -> None:
        """It answered a request with 401. Scrapes may not show that; it is logged once."""
        if not self._has_refused_key:
            self._has_refused_key = True
            log.warning("%s %s", self.api.url, KEY_REQUIRED)

    async def probe(self, path: str, model: ModelId, timeout_s: float) -> bool:
        """Request one token. Whether the response, if it came in time, shows that it computes.

        A refusal (HTTP 4xx) may come from the HTTP server in front of an engine that hangs. It
        counts only where no metrics could show that the engine computes.
        """
        headers, body = self.addressed(*smallest_request(path, model))
        try:
            status, _ = await call_engine(self.api, "POST", path, timeout_s, body, headers)
        except (OSError, HttpBroken, UnexpectedAnswer):
            return False
        if status in SUCCESS:
            self._pages.proved(self._clock())
            return True
        return not self._pages.shows_numbers and status < SERVER_ERROR

    def addressed(
        self, headers: Mapping[str, str], body: bytes, adapter: ModelId | None = None
    ) -> tuple[Mapping[str, str], bytes]:
        """A request with what names its rank and, where its model alone does not, its adapter."""
        kind = self.kind
        if self._options.rank is not None and kind.rank_header:
            headers = {**headers, kind.rank_header: str(self._options.rank)}
        if self._options.rank is not None and kind.rank_field:
            body = with_own_field(body, kind.rank_field, self._options.rank)
        if adapter is not None and kind.adapter_field:
            body = with_own_field(body, kind.adapter_field, adapter)
        return headers, body

    def refresh_models(self) -> None:
        """Read the models with the next scrape."""
        self._models_due_at = float("-inf")

    def lacks(self, path: str) -> bool:
        """Its answer says that it has no such optional path; whether that is to be found out."""
        lacks = self.optional.lacks(path)
        if lacks:
            self.refresh_models()
        return lacks

    def answered(self, model: ModelId, path: str, status: int, body: bytes) -> None:
        """A client's request on an optional path; `body`: as far as it came."""
        if self.optional.answered(model, path, status, body):
            self.refresh_models()

    async def scrape(self) -> EngineScraped | ScrapeFailed:
        """One scrape, bounded by the timeout; the engine's faults raise nothing. One at a time."""
        began_at = self._clock()
        is_due = began_at >= self._models_due_at
        asks_page = self._page is not None and self._pages.asks_metrics(began_at)
        known, reading = await self._looked(is_due=is_due, asks_page=asks_page)
        problems = [each for each in (known, reading) if isinstance(each, FailedRead)]
        look = Look(
            began_at,
            self.last_content_at,
            is_due and (not self._options.models or self._asks_health),
            known.fault if isinstance(known, FailedRead) else None,
            asks_page and (reading is not None),
            self._fault(reading),
        )
        result = self._pages.looked(look, self._clock())
        if result is ScrapeResult.UP:
            if isinstance(known, FailedRead):
                known = NOT_READ
                self._models_due_at = self._clock() + self._pages.models_again_s
            if reading is None or isinstance(reading, FailedRead):
                reading = NOTHING_KNOWN
            models = known.names if is_due and known is not NOT_READ else None
            paths: tuple[str, ...] = ()
            routes, states = None, NO_STATES
            if models is not None:
                has_page = self._page is not None
                states = await self._tells_loaded.states(known, has_page=has_page)
                may_ask = not self._tells_loaded.is_unknown
                paths, routes = await self.optional.find(
                    known.base or models, known.cards, states, may_ask=may_ask
                )
            told = known.adapters, routes, states, self._pages.seen, self._tells_loaded.is_unknown
            rest = self.last_content_at, frozenset(self.held), *told, bool(self._moves_turns)
            return EngineScraped(began_at, reading, models, known.cards, paths, *rest)
        self.refresh_models()  # what comes back may be another engine
        if result is ScrapeResult.FAILED:
            self._settings_due_at, self._batch_max, self.version = float("-inf"), None, None
            self._moves_turns = None if self.kind.may_move_turns else False
            self.left_out = NO_USAGE
            self.optional.failed_scrape(was_away=self._pages.was_away)
            if self._pages.was_away:  # a single scrape may fail because it is busy
                self.ends.restarted()
                self._tells_loaded.restarted()
        return ScrapeFailed(
            began_at=began_at,
            last_content_at=self.last_content_at,
            timed_out=all(each.fault.kind is FaultKind.TIMED_OUT for each in problems),
            detail=problems[0].detail,
            is_up=result is ScrapeResult.WAIT,
            wants_proof=self._pages.seen.wants_proof,
        )

    async def _looked(
        self, *, is_due: bool, asks_page: bool
    ) -> tuple[ListedModels | FailedRead, EngineReading | FailedRead | None]:
        """Its models, where they are due, and the page of metrics, unless no answer came at all."""
        if is_due and asks_page and self._pages.asks_both:
            return await asyncio.gather(self._tried(self._models), self._tried(self._reading))
        known = await self._tried(self._models) if is_due else NOT_READ
        is_silent = isinstance(known, FailedRead) and known.fault.kind in SILENT
        if not asks_page or is_silent:
            return known, None
        return known, await self._tried(self._reading)

    async def _tried(self, read: Callable[[], Awaitable[T]]) -> T | FailedRead:
        """What was read, or why it could not be."""
        try:
            return await read()  # no coroutine is made before: its task may end before it begins
        except TimeoutError:
            detail = f"no answer within {self._scrape_timeout_s:g} s"
            return FailedRead(PageFault(FaultKind.TIMED_OUT, detail), detail)
        except UnexpectedAnswer as problem:
            return FailedRead(PageFault(problem.kind, problem.what), str(problem))
        except OSError as problem:
            detail = str(problem) or type(problem).__name__
            return FailedRead(PageFault(FaultKind.NO_CONNECTION, "no connection"), detail)
        except HttpBroken as problem:
            return FailedRead(PageFault(FaultKind.BAD_ANSWER, "no HTTP/1.1"), str(problem))

    @staticmethod
    def _fault(reading: EngineReading | FailedRead | None) -> PageFault | None:
        if isinstance(reading, FailedRead):
            return reading.fault
        if reading is None or reading.waiting is not None or reading.running is not None:
            return None
        return UNREADABLE

    async def still_serves(self, model: ModelId, connection: Connection) -> bool:
        """Whether the process at the other end of that connection serves the model."""
        if self._options.models:  # what the engine calls them is not known
            return True
        if await self._served.serves(model, connection.opened_at):
            return True
        self.refresh_models()
        return False

    def loaded(self, adapter: ModelId) -> None:
        """It has loaded that adapter, which the list of models that was read last lacks."""
        self._served.loaded(adapter)

    async def _listed_models(self) -> tuple[ModelId, ...]:
        page = await self._get(self.api, MODELS_PATH)
        return served(page, self.api.url + MODELS_PATH).names

    @property
    def _asks_health(self) -> bool:
        """Whether neither a list of models nor a page of metrics shows that it is there."""
        return not self._pages.shows_numbers or self._pages.asks_both

    async def _models(self) -> ListedModels:
        if not self._options.models:
            began_at = time.monotonic()
            page = await self._get(self.api, MODELS_PATH)
            known = served(page, self.api.url + MODELS_PATH)
            self._served.were_read(began_at, known.names)
        else:
            known = ListedModels(self._options.models, NO_CARDS)
            if self._asks_health:
                await self._get(self.api, HEALTH_PATH, is_health=True)
        self._models_due_at = self._clock() + MODELS_EVERY_S
        self.base_models = known.base
        self._lists_as = looks_like(known.owner, self.kind)
        return known

    async def _get_quietly(self, path: str) -> bytes | None:
        """A page that it may have; empty if it hasn't, None if that isn't known."""
        try:
            status, page = await call_engine(self.api, "GET", path, self._scrape_timeout_s)
        except (OSError, HttpBroken, UnexpectedAnswer):
            return None
        return page if status == OK else b"" if status in PATH_UNKNOWN else None

    async def _reading(self) -> EngineReading:
        if self._page is None or self.kind.read is None:
            return NOTHING_KNOWN
        try:
            page = await self._get(self._page, "")
        except UnexpectedStatus as problem:
            if self._lists_as is not None and problem.kind is not FaultKind.LOGIN:
                raise OtherKind(self._lists_as) from problem
            raise
        only = (
            None if self._options.rank is None else (self.kind.rank_label, str(self._options.rank))
        )
        text = page.decode("utf-8", "replace")
        reading = self.kind.read(MetricsPage(text, only))
        if self._fault(reading) and (other := looks_like(kind_of_page(text), self.kind)):
            raise OtherKind(other)
        self._log_rank(has_rank=reading != NOTHING_KNOWN)
        if self._clock() >= self._settings_due_at:
            await self._read_settings()
        return reading if self._batch_max is None else replace(reading, batch_max=self._batch_max)

    def _log_rank(self, *, has_rank: bool) -> None:
        if self._options.rank is not None and has_rank is not self._has_rank and not has_rank:
            text = 'no series with %s="%d" on the metrics page: its load is unknown; see that the '
            text += "engine has that data-parallel rank (--data-parallel-rank)"
            log.warning(text, self.kind.rank_label, self._options.rank)
        self._has_rank = has_rank

    async def _read_settings(self) -> None:
        """Its batch size and version, in the time of one page, and what it does with system turns,
        in that of another. What they don't show is kept."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._scrape_timeout_s):
                for path in self.kind.settings_paths:
                    with contextlib.suppress(OSError, HttpBroken, UnexpectedAnswer):
                        self._take_settings(await self._get(self.api, path))
                        break
        if self._moves_turns is None and self.base_models:
            asked = self.version, self.base_models[0], self._scrape_timeout_s
            with contextlib.suppress(TimeoutError):
                self._moves_turns = await moves_system_turns(self.api, *asked)
        is_known = self.version is not None and not self._options.reads_batch_max
        is_known = is_known and self._moves_turns is not None
        again_s = float("inf") if is_known else SETTINGS_EVERY_S
        self._settings_due_at = self._clock() + again_s

    def _take_settings(self, page: bytes) -> None:
        self.version = self.kind.version(page) or self.version
        self.left_out = NONE_CACHED if self.kind.reports_cached(page) else NO_USAGE
        if self._options.reads_batch_max:
            self._batch_max = self.kind.batch_max(page, self._options.rank) or self._batch_max

    async def _get(self, client: HttpClient, path: str, *, is_health: bool = False) -> bytes:
        status, page = await call_engine(client, "GET", path, self._scrape_timeout_s)
        url = client.url + path
        if status == UNAUTHORIZED:
            raise UnexpectedStatus(f"{url} {KEY_REQUIRED}", status)
        # A server without /health answers 404, which shows that it runs.
        if status >= SERVER_ERROR if is_health else status != OK:
            raise UnexpectedStatus(f"{url} answers HTTP {status}", status)
        return page
