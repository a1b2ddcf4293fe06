"""The engine beside this agent, over HTTP: its models, its metrics, its answers.

Connections are kept for less time than engines keep them: uvicorn, under vLLM and SGLang, closes
an idle one after 5 s, and a POST that meets the closing can't be told from an engine that died.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import orjson

from agents.adapters.http_client import HttpClient, origin
from agents.adapters.http_connection import Connection, HttpBroken, HttpLost
from agents.adapters.kinds import EngineKind
from agents.adapters.page import Page
from agents.config import MODELS_MAX
from agents.core.events import EngineFailed, EngineRead
from agents.core.reading import NOTHING_KNOWN, EngineReading
from schemas.http import CHAT
from schemas.ids import MODEL_CHARS_MAX, ModelId
from schemas.state import CARD_CHARS_MAX, CARDS_MAX, ModelCard

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 1.0
MODELS_EVERY_S = 1.0
PAGE_BYTES_MAX = 8 * 1024 * 1024
MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
SETTINGS_EVERY_S = 30.0  # a question of SGLang's settings reaches its scheduler
STATUS_OK, STATUS_REDIRECTION, STATUS_UNAUTHORIZED, STATUS_SERVER_ERROR = 200, 300, 401, 500
NO_CARDS: dict[ModelId, ModelCard] = {}
KEY_WANTED = "answers HTTP 401: it wants an API key, or another one (--engine-key-file)"


def is_good(status: int) -> bool:
    """Whether an HTTP status is that of an answer, and not of an error."""
    return STATUS_OK <= status < STATUS_REDIRECTION


class EngineOdd(ValueError):
    """The engine answered something that it should not; the message says what."""


class Engine:
    """Looks at one engine, and opens answers on it. Close it at the end."""

    def __init__(
        self,
        *,
        api_url: str,
        metrics_url: str,
        kind: EngineKind,
        clock: Callable[[], float],
        look_timeout_s: float = LOOK_TIMEOUT_S,
        key: str | None = None,
        models: tuple[ModelId, ...] = (),
        asks_batch_max: bool = True,
    ) -> None:
        """`models`: what the operator says that it serves; it is not asked for them then.

        `key`: the engine's API key, sent to its own origin alone. `asks_batch_max`: read the size
        of its batch where it shows that; not where the operator has said it.
        """
        self._kind = kind
        self._given_models = models
        self._settings_paths = kind.settings_paths if asks_batch_max else ()
        self._settings_due_at = float("-inf")
        self._batch_max: int | None = None
        self._clock = clock
        self._look_timeout_s = look_timeout_s
        self._has_refused_key = False
        self._models_due_at = float("-inf")
        self.heard_at = float("-inf")  # when a good answer last brought a byte; relays write it
        self.held: set[str] = set()  # inboxes of answers not read further for now; of relays
        self._api = HttpClient(api_url, clock, key)
        self._page: HttpClient | None = None
        if kind.has_metrics:
            page_key = key if origin(metrics_url) == origin(api_url) else None
            self._page = HttpClient(metrics_url, clock, page_key)

    def close(self) -> None:
        """Close the connections that no answer uses."""
        self._api.close()
        if self._page is not None:
            self._page.close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Connection:
        """The connection on which the engine answers. `release` it. Raises OSError, ValueError."""
        return await self._api.ask("POST", path, headers, body)

    def release(self, answered: Connection) -> None:
        """Nobody reads that answer any more."""
        self._api.release(answered)

    def refused_key(self) -> None:
        """It answered a request with 401. Looks need not show that; it is logged once."""
        if not self._has_refused_key:
            self._has_refused_key = True
            log.warning("%s %s", self._api.url, KEY_WANTED)

    async def probe(self, path: str, model: ModelId, timeout_s: float) -> bool:
        """Ask for one token. Whether an answer came in time by which it computes.

        A refusal (HTTP 4xx) may come from the HTTP server in front of an engine that hangs. It
        counts where no numbers could show that the engine computes.
        """
        text: dict[str, object] = {"prompt": "1"}
        if path == CHAT:
            text = {"messages": [{"role": "user", "content": "1"}]}
        body = orjson.dumps({"model": model, "max_tokens": 1, **text})
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.post(path, body, {"Content-Type": "application/json"})
                try:
                    status = (await answer.until_head()).status
                    while await answer.read():
                        pass
                finally:
                    self.release(answer)
        except (OSError, HttpBroken):
            return False
        return is_good(status) or (self._page is None and status < STATUS_SERVER_ERROR)

    def want_models(self) -> None:
        """Read the models with the next look."""
        self._models_due_at = float("-inf")

    async def look(self) -> EngineRead | EngineFailed:
        """One look at the engine, bounded by the timeout. Never raises for the engine's sins.

        Don't begin a look before the last one has ended.
        """
        began_at = self._clock()
        timed_out = False
        try:
            is_due = began_at >= self._models_due_at
            models, cards = await self._models() if is_due else (None, NO_CARDS)
            reading = await self._reading()
            return EngineRead(began_at, reading, models, cards, self.heard_at, frozenset(self.held))
        except TimeoutError:
            timed_out, detail = True, f"no answer within {self._look_timeout_s:g} s"
        except (OSError, HttpBroken, EngineOdd) as problem:
            detail = str(problem) or type(problem).__name__
        self.want_models()  # what comes back may be another engine
        self._settings_due_at, self._batch_max = float("-inf"), None
        return EngineFailed(
            began_at=began_at, heard_at=self.heard_at, timed_out=timed_out, detail=detail
        )

    async def _models(self) -> tuple[tuple[ModelId, ...], dict[ModelId, ModelCard]]:
        if not self._given_models:
            page = await self._get(self._api, MODELS_PATH)
            known = served(page, self._api.url + MODELS_PATH)
        else:
            known = self._given_models, NO_CARDS
            if self._page is None:  # nothing else shows whether it is there
                await self._get(self._api, HEALTH_PATH, is_health=True)
        self._models_due_at = self._clock() + MODELS_EVERY_S
        return known

    async def _reading(self) -> EngineReading:
        if self._page is None:
            return NOTHING_KNOWN
        page = await self._get(self._page, "")
        reading = self._kind.read(Page(page.decode("utf-8", "replace")))
        if self._clock() >= self._settings_due_at:
            self._batch_max = await self._batch_size() or self._batch_max
            self._settings_due_at = self._clock() + SETTINGS_EVERY_S
        return reading if self._batch_max is None else replace(reading, batch_max=self._batch_max)

    async def _batch_size(self) -> int | None:
        """By its settings; None if it doesn't tell, for whatever reason.

        All of it takes no longer than one page may.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_timeout_s):
                for path in self._settings_paths:
                    with contextlib.suppress(OSError, HttpBroken, EngineOdd):
                        return self._kind.batch_max(await self._get(self._api, path))
        return None

    async def _get(self, client: HttpClient, path: str, *, is_health: bool = False) -> bytes:
        async with asyncio.timeout(self._look_timeout_s):
            while True:
                answer = await client.ask("GET", path, {})
                try:
                    return await _page(answer, client.url + path, is_health=is_health)
                except HttpLost:
                    if not answer.had_closed:  # else it may be asked again: it changes nothing
                        raise
                finally:
                    client.release(answer)


