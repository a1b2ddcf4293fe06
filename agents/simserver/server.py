"""The HTTP face of a simulated engine: OpenAI's paths, health, metrics and fault switches.

aiohttp cancels a handler when its client hangs up; the `finally` that closes the stream is
then what aborts the request in the engine.
"""

import asyncio
import logging
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import orjson
from aiohttp import web

from agents.sim.adapters import LoadedAdapters
from agents.sim.engine import EngineSim
from agents.sim.events import NeverFits, QueueFull
from agents.sim.kv_cache import block_keys
from agents.sim.profiles import Profile
from agents.sim.text import TOKEN_BYTES, count
from agents.simserver.adapters import AdapterRoutes
from agents.simserver.audio import transcribe
from agents.simserver.driver import Driver, TokenStream
from agents.simserver.embeddings import embeddings
from agents.simserver.faults import Faults, FaultsInvalid, FaultSwitchboard, Hang
from agents.simserver.kv_events import KvEventPublisher
from agents.simserver.kv_transfer import KvPeer, KvSettings
from agents.simserver.messages import MessageRenderer, count_tokens, error_body, read_messages
from agents.simserver.metrics import CONTENT_TYPE, PAGES, Meters, PageFacts, PageKind
from agents.simserver.openai_responses import KeptResponses, ResponseRenderer
from agents.simserver.prompt_work import (
    RENDER,
    PromptWork,
    detokenize,
    render,
    rerank,
    score,
    tokenize,
)
from agents.simserver.requests import ApiError, GenerationRequest, RequestParser, invalid
from agents.simserver.responses import EventRenderer, SseRenderer, json_response, send_stream
from infra.address import Address
from infra.process import LimitedLog, end_all
from schemas.engine_routes import TRANSCRIPTIONS, TRANSLATIONS
from schemas.http import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
)
from schemas.ids import is_request_id

logger = logging.getLogger(__name__)

CLIENT_LEFT = "%s: its client left before the end of the answer"

BODY_BYTES_MAX = 32 * 1024 * 1024
CRASH_EXIT_CODE = 70
# Tokens that came out just before a crash get this long to leave the process.
_CRASH_DELAY_S = 0.005

GENERATION: Mapping[str, Callable[[RequestParser, bytes], GenerationRequest]] = {
    CHAT: RequestParser.chat,
    COMPLETIONS: RequestParser.completion,
    MESSAGES: read_messages,
}
PROMPT_WORK: Mapping[str, Callable[[RequestParser, bytes], PromptWork]] = {
    EMBEDDINGS: embeddings,
    COUNT_TOKENS: count_tokens,
    RERANK: rerank,
    SCORE: score,
    TOKENIZE: tokenize,
    DETOKENIZE: detokenize,
    RENDER: render,
}
RouteHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulated engine. None takes the profile's own value."""

    models: tuple[str, ...]
    profile: Profile
    time_scale: float = 1.0
    kv_tokens: int | None = None
    max_seqs: int | None = None
    max_model_len: int | None = None
    metrics: PageKind = PageKind.VLLM
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    kv_events: str | None = None  # where it publishes them, and repeats them
    kv_events_replay: str | None = None
    adapters_max: int = 0  # LoRA adapters at once; 0: it takes none
    adapter_load_s: float = 1.0  # of the engine's time
    kv: KvSettings | None = None  # its part in pairs


