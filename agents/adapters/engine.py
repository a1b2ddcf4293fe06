"""The engine beside this agent, over HTTP: scrapes of its models and metrics, and probes. Relays
use its `api` for requests.

Connections are kept for less time than engines keep them: uvicorn, under vLLM and SGLang, closes
an idle one after 5 s, and a request may be on its way at that moment.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import orjson

from agents.adapters.engine_kinds import EngineDialect, MetricsPage
from agents.adapters.http_client import Connection, HttpBroken, HttpClient, origin
from agents.adapters.loaded_pages import LATEST, LoadedPages, state_of
from agents.adapters.served_models import ServedModels
from agents.config import MODELS_MAX
from agents.core.added_usage import with_own_field
from agents.core.engine_pages import EnginePages, FaultKind, Look, PageFault, Verdict
from agents.core.events import (
    NO_USAGE,
    NOTHING_KNOWN,
    EngineReading,
    EngineScraped,
    ScrapeFailed,
    TokenUsage,
)
from agents.core.loaded_models import NO_STATES, States, loads_on_demand
from agents.core.model_routes import ModelRoutes, is_about_model
from agents.core.stream_end import PromisedEnds
from schemas.engine_routes import ENGINE_ROUTES
from schemas.ids import MODEL_CHARS_MAX, ModelId
from schemas.state import CARD_CHARS_MAX, CARDS_MAX, KnownRoutes, ModelCard

log = logging.getLogger(__name__)
T = TypeVar("T")

SCRAPE_TIMEOUT_S = 1.0
MODELS_EVERY_S = 1.0
PAGE_BYTES_MAX = 8 * 1024 * 1024
MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
SETTINGS_EVERY_S = 30.0  # reading SGLang's settings interrupts its scheduler
STATUS_OK, STATUS_UNAUTHORIZED, STATUS_NOT_FOUND, STATUS_SERVER_ERROR = 200, 401, 404, 500
SILENT = (FaultKind.NO_CONNECTION, FaultKind.TIMED_OUT)
LOGINS = (STATUS_UNAUTHORIZED, 403)
SUCCESS = range(200, 300)
CLIENT_ERRORS = range(400, 500)
CLIENT_ERRORS_BELIEVED = 3  # one after the other, before they may be the engine's own fault
STATUS_BUSY, STATUS_NOT_IMPLEMENTED = 429, 501
PATH_UNKNOWN = (404, 405, STATUS_NOT_IMPLEMENTED)  # llama.cpp answers 501 without `--embeddings`
NOT_THIS_PATH = (*PATH_UNKNOWN, 400, 422)  # older vLLM: 400 for a model that makes no embeddings
CONFIRMED_S = 30.0  # for so long a path is known to be there whatever one request's answer is
PATIENCE_S = 30.0  # for the answer that tells whether there is a path: an engine at work is slow
JSON_BODY = {"Content-Type": "application/json"}
BOUNDARY = "mesh-probe"
FORM_BODY = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
NO_ALIASES: Mapping[ModelId, ModelId] = {}
NO_HEADERS: Mapping[str, str] = {}
UNREADABLE = PageFault(FaultKind.UNREADABLE, "no series of the engine's kind")
NO_CARDS: dict[ModelId, ModelCard] = {}
NONE_CACHED = TokenUsage(cached_tokens=0)
GIVEN_UP = "%s: whether it answers %s is not asked any more; clients' requests will show it"
KEY_REQUIRED = "answers HTTP 401: it requires an API key, or another one (--engine-key-file)"


class UnexpectedAnswer(ValueError):
    """The engine answered a scrape in a way that it should not; the message says how."""

    kind = FaultKind.BAD_ANSWER
    what = "not what it should hold"


class UnexpectedStatus(UnexpectedAnswer):
    """With another HTTP status than 200."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.kind = FaultKind.LOGIN if status in LOGINS else FaultKind.BAD_ANSWER
        self.what = f"HTTP {status}"


class ListsNoModel(UnexpectedAnswer):
    """Its list of models is a good one, and empty."""

    kind = FaultKind.NO_MODEL


class FailedRead(NamedTuple):
    """A page that could not be read; `detail` is for the log."""

    fault: PageFault
    detail: str