async def _page(answer: Connection, url: str, *, is_health: bool) -> bytes:
    head = await answer.until_head()
    if head.status == STATUS_UNAUTHORIZED:
        raise EngineOdd(f"{url} {KEY_WANTED}")
    # A server without /health answers 404, which shows that it runs.
    if head.status >= STATUS_SERVER_ERROR if is_health else head.status != STATUS_OK:
        raise EngineOdd(f"{url} answers HTTP {head.status}")
    page = bytearray()
    while chunk := await answer.read():
        page += chunk
        if len(page) > PAGE_BYTES_MAX:
            raise EngineOdd(f"{url} sends more than {PAGE_BYTES_MAX} bytes")
    return bytes(page)


def served(data: bytes, url: str) -> tuple[tuple[ModelId, ...], dict[ModelId, ModelCard]]:
    """The names in an answer of `/v1/models`, and what it says of the first of them beside those.

    Raises EngineOdd if it has no name.
    """
    try:
        rows = [row for row in orjson.loads(data)["data"] if _is_model(row["id"])]
    except (ValueError, TypeError, KeyError) as error:
        raise EngineOdd(f"{url} is no list of models") from error
    if not rows:
        raise EngineOdd(f"{url} lists no model")
    cards = {ModelId(row["id"]): _card(row) for row in rows[:CARDS_MAX]}
    told = {model: card for model, card in cards.items() if card != ModelCard()}
    return tuple(ModelId(row["id"]) for row in rows[:MODELS_MAX]), told


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
