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
from schemas.http import CHAT
from schemas.ids import MODEL_CHARS_MAX, ModelId

LOOK_TIMEOUT_S = 1.0
MODELS_EVERY_S = 1.0
MODELS_MAX = 128  # with names of MODEL_CHARS_MAX they still fit a heartbeat
PAGE_BYTES_MAX = 8 * 1024 * 1024
MODELS_PATH = "/v1/models"
STATUS_OK = 200
STATUS_SERVER_ERROR = 500


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
        self.held = 0  # answers that are not read further for now; relays count them
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

    async def probe(self, path: str, model: ModelId, timeout_s: float) -> bool:
        """Ask for one token. Whether any answer came in time that is no server error."""
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
        return status < STATUS_SERVER_ERROR

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
            models = await self._models() if began_at >= self._models_due_at else None
            reading = await self._reading()
            return EngineRead(began_at, reading, models, self.heard_at, self.held)
        except TimeoutError:
            timed_out, detail = True, f"no answer within {self._look_timeout_s:g} s"
        except (OSError, HttpBroken, EngineOdd) as problem:
            detail = str(problem) or type(problem).__name__
        self.want_models()  # what comes back may be another engine
        return EngineFailed(
            began_at=began_at, heard_at=self.heard_at, timed_out=timed_out, detail=detail
        )

    async def _models(self) -> tuple[ModelId, ...]:
        page = await self._get(self._api, MODELS_PATH)
        models = model_ids(page, self._api.url + MODELS_PATH)
        self._models_due_at = self._clock() + MODELS_EVERY_S
        return models

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


def _is_model(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MODEL_CHARS_MAX
