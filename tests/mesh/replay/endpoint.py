"""A real HTTP server with a small OpenAI face, whose chat answers follow a script."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from tests.mesh.replay.test_stream import DONE, ROLE, STOP, WORD
from tests.support.until import PATIENCE_S

BYTES_PER_TOKEN = 4
CACHE_BLOCK_BYTES = 32


class Endpoint:
    """Serves one model; `behave` answers each chat request and may be set by a test."""

    def __init__(self, model: str = "test/model") -> None:
        self.model = model
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.behave: Callable[[Endpoint, web.Request], Awaitable[web.StreamResponse]] = complete
        self.arrived = asyncio.Condition()
        self.cache: set[str] = set()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(orjson.loads(await request.read()))
        async with self.arrived:
            self.arrived.notify_all()
        return await self.behave(self, request)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def wait_for(self, count: int) -> None:
        """Until so many chat requests have arrived."""
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)

    def cached_tokens(self, prompt: str) -> int:
        """Leading tokens of `prompt` seen before; remembers it."""
        heads = [
            prompt[:end] for end in range(CACHE_BLOCK_BYTES, len(prompt) + 1, CACHE_BLOCK_BYTES)
        ]
        known = sum(head in self.cache for head in heads)
        self.cache.update(heads)
        return known * CACHE_BLOCK_BYTES // BYTES_PER_TOKEN


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    """Run `endpoint` on a free port until the block ends."""
    app = web.Application(client_max_size=2**25)
    app.router.add_get("/v1/models", endpoint.models)
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


async def sse(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def usage_of(endpoint: Endpoint, asked: dict[str, Any]) -> bytes:
    prompt = asked["messages"][0]["content"]
    usage = {
        "prompt_tokens": len(prompt) // BYTES_PER_TOKEN,
        "completion_tokens": asked["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": endpoint.cached_tokens(prompt)},
    }
    return b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"


async def complete(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    asked = orjson.loads(await request.read())  # another may have come since
    response = await sse(request)
    for part in (ROLE, *[WORD] * asked["max_tokens"], STOP, usage_of(endpoint, asked), DONE):
        await response.write(part)
    return response


def status(code: int) -> Callable[[Endpoint, web.Request], Awaitable[web.StreamResponse]]:
    async def answer(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=code)

    return answer


def body(*parts: bytes) -> Callable[[Endpoint, web.Request], Awaitable[web.StreamResponse]]:
    async def answer(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        for part in parts:
            await response.write(part)
        return response

    return answer


async def plain_json(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"message": {"content": "whole"}}]})


async def abort_at_once(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    assert request.transport
    request.transport.abort()
    return web.Response()


async def abort_inside(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    response = await sse(request)
    await response.write(ROLE + WORD)
    assert request.transport
    request.transport.abort()
    return response


async def silent(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("never answers")


async def stall_inside(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    response = await sse(request)
    await response.write(ROLE + WORD)
    await asyncio.Event().wait()
    return response