class EngineClient:
    """One engine, as the agent reaches it. Close it at the end."""

    def __init__(
        self,
        *,
        api_url: str,
        metrics_url: str,
        kind: EngineDialect,
        clock: Callable[[], float],
        scrape_timeout_s: float = SCRAPE_TIMEOUT_S,
        key: str | None = None,
        models: tuple[ModelId, ...] = (),
        reads_batch_max: bool = True,
        asks_usage: bool | None = None,
        routes: tuple[str, ...] = (),
        rank: int | None = None,
        finds_paths: bool = True,
    ) -> None:
        """`models`: the operator's list, instead of the engine's own; empty to read that.

        `key`: the engine's API key, sent to its own origin alone. `reads_batch_max`: read its batch
        size where it shows that; not where the operator gave it. `asks_usage`: ask for the token
        counts of every stream; None: where its kind takes that. `routes`: other paths, which its
        operator says that it answers. `rank`: of data-parallel ones, that which is meant; None: all
        of them. `finds_paths`: send a tiny request on optional ones; not to an engine that waits
        for another one's KV cache.
        """
        self.asks_usage = kind.takes_usage_option if asks_usage is None else asks_usage
        self.takes_response_ids = kind.takes_response_ids
        self.kind = self._kind = kind
        self._rank = rank
        self._has_rank = True  # as far as its page shows
        self._given_models = models
        self._listed = routes
        self._finds_paths = finds_paths
        self._reads_batch_max = reads_batch_max
        self.failed_paths: dict[str, int] = {}  # that it answered by a server error last, and which
        self.version: str | None = None  # of the engine, where its settings show it
        self.left_out = NO_USAGE  # what counts stand for that its answers leave out
        self._settings_due_at = float("-inf")
        self._batch_max: int | None = None
        self._clock = clock
        self._scrape_timeout_s = scrape_timeout_s
        self._has_refused_key = False
        self._models_due_at = float("-inf")
        self.base_models: tuple[ModelId, ...] = ()  # as last listed, without adapters
        self.routes = ModelRoutes()
        self._asking: asyncio.Task[None] | None = None  # about optional paths
        self._on_demand = False  # it may have to load a model that is asked for
        self._tells_loaded = LoadedPages(self._get_quietly)
        self._doubted: set[str] = set()  # a request was answered as if it had not the path
        self._confirmed_at: dict[str, float] = {}  # but it has
        self.last_content_at = float(
            "-inf"
        )  # when a good response last brought content; relays write it
        self.client_errors = 0  # of the last requests, one after the other; relays write it
        self.ends = PromisedEnds(known=kind.ends_streams)
        self.held: set[str] = set()  # inboxes of paused responses; relays write it
        self.api = HttpClient(api_url, key)
        self._served = ServedModels(self._listed_models)
        self._page: HttpClient | None = None
        one_server = kind.has_metrics and origin(metrics_url) == origin(api_url)
        if kind.has_metrics:
            self._page = HttpClient(metrics_url, key if one_server else None)
        self._pages = EnginePages(has_metrics=kind.has_metrics, one_server=one_server)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self.api.close()
        if self._page is not None:
            self._page.close()

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
        headers, body = self.addressed(*_smallest_request(path, model))
        try:
            status, _ = await exchange(self.api, "POST", path, timeout_s, body, headers)
        except (OSError, HttpBroken, UnexpectedAnswer):
            return False
        if status in SUCCESS:
            self._pages.proved(self._clock())
            return True
        return not self._pages.shows_numbers and status < STATUS_SERVER_ERROR

    def addressed(
        self, headers: Mapping[str, str], body: bytes, adapter: ModelId | None = None
    ) -> tuple[Mapping[str, str], bytes]:
        """A request with what names its rank and, where its model alone does not, its adapter."""
        kind = self._kind
        if self._rank is not None and kind.rank_header:
            headers = {**headers, kind.rank_header: str(self._rank)}
        if self._rank is not None and kind.rank_field:
            body = with_own_field(body, kind.rank_field, self._rank)
        if adapter is not None and kind.adapter_field:
            body = with_own_field(body, kind.adapter_field, adapter)
        return headers, body

    def refresh_models(self) -> None:
        """Read the models with the next scrape."""
        self._models_due_at = float("-inf")

    def lacks(self, path: str) -> bool:
        """It answered a request on that optional path as one that it doesn't know: whether it does
        is found out at once, as one request's answer must not decide that for all.

        False where that was found out a short while ago: the answer is about the request itself;
        and where the answer itself has to tell (`answered`).
        """
        if self._clock() - self._confirmed_at.get(path, float("-inf")) < CONFIRMED_S:
            return False
        if self.routes.learns(path):
            return False
        self.routes.ask_again(path)
        self._doubted.add(path)
        self.refresh_models()
        return True

    def answered(self, model: ModelId, path: str, status: int, body: bytes) -> None:
        """It answered a client's request on an optional path, well or as one that it doesn't know;
        `body`: as far as it came."""
        if not self.routes.learns(path):
            return
        has = status in SUCCESS
        if not has and is_about_model(body):
            return
        if self.routes.answered(model, path, has=has, now=self._clock()):
            self.refresh_models()
            if not has:
                log.info("%s answers %d for %s on %s", self.api.url, status, model, path)

    @property
    def paths_to_try(self) -> bool:
        """Whether the next scrape may find out about more optional paths."""
        if not self._finds_paths:
            return False
        return bool(self._is_asking or self.routes.to_ask(self._clock()))

    @property
    def paths_unknown(self) -> tuple[str, ...]:
        """Optional paths of which it is not known whether the engine answers them."""
        return tuple(self.routes.unasked)

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
            is_due and (not self._given_models or self._asks_health),
            known.fault if isinstance(known, FailedRead) else None,
            asks_page and (reading is not None),
            self._fault(reading),
        )
        verdict = self._pages.looked(look, self._clock())
        if verdict is Verdict.UP:
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
                paths, routes = await self._paths(known.base or models, known.cards, states)
            told = known.adapters, routes, states, self._pages.seen, self._tells_loaded.is_unknown
            rest = self.last_content_at, frozenset(self.held), *told
            return EngineScraped(began_at, reading, models, known.cards, paths, *rest)
        self.refresh_models()  # what comes back may be another engine
        if verdict is Verdict.FAILED:
            self._settings_due_at, self._batch_max, self.version = float("-inf"), None, None
            self.left_out = NO_USAGE
            self._confirmed_at.clear()
            if self._pages.was_away:  # a single scrape may fail because it is busy
                self.ends.restarted()
                self.routes.restarted()  # until they are told it is taken for the same
                self._tells_loaded.restarted()
        return ScrapeFailed(
            began_at=began_at,
            last_content_at=self.last_content_at,
            timed_out=all(each.fault.kind is FaultKind.TIMED_OUT for each in problems),
            detail=problems[0].detail,
            is_up=verdict is Verdict.WAIT,
            wants_proof=self._pages.seen.wants_proof,
        )

    async def _looked(
        self, *, is_due: bool, asks_page: bool
    ) -> tuple["ListedModels | FailedRead", EngineReading | FailedRead | None]:
        """Its models, where they are due, and the page of metrics, unless no answer came at all."""
        if is_due and asks_page and self._pages.is_doubted:
            return await asyncio.gather(self._tried(self._models()), self._tried(self._reading()))
        known = await self._tried(self._models()) if is_due else NOT_READ
        is_silent = isinstance(known, FailedRead) and known.fault.kind in SILENT
        if not asks_page or is_silent:
            return known, None
        return known, await self._tried(self._reading())

    async def _tried(self, reading: Awaitable[T]) -> T | FailedRead:
        """What was read, or why it could not be."""
        try:
            return await reading
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
        if self._given_models:  # what the engine calls them is not known
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
        return not self._pages.shows_numbers or self._pages.is_doubted

    async def _models(self) -> "ListedModels":
        if not self._given_models:
            began_at = time.monotonic()
            page = await self._get(self.api, MODELS_PATH)
            known = served(page, self.api.url + MODELS_PATH)
            self._served.were_read(began_at, known.names)
        else:
            known = ListedModels(self._given_models, NO_CARDS)
            if self._asks_health:
                await self._get(self.api, HEALTH_PATH, is_health=True)
        self._models_due_at = self._clock() + MODELS_EVERY_S
        self.base_models = known.base
        return known

    async def _paths(
        self, models: tuple[ModelId, ...], cards: Mapping[ModelId, ModelCard], states: States
    ) -> tuple[tuple[str, ...], KnownRoutes | None]:
        """The optional paths that it answers, and what else is known of them.

        Lists of routes, where engines have them, name what the server knows and not what its model
        can do. The scrape waits for answers as for its pages; later ones count at the next.
        """
        if not self._finds_paths:
            return self._listed, None
        now = self._clock()
        if models != self.routes.names:
            self._confirmed_at.clear()
        self._on_demand = loads_on_demand(models, cards, states)
        self.routes.listed(models, on_demand=self._on_demand, now=now)
        may_ask = not (self._is_asking or self._tells_loaded.is_unknown)
        if may_ask and (paths := self.routes.to_ask(now)):
            model = None if self._on_demand else models[0]
            self._asking = asyncio.create_task(self._ask(paths, model))
            await asyncio.wait([self._asking], timeout=self._scrape_timeout_s)
        return (*self.routes.paths, *self._listed), self.routes.known()

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None and not self._asking.done()

    async def _ask(self, paths: list[str], model: ModelId | None) -> None:
        """Find out about these paths, one after the other, as long as it has the same models."""
        generation = self.routes.generation
        for path in paths:
            status = await self._status_of(path, model)
            if generation != self.routes.generation:
                return
            if status is None:  # it has other troubles
                if self.routes.told_nothing(path, self._clock()):
                    log.warning(GIVEN_UP, self.api.url, path)
                continue
            has = status in SUCCESS or (model is None and status not in PATH_UNKNOWN)
            self.routes.told(path, has=has)
            if path in self._doubted and has:
                self._confirmed_at[path] = self._clock()
            self._doubted.discard(path)

    async def _status_of(self, path: str, model: ModelId | None) -> int | None:
        """What it answers to a tiny request for that model on that path, or to one without a body;
        None where that says nothing about the path."""
        headers, body = _without_body(path) if model is None else _smallest_request(path, model)
        try:
            status, page = await exchange(self.api, "POST", path, PATIENCE_S, body, headers)
        except (OSError, HttpBroken, UnexpectedAnswer):  # a timeout too
            return None
        self.failed_paths.pop(path, None)
        if status >= STATUS_SERVER_ERROR and status != STATUS_NOT_IMPLEMENTED:
            self.failed_paths[path] = status
        if model is None:
            is_told = status < STATUS_SERVER_ERROR or status == STATUS_NOT_IMPLEMENTED
            is_told = is_told and status not in (STATUS_UNAUTHORIZED, STATUS_BUSY)
            return None if not is_told else 400 if is_about_model(page) else status
        return status if status in SUCCESS or status in NOT_THIS_PATH else None

    async def _get_quietly(self, path: str) -> bytes | None:
        """A page that it may have; empty if it hasn't, None if that isn't known."""
        try:
            status, page = await exchange(self.api, "GET", path, self._scrape_timeout_s)
        except (OSError, HttpBroken, UnexpectedAnswer):
            return None
        return page if status == STATUS_OK else b"" if status in PATH_UNKNOWN else None

    async def _reading(self) -> EngineReading:
        if self._page is None or self._kind.read is None:
            return NOTHING_KNOWN
        page = await self._get(self._page, "")
        only = None if self._rank is None else (self._kind.rank_label, str(self._rank))
        reading = self._kind.read(MetricsPage(page.decode("utf-8", "replace"), only))
        self._log_rank(has_rank=reading != NOTHING_KNOWN)
        if self._clock() >= self._settings_due_at:
            await self._read_settings()
        return reading if self._batch_max is None else replace(reading, batch_max=self._batch_max)

    def _log_rank(self, *, has_rank: bool) -> None:
        if self._rank is not None and has_rank is not self._has_rank and not has_rank:
            text = 'no series with %s="%d" on the metrics page: its load is unknown; see that the '
            text += "engine has that data-parallel rank (--data-parallel-rank)"
            log.warning(text, self._kind.rank_label, self._rank)
        self._has_rank = has_rank

    async def _read_settings(self) -> None:
        """Its batch size and version, in the time of one page. What they don't show is kept."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._scrape_timeout_s):
                for path in self._kind.settings_paths:
                    with contextlib.suppress(OSError, HttpBroken, UnexpectedAnswer):
                        self._take_settings(await self._get(self.api, path))
                        break
        is_known = self.version is not None and not self._reads_batch_max
        again_s = float("inf") if is_known else SETTINGS_EVERY_S
        self._settings_due_at = self._clock() + again_s

    def _take_settings(self, page: bytes) -> None:
        self.version = self._kind.version(page) or self.version
        self.left_out = NONE_CACHED if self._kind.reports_cached(page) else NO_USAGE
        if self._reads_batch_max:
            self._batch_max = self._kind.batch_max(page, self._rank) or self._batch_max

    async def _get(self, client: HttpClient, path: str, *, is_health: bool = False) -> bytes:
        status, page = await exchange(client, "GET", path, self._scrape_timeout_s)
        url = client.url + path
        if status == STATUS_UNAUTHORIZED:
            raise UnexpectedStatus(f"{url} {KEY_REQUIRED}", status)
        # A server without /health answers 404, which shows that it runs.
        if status >= STATUS_SERVER_ERROR if is_health else status != STATUS_OK:
            raise UnexpectedStatus(f"{url} answers HTTP {status}", status)
        return page


async def fetched(url: str, path: str, key: str | None, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of one short page. Raises OSError (TimeoutError among them), HttpBroken and
    UnexpectedAnswer."""
    client = HttpClient(url, key)
    try:
        return await exchange(client, "GET", path, timeout_s)
    finally:
        client.close()


