"""The engine beside this agent, over HTTP: its models, its metrics, its answers.

Connections are kept for less time than engines keep them: uvicorn, under vLLM and SGLang, closes
an idle one after 5 s, and a POST that meets the closing can't be told from an engine that died.
"""

import asyncio
from collections.abc import Callable, Mapping

import orjson

from agents.adapters.http_client import HttpClient
from agents.adapters.http_connection import Connection, HttpBroken, HttpLost
from agents.adapters.kinds import EngineKind
from agents.adapters.page import Page
from agents.core.events import EngineFailed, EngineRead
from agents.core.reading import NOTHING_KNOWN, EngineReading
from schemas.ids import MODEL_CHARS_MAX, ModelId
from schemas.state import CARD_CHARS_MAX, CARDS_MAX, ModelCard

LOOK_TIMEOUT_S = 1.0
MODELS_EVERY_S = 1.0
MODELS_MAX = 128  # with names of MODEL_CHARS_MAX they still fit a heartbeat
PAGE_BYTES_MAX = 8 * 1024 * 1024
MODELS_PATH = "/v1/models"
STATUS_OK = 200


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
    ) -> None:
        self._kind = kind
        self._clock = clock
        self._look_timeout_s = look_timeout_s
        self._models_due_at = float("-inf")
        self.heard_at = float("-inf")  # when an answer last brought a byte; relays write it
        self._api = HttpClient(api_url, clock)
        self._page = HttpClient(metrics_url, clock) if kind.has_metrics else None

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
            page = await self._models_page() if began_at >= self._models_due_at else None
            if page is None:
                return EngineRead(began_at, await self._reading(), None)
            models = model_ids(page, self._api.url + MODELS_PATH)
            self._models_due_at = self._clock() + MODELS_EVERY_S
            return EngineRead(began_at, await self._reading(), models, model_cards(page))
        except TimeoutError:
            timed_out, detail = True, f"no answer within {self._look_timeout_s:g} s"
        except (OSError, HttpBroken, EngineOdd) as problem:
            detail = str(problem) or type(problem).__name__
        self.want_models()  # what comes back may be another engine
        return EngineFailed(
            began_at=began_at, heard_at=self.heard_at, timed_out=timed_out, detail=detail
        )

    async def _models_page(self) -> bytes:
        return await self._get(self._api, MODELS_PATH)

    async def _reading(self) -> EngineReading:
        if self._page is None:
            return NOTHING_KNOWN
        page = await self._get(self._page, "")
        return self._kind.read(Page(page.decode("utf-8", "replace")))

    async def _get(self, client: HttpClient, path: str) -> bytes:
        async with asyncio.timeout(self._look_timeout_s):
            while True:
                answer = await client.ask("GET", path, {})
                try:
                    return await _page(answer, client.url + path)
                except HttpLost:
                    if not answer.had_closed:  # else it may be asked again: it changes nothing
                        raise
                finally:
                    client.release(answer)


async def _page(answer: Connection, url: str) -> bytes:
    head = await answer.until_head()
    if head.status != STATUS_OK:
        raise EngineOdd(f"{url} answers HTTP {head.status}")
    page = bytearray()
    while chunk := await answer.read():
        page += chunk
        if len(page) > PAGE_BYTES_MAX:
            raise EngineOdd(f"{url} sends more than {PAGE_BYTES_MAX} bytes")
    return bytes(page)


def model_ids(data: bytes, url: str) -> tuple[ModelId, ...]:
    """The names in an answer of `/v1/models`. Raises EngineOdd if it has none."""
    try:
        rows = orjson.loads(data)["data"]
        names = [row["id"] for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise EngineOdd(f"{url} is no list of models") from error
    models = tuple(ModelId(name) for name in names if _is_model(name))[:MODELS_MAX]
    if not models:
        raise EngineOdd(f"{url} lists no model")
    return models


def model_cards(data: bytes) -> dict[ModelId, ModelCard]:
    """What an answer of `/v1/models` that has names says of the first models beside those."""
    rows = [row for row in orjson.loads(data)["data"] if _is_model(row["id"])][:CARDS_MAX]
    cards = {ModelId(row["id"]): _card(row) for row in rows}
    return {model: card for model, card in cards.items() if card != ModelCard()}


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
