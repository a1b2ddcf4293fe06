"""The engine beside this agent, over HTTP: its models, its metrics, its answers.

One session for everything, with connections kept for less time than engines keep them: uvicorn,
under vLLM and SGLang, closes an idle one after 5 s, and a POST that meets the closing can't be
told from an engine that died.
"""

import io
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from agents.adapters.kinds import EngineKind
from agents.adapters.page import Page
from agents.core.events import EngineFailed, EngineRead
from agents.core.reading import NOTHING_KNOWN, EngineReading
from schemas.ids import MODEL_CHARS_MAX, ModelId

KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 1.0
MODELS_EVERY_S = 1.0
MODELS_MAX = 128  # with names of MODEL_CHARS_MAX they still fit a heartbeat
PAGE_BYTES_MAX = 8 * 1024 * 1024
WHOLE_BYTES_MAX = 512 * 1024
READ_BUFFER_BYTES = 32 * 1024  # aiohttp stops reading the socket at twice this

_AUTOMATIC = ("Accept-Encoding", "User-Agent")  # answers must pass as they come: uncompressed


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
        self._api_url = api_url
        self._metrics_url = metrics_url
        self._kind = kind
        self._clock = clock
        self._look_timeout = aiohttp.ClientTimeout(total=look_timeout_s)
        self._models_due_at = float("-inf")
        self.heard_at = float("-inf")  # when an answer last brought a byte; relays write it
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),  # requests of many people share this session
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def close(self) -> None:
        await self._http.close()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """An async context manager with the engine's response; its body is not read yet."""
        # aiohttp warns of large bytes, which it would write in one go; it streams a file in pieces.
        data = body if len(body) <= WHOLE_BYTES_MAX else io.BytesIO(body)
        return self._http.post(
            self._api_url + path, data=data, headers=headers, allow_redirects=False
        )

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
            return EngineRead(began_at, await self._reading(), models)
        except TimeoutError:
            timed_out, detail = True, f"no answer within {self._look_timeout.total:g} s"
        except (aiohttp.ClientError, OSError, EngineOdd) as problem:
            detail = str(problem) or type(problem).__name__
        self.want_models()  # what comes back may be another engine
        return EngineFailed(
            began_at=began_at, heard_at=self.heard_at, timed_out=timed_out, detail=detail
        )

    async def _models(self) -> tuple[ModelId, ...]:
        url = self._api_url + "/v1/models"
        models = model_ids(await self._get(url), url)
        self._models_due_at = self._clock() + MODELS_EVERY_S
        return models

    async def _reading(self) -> EngineReading:
        if not self._kind.has_metrics:
            return NOTHING_KNOWN
        page = await self._get(self._metrics_url)
        return self._kind.read(Page(page.decode("utf-8", "replace")))

    async def _get(self, url: str) -> bytes:
        async with self._http.get(
            url, timeout=self._look_timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise EngineOdd(f"{url} answers HTTP {response.status}")
            page = bytearray()
            while chunk := await response.content.readany():
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