def _smallest_request(path: str, model: ModelId) -> tuple[dict[str, str], bytes]:
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


async def exchange(
    client: HttpClient,
    method: str,
    path: str,
    timeout_s: float,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Status and body of a short response, of PAGE_BYTES_MAX at most. A body without headers is
    JSON."""
    if headers is None:
        headers = JSON_BODY if body else NO_HEADERS
    page = bytearray()
    async with asyncio.timeout(timeout_s):
        response = await client.request(method, path, headers, body)
        try:
            status = (await response.head()).status
            while chunk := await response.read():
                page += chunk
                if len(page) > PAGE_BYTES_MAX:
                    url = client.url + path
                    raise UnexpectedAnswer(f"{url} sends more than {PAGE_BYTES_MAX} bytes")
        finally:
            client.release(response)
    return status, bytes(page)


class ListedModels(NamedTuple):
    """What it lists. `cards`: of the first names; `adapters`: of all, those with a parent."""

    names: tuple[ModelId, ...]
    cards: dict[ModelId, ModelCard]
    adapters: frozenset[ModelId] = frozenset()
    states: States = NO_STATES  # of those of which it says whether they are loaded
    aliases: Mapping[ModelId, ModelId] = NO_ALIASES  # of its names: each with the model

    @property
    def base(self) -> tuple[ModelId, ...]:
        """The names that are no adapters, which come and go."""
        return tuple(name for name in self.names if name not in self.adapters)


NOT_READ = ListedModels((), NO_CARDS)


def served(data: bytes, url: str) -> ListedModels:
    """The models in a response of `/v1/models`. Raises UnexpectedAnswer if it has none."""
    try:
        listed = orjson.loads(data)["data"] if data.strip() else None
        rows = [row for row in listed or () if _is_model(row["id"])]
    except (ValueError, TypeError, KeyError) as error:
        raise UnexpectedAnswer(f"{url} is no list of models") from error
    if not rows:
        raise ListsNoModel(f"{url} lists no model: pull one, or give --model NAME")
    cards = {ModelId(row["id"]): _card(row) for row in rows[:CARDS_MAX]}
    filled = {model: card for model, card in cards.items() if card != ModelCard()}
    rows = rows[:MODELS_MAX]
    adapters = frozenset(ModelId(row["id"]) for row in rows if row.get("parent") is not None)
    told = ((ModelId(row["id"]), state_of(row.get("status"))) for row in rows)
    states = {name: state for name, state in told if state is not None}
    names = tuple(ModelId(row["id"]) for row in rows)
    aliases = dict(islice(_aliases(rows, names), MODELS_MAX - len(names)))
    states |= {alias: states[of] for alias, of in aliases.items() if of in states}
    for alias, of in islice(aliases.items(), CARDS_MAX - len(cards)):
        card = cards[of] if of in cards else ModelCard()
        filled[alias] = replace(card, root=card.root or of)  # they are one model
    return ListedModels((*names, *aliases), filled, adapters, states, aliases)


def _aliases(
    rows: list[dict[str, Any]], names: tuple[ModelId, ...]
) -> Iterator[tuple[ModelId, ModelId]]:
    """Other names that the engine takes for its models: Ollama's without `:latest`, and those that
    llama-swap names beside them."""
    seen = set(names)
    for row, name in zip(rows, names, strict=True):
        other = [name.removesuffix(LATEST)] if name.endswith(LATEST) else []
        meta = row.get("meta")
        swap = meta.get("llamaswap") if isinstance(meta, dict) else None
        more = swap.get("aliases") if isinstance(swap, dict) else None
        for alias in (*other, *(more if isinstance(more, list) else ())):
            if _is_model(alias) and alias not in seen:
                seen.add(alias)
                yield ModelId(alias), name


def _card(row: Mapping[str, object]) -> ModelCard:
    return ModelCard(
        created=_count(row.get("created")),
        owned_by=_text(row.get("owned_by")),
        root=_text(row.get("root")),
        parent=_text(row.get("parent")),
        max_model_len=_count(row.get("max_model_len")),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= CARD_CHARS_MAX else None


def _is_model(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MODEL_CHARS_MAX