class SimServer:
    """Routes and handlers around one engine. Make it on the loop that will serve it."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        engine = EngineSim(
            config.profile,
            kv_tokens=config.kv_tokens,
            max_seqs=config.max_seqs,
            watch_tokens=True,
        )
        self._block_bytes = engine.block_tokens * TOKEN_BYTES
        adapters = LoadedAdapters(config.adapters_max)
        self._parser = RequestParser(
            models=config.models,
            max_model_len=min(config.max_model_len or 10**9, engine.capacity_tokens),
            seed=config.seed,
            adapters=adapters.paths,
        )
        self._started_at = time.time()
        self._facts = PageFacts(config.models[0], engine.block_tokens, self._started_at)
        self._nonce = secrets.token_hex(4)
        self._meters = Meters()
        self._responses = KeptResponses()
        self._faults = FaultSwitchboard(config.faults, random.Random(config.seed))
        load_s = config.adapter_load_s / config.time_scale
        self._adapters = AdapterRoutes(adapters, load_s, self._faults)
        self._kv_events = None
        if config.kv_events is not None:
            replay = config.kv_events_replay
            self._kv_events = KvEventPublisher(config.kv_events, replay, engine.block_tokens)
            engine.cache.watchers.append(self._kv_events)
        flush = (lambda: None) if self._kv_events is None else self._kv_events.flush
        tokens = self._count_tokens
        self._driver = Driver(engine, self._meters, config.time_scale, tokens, flush)
        kv, scale = config.kv, config.time_scale
        self._kv = None if kv is None else KvPeer(kv, self._driver, scale)
        self._thawed = asyncio.Event()
        self._log = LimitedLog(logger)
        self._apply_faults()

    def app(self) -> web.Application:
        """The application; run it with `handler_cancellation`, or hang-ups go unnoticed."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._shape_errors])
        if self._kv_events is not None:
            app.cleanup_ctx.append(self._publish_kv_events)
        if self._kv is not None:
            app.cleanup_ctx.append(self._kv.closing)
            app.add_routes(self._kv.routes())
        app.add_routes(
            [
                *(web.post(path, self._generate) for path in (*GENERATION, RESPONSES)),
                *self._responses.routes(),
                *(web.post(path, self._prompt_work) for path in PROMPT_WORK),
                *(web.post(path, self._prompt_work) for path in (TRANSCRIPTIONS, TRANSLATIONS)),
                *self._adapters.routes(),
                web.post("/echo", self._echo),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/sim/faults", self._show_faults),
                web.post("/sim/faults", self._set_faults),
                web.delete("/sim/faults", self._heal),
            ]
        )
        return app

    async def _publish_kv_events(self, app: web.Application) -> AsyncIterator[None]:
        assert self._kv_events is not None
        answering = asyncio.create_task(self._kv_events.answer_replays())
        yield
        await end_all([answering])
        self._kv_events.close()

    @web.middleware
    async def _shape_errors(
        self, request: web.Request, handler: RouteHandler
    ) -> web.StreamResponse:
        if not request.path.startswith("/sim/"):
            await self._thawed.wait()
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = ApiError(413, f"the body exceeds the limit of {BODY_BYTES_MAX} bytes")
        except web.HTTPException as error:
            refusal = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        is_anthropic = request.path.startswith(MESSAGES)
        body = error_body(refusal.status, refusal.message) if is_anthropic else refusal.body()
        return web.Response(status=refusal.status, body=body, content_type="application/json")

    async def _prompt_work(self, request: web.Request) -> web.StreamResponse:
        self._maybe_fail()
        if (read := PROMPT_WORK.get(request.path)) is not None:
            asked = read(self._parser, await request.read())
        else:
            asked = await transcribe(self._parser, request)
        await self._compute(asked.inputs)
        return web.Response(body=asked.body, content_type=asked.content_type)

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        """A route that no table knows: what an engine gets of a request, for tests."""
        body = await request.read()
        headers = {str(name).lower(): text for name, text in request.headers.items()}
        return json_response({"headers": headers, "body_sha256": sha256(body).hexdigest()})

    async def _compute(self, inputs: Collection[bytes]) -> None:
        """Return when all these prompts are computed."""
        streams: list[TokenStream] = []
        ended = "abort"
        try:
            opens = (partial(self._driver.open_prompt, count(each)) for each in inputs)
            streams.extend(map(self._opened, opens))  # those before one that fails, too
            for stream in streams:
                await stream.wait(0)
            ended = "stop"
        finally:
            for stream in streams:
                self._driver.close(stream)
            self._meters.ended[ended] += len(inputs)

    def _maybe_fail(self) -> None:
        if self._faults.request_fails():
            raise ApiError(self._faults.now.error_status, "a fault switch made this request fail")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._maybe_fail()
        raw, name = await request.read(), ""
        if request.path == RESPONSES:
            own_id = f"resp_{self._nonce}{secrets.token_hex(8)}"
            name, job = self._responses.read(self._parser, raw, own_id)
        else:
            job = GENERATION[request.path](self._parser, raw)
        kv = self._kv
        params = {} if kv is None else kv.read(raw)
        if kv is not None and kv.is_prefill:
            return await self._prefill(request, job, kv, params)
        if kv is not None:
            await kv.fetch(params, self._keys(job), job.prompt_tokens)
        stream = self._submit(job)
        attempt = f"{self._nonce}-{stream.id:x}"
        answer = self._renderer(request, job, attempt, name)
        ended = "abort"
        try:
            if job.stream:
                response = await send_stream(request, stream, answer, self._faults)
            else:
                await stream.wait(0)
                body = answer.whole(stream.cached_tokens)
                response = web.Response(body=body, content_type="application/json")
            ended = job.answer.finish_reason
            return response
        except ConnectionResetError:  # its end came between two writes
            self._log.warning("client", "left", CLIENT_LEFT, attempt)
            return web.Response()  # to nobody
        except asyncio.CancelledError:
            if request.transport is None:  # else this process ends
                self._log.warning("client", "left", CLIENT_LEFT, attempt)
            raise
        finally:
            self._driver.close(stream)
            self._meters.ended[ended] += 1

    async def _prefill(
        self, request: web.Request, job: GenerationRequest, kv: KvPeer, params: Mapping[str, Any]
    ) -> web.Response:
        """Compute the prompt and one token, and keep its KV cache for a decode engine."""
        stream = self._submit(replace(job, stream=False), output_tokens=1)
        ended = "abort"
        try:
            await stream.wait(0)
            host, port = request.get_extra_info("sockname")[:2]
            here, tokens = Address(host, port), job.prompt_tokens
            handed_out = await kv.handed_out(params, self._keys(job), tokens, here)
            answer = self._renderer(request, job, f"{self._nonce}-{stream.id:x}", "")
            body = orjson.loads(answer.whole(stream.cached_tokens))
            ended = "length"
            return json_response(body | {"kv_transfer_params": handed_out})
        finally:
            self._driver.close(stream)
            self._meters.ended[ended] += 1

    def _renderer(
        self, request: web.Request, job: GenerationRequest, attempt: str, name: str
    ) -> EventRenderer:
        """What writes the answer to a request, by its path; `name`: of a response."""
        given = request.headers.get("x-request-id", "")
        own = given if is_request_id(given) else attempt
        if request.path == MESSAGES:
            return MessageRenderer(job, f"msg_{own}", attempt)
        if request.path == RESPONSES:
            completed = self._responses.completed
            return ResponseRenderer(job, name, int(time.time()), attempt, completed)
        response_id = f"chatcmpl-{own}" if job.chat else f"cmpl-{own}"
        return SseRenderer(job, response_id, int(time.time()), attempt)

    def _keys(self, job: GenerationRequest) -> list[int]:
        return block_keys(job.sequence(), self._block_bytes)

    def _submit(self, job: GenerationRequest, output_tokens: int | None = None) -> TokenStream:
        sequence = job.sequence()
        keys = block_keys(sequence, self._block_bytes, job.adapter)
        if self._kv_events is not None:
            self._kv_events.learn(keys, sequence, job.adapter)
        tokens = job.prompt_tokens, output_tokens or job.answer.tokens
        return self._opened(partial(self._driver.open, *tokens, keys, whole=not job.stream))

    def _opened(self, opens: Callable[[], TokenStream]) -> TokenStream:
        try:
            return opens()
        except NeverFits as error:
            raise invalid(str(error), "messages", "context_length_exceeded") from None
        except QueueFull as error:
            raise ApiError(503, f"{error}: try again later", code="queue_full") from None

    async def _models(self, request: web.Request) -> web.Response:
        return json_response(
            {
                "object": "list",
                "data": [
                    {
                        "id": model,
                        "object": "model",
                        "created": int(self._started_at),
                        "owned_by": "engine-sim",
                        "max_model_len": self._parser.max_model_len,
                    }
                    for model in self._config.models
                ]
                + self._adapters.rows(self._config.models[0]),
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return json_response({"version": "simulated"})

    async def _metrics(self, request: web.Request) -> web.Response:
        write = PAGES.get(self._config.metrics)
        if write is None:
            raise web.HTTPNotFound(reason="this engine shows no metrics (--metrics none)")
        now = asyncio.get_running_loop().time()
        page = write(self._driver.stats(), self._meters, self._facts, now)
        return web.Response(body=page.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _show_faults(self, request: web.Request) -> web.Response:
        return json_response(self._faults.now.model_dump(mode="json"))

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            changes = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise invalid(f"the body is not JSON: {error}") from None
        if not isinstance(changes, dict):
            raise invalid("the body must be a JSON object of fault switches")
        try:
            self._faults.set(self._faults.now.changed(changes))
        except FaultsInvalid as error:
            raise invalid(str(error)) from None
        self._apply_faults()
        return await self._show_faults(request)

    async def _heal(self, request: web.Request) -> web.Response:
        self._faults.set(Faults())
        self._apply_faults()
        return await self._show_faults(request)

    def _apply_faults(self) -> None:
        if self._faults.now.hang is Hang.SERVER:
            self._thawed.clear()
        else:
            self._thawed.set()
        self._driver.set_slowdown(self._faults.slowdown)
        self._count_tokens(0)

    def _count_tokens(self, tokens: int) -> None:
        if self._faults.crash_is_due(tokens):
            logger.error("crash: a fault switch ends this process")
            asyncio.get_running_loop().call_later(_CRASH_DELAY_S, os._exit, CRASH_EXIT_CODE)
