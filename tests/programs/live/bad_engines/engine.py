"""A small engine over HTTP: a healthy one, whose parts the kinds in `kinds.py` break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson
from aiohttp import web

from tests.support.aborted import abort

MODEL = "tiny"
TOKENS = 16  # of each answer
PREFILL_S, TOKEN_S = 0.05, 0.01
AT_ONCE = 16  # requests that it computes at a time; others wait
FREE_S = 5.0  # how long it behaves, so that the mesh has come to rely on it

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{model}"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{model}"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="{model}"}} {kv}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{model_name="{model}"}} {generated}
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{model_name="{model}"}} {prompted}
"""


@dataclass(slots=True)
class Asked:
    """One request: whether its answer streams, with usage, and the bytes of each event."""

    id: str
    is_stream: bool
    with_usage: bool
    said: int = 0  # words of the assistant's turn that it goes on with, as vLLM does
    words: int = 0  # of its prompt, each a token

    def chunk(self, delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        fields = {"id": self.id, "object": "chat.completion.chunk", "model": MODEL}
        return b"data: " + orjson.dumps({**fields, "choices": [choice]}) + b"\n\n"

    def usage(self) -> bytes:
        """Its last event, where it was asked for."""
        fields = {"id": self.id, "object": "chat.completion.chunk", "model": MODEL}
        event = orjson.dumps({**fields, "choices": [], "usage": self._counts()})
        return b"data: " + event + b"\n\n" if self.with_usage else b""

    def whole(self) -> bytes:
        words = "".join(f"t{n} " for n in range(self.said, TOKENS))
        message = {"role": "assistant", "content": words}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        fields = {"id": self.id, "object": "chat.completion", "model": MODEL}
        return orjson.dumps({**fields, "choices": [choice], "usage": self._counts()})

    def _counts(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.words, "completion_tokens": TOKENS,
            "total_tokens": self.words + TOKENS, "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip


class Engine:
    """Healthy: computes AT_ONCE requests at a time and tells the truth. Kinds override parts."""

    kind = "vllm"  # what its agent takes it for

    def __init__(self) -> None:
        self.is_bad = False  # since the play told it to be
        self.model = MODEL
        self.prefill_s, self.token_s, self.at_once = PREFILL_S, TOKEN_S, AT_ONCE
        self.running = self.waiting = self.generated = self.prompted = 0
        self.seen: list[str] = []  # ids of requests that came while it was bad
        self.port = 0
        self._places = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    # What kinds override.

    def turn_bad(self) -> None:
        """From now on it misbehaves."""
        self.is_bad = True

    async def page(self, request: web.Request) -> web.StreamResponse:
        text = METRICS.format(
            model=self.model, running=self.running, waiting=self.waiting, kv=self.running / 32,
            generated=self.generated, prompted=self.prompted,
        )  # fmt: skip
        return web.Response(text=text)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """The answer while it is bad."""
        return await self.good(request, asked)

    # Computing.

    async def good(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """A true answer."""
        async with self.place():
            await self.compute(self.prefill_s)
            self.prompted += asked.words
            if not asked.is_stream:
                await self.compute(self.token_s * TOKENS)
                self.generated += TOKENS
                return web.Response(body=asked.whole(), content_type="application/json")
            stream = await self.opened(request)
            await stream.write(asked.chunk({"role": "assistant", "content": ""}))
            for number in range(asked.said, TOKENS):
                await self.write_token(stream, asked, number)
            await stream.write(asked.chunk({}, "stop") + asked.usage())
            await stream.write(b"data: [DONE]\n\n")
            return stream

    async def write_token(self, stream: web.StreamResponse, asked: Asked, number: int) -> None:
        await self.compute(self.token_s)
        self.generated += 1
        space = " " if asked.said and number == asked.said else ""  # the turn ends without one
        await stream.write(asked.chunk({"content": f"{space}t{number} "}))

    async def compute(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the places in its batch; waits for it."""
        self.waiting += 1
        try:
            async with self._places:
                await self._places.wait_for(lambda: self.running < self.at_once)
                self.running += 1
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.running -= 1
            async with self._places:
                self._places.notify()

    async def opened(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        return stream

    # The server.

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/metrics", self.page)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self._asked)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a process that is killed: every connection is reset."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await abort(runner)

    async def _asked(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        name = request.headers.get("x-request-id", "")
        goes_on = bool(body.get("continue_final_message"))
        said = len(body["messages"][-1]["content"].split()) if goes_on else 0
        words = sum(len(str(message["content"]).split()) for message in body["messages"])
        asked = Asked(name, bool(body.get("stream")), with_usage, said, words)
        if not self.is_bad:
            return await self.good(request, asked)
        self.seen.append(asked.id)
        return await self.answer(request, asked)
