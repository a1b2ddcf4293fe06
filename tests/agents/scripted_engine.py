"""A real HTTP server on a free port that answers exactly what a test tells it to, byte by byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import orjson

from schemas.engine_routes import OPTIONAL_PATHS

MODEL = "org/llama"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def plain(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    """A whole response with its length."""
    return (
        b"HTTP/1.1 %d Odd\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
        % (status, content_type.encode(), len(body))
    ) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(slots=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Conversation:
    """One POST as the script sees it."""

    def __init__(self, request: Request, reader, writer) -> None:
        self.request = request
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def cut(self) -> None:
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def hung_up(self) -> None:
        """Return when the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            assert await self._reader.read(1) == b""


Script = Callable[[Conversation], Awaitable[None]]


@dataclass(slots=True)
class ScriptedEngine:
    """Its models, its metrics page and what it does with a POST."""

    script: Script
    models: list[str] = field(default_factory=lambda: [MODEL])
    parents: dict[str, str] = field(default_factory=dict)  # of those of them that are adapters
    metrics: str = (
        "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
    )
    requests: list[Request] = field(default_factory=list)
    scrapes: list[Request] = field(default_factory=list)  # what was not posted
    pages: dict[str, bytes] = field(default_factory=dict)  # further ones, by path
    raw_pages: dict[str, bytes] = field(default_factory=dict)  # whole responses, by path
    key: str | None = None  # who does not send it gets a 401
    port: int = 0
    also_serves: tuple[str, ...] = ()  # optional paths that the script sees
    scripts_all: bool = False  # the script sees whatever is not posted, too
    embeds: bool = False  # else a POST there is a 404 that the script does not see
    hangs: bool = False  # takes scrapes and never answers them
    silent: frozenset[str] = frozenset()  # paths of scrapes that it never answers
    scrape_response: Callable[[], bytes] | None = None  # what a look gets instead, then a close
    _server: asyncio.Server | None = None
    _writers: set = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and cut the open ones."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None

    async def _serve(self, reader, writer) -> None:
        self._writers.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                await self._answer(request, reader, writer)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Request, reader, writer) -> None:
        is_post = request.method == "POST" or self.scripts_all
        is_embedding = request.path == "/v1/embeddings" and self.embeds
        is_served = is_embedding or request.path in self.also_serves
        if request.path in OPTIONAL_PATHS and not is_served:
            writer.write(plain(404, b"{}"))
            return
        (self.requests if is_post else self.scrapes).append(request)
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            writer.write(plain(401, b'{"error":"Unauthorized"}'))
        elif is_post:
            await self.script(Conversation(request, reader, writer))
        elif self.hangs or request.path in self.silent:
            await reader.read()
        elif self.scrape_response is not None:
            writer.write(self.scrape_response())
            writer.close()
        elif request.path in self.raw_pages:
            writer.write(self.raw_pages[request.path])
        elif request.path == "/v1/models":
            parents = self.parents
            rows = [{"id": name, "parent": parents.get(name)} for name in self.models]
            writer.write(plain(200, orjson.dumps({"data": rows})))
        elif request.path in self.pages:
            writer.write(plain(200, self.pages[request.path]))
        elif request.path == "/metrics":
            writer.write(plain(200, self.metrics.encode(), "text/plain"))
        else:
            writer.write(plain(404, b"{}"))


async def _read_request(reader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body)


@contextlib.asynccontextmanager
async def running(script: Script, model: str = MODEL) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(script, [model])
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
