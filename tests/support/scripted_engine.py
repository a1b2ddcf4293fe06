"""An OpenAI-speaking HTTP server whose behaviour a test writes: real sockets, no time model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

from schemas.engine_routes import OPTIONAL_PATHS
from tests.support.aborted import abort

Behaviour = Callable[[web.Request, dict], Awaitable[web.StreamResponse]]

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{model}"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{model}"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="{model}"}} {kv}
"""


COMPUTED = """# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{model_name="{model}"}} {computed}
"""


class ScriptedEngine:
    """Answers as `behaviour` says; `waiting` and `running` are what its metrics page claims."""

    def __init__(self, model: str = "tiny") -> None:
        self.model = model
        self.card: dict[str, object] = {}  # what its list of models says beside the name
        self.waiting, self.running, self.kv = 0, 0, 0.0
        self.computed: Callable[[], int] | None = None  # tokens of prompts, where its page counts
        self.behaviour: Behaviour = say("hello")
        self.embeddings: Behaviour | None = None  # of that path; without it there is none
        self.on_path: dict[str, Behaviour] = {}  # of other optional paths
        self.page_status: dict[str, int] = {}  # of pages that fail, by path
        self.seen: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = asyncio.Event()
        self.arrived = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/{path:.+}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Closes every connection at once, as a process that dies does."""
        if self._runner is not None:
            await abort(self._runner)
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        if (status := self.page_status.get(request.path)) is not None:
            return web.Response(status=status)
        return web.json_response({"object": "list", "data": [{"id": self.model, **self.card}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if (status := self.page_status.get(request.path)) is not None:
            return web.Response(status=status)
        numbers = {"running": self.running, "waiting": self.waiting, "kv": self.kv}
        text = METRICS.format(model=self.model, **numbers)
        if self.computed is not None:
            text += COMPUTED.format(model=self.model, computed=self.computed())
        return web.Response(text=text)

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        if self.embeddings is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await self.embeddings(request, orjson.loads(await request.read()))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in OPTIONAL_PATHS and request.path not in self.on_path:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = orjson.loads(await request.read())
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        self.arrived.set()
        try:
            return await self.on_path.get(request.path, self.behaviour)(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise


def event(text: str) -> bytes:
    chunk = {"object": "chat.completion.chunk", "choices": [{"delta": {"content": text}}]}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 2,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def say(*words: str) -> Behaviour:
    """A whole, correct answer, streamed or not as asked."""

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "x", "object": "chat.completion", "choices": [choice], "usage": USAGE}
            return web.json_response(answer)
        stream = await opened(request)
        for word in words:
            await stream.write(event(word))
        await stream.write(b"data: " + orjson.dumps({"choices": [], "usage": USAGE}) + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    return behaviour


async def opened(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    return stream


def fail(status: int, message: str = "engine says no") -> Behaviour:
    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return behaviour


def hang(first: bytes = b"", gate: asyncio.Event | None = None) -> Behaviour:
    """Send `first`, then nothing until `gate` opens (never, without one); then end well."""

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        stream = await opened(request)
        if first:
            await stream.write(first)
        await (gate or asyncio.Event()).wait()
        await stream.write(event("late") + b"data: [DONE]\n\n")
        return stream

    return behaviour


def cut_after(first: bytes, gate: asyncio.Event | None = None) -> Behaviour:
    """Send `first`, then, when `gate` opens, reset the connection.

    A reset may overtake bytes before it; only the gate makes sure that they were read.
    """

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        stream = await opened(request)
        if first:
            await stream.write(first)
        if gate is not None:
            await gate.wait()
        assert request.transport is not None
        request.transport.abort()
        return stream

    return behaviour


def raw_stream(*chunks: bytes) -> Behaviour:
    """An event-stream answer of exactly these bytes, cleanly closed."""

    async def behaviour(request: web.Request, body: dict) -> web.StreamResponse:
        stream = await opened(request)
        for chunk in chunks:
            await stream.write(chunk)
        return stream

    return behaviour


@asynccontextmanager
async def scripted_engine(model: str = "tiny") -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(model)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
