"""A real Jaeger on free ports, asked over its HTTP API as its page and operators ask it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.ports import free_ports
from tests.tools.go_tools import JAEGER

START_S, END_S, FOUND_S = 60.0, 20.0, 40.0
TCP = (
    "admin.http.host-port", "collector.grpc-server.host-port", "collector.http-server.host-port",
    "collector.otlp.grpc.host-port", "collector.otlp.http.host-port", "http-server.host-port",
    "query.grpc-server.host-port", "query.http-server.host-port",
)  # fmt: skip
UDP = ("jaeger-binary", "jaeger-compact", "zipkin-compact")
ROUTER = "mesh-router"


@dataclass(frozen=True)
class Span:
    """One span as Jaeger shows it. `process`: the `service.instance.id`."""

    id: str
    name: str
    parents: tuple[str, ...]
    process: str
    tags: Mapping[str, object]
    warnings: tuple[str, ...]
    began_s: float  # since 1970, to the microsecond
    duration_s: float

    @property
    def ended_s(self) -> float:
        return self.began_s + self.duration_s

    @property
    def kind(self) -> object:
        return self.tags.get("span.kind")


Trace = tuple[Span, ...]


@dataclass
class Jaeger:
    """A running one. It counts what it was asked and what it showed."""

    otlp_url: str
    query_url: str
    http: aiohttp.ClientSession
    queries: int = 0
    shown: dict[str, int] = field(default_factory=dict)  # traces, and the spans of each

    async def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API; none of a trace that it does not have."""
        self.queries += 1
        async with self.http.get(f"{self.query_url}/api/{path}", params=parameters) as answer:
            assert answer.status in (200, 404), await answer.text()
            return (await answer.json())["data"] or []

    async def search(self, service: str = ROUTER, operation: str = "", **tags: str) -> list[Trace]:
        """The traces that a search finds; `__` in a tag's name is a dot."""
        dotted = {name.replace("__", "."): value for name, value in tags.items()}
        asked = {"service": service, "tags": json.dumps(dotted), "limit": "100"}
        if operation:
            asked["operation"] = operation
        return self.kept(await self.ask("traces", **asked))

    async def until(
        self, is_whole: Callable[[Trace], object], *, service: str = ROUTER, **tags: str
    ) -> Trace:
        """The one trace that a search finds, once it is whole."""
        found: list[Trace] = []
        try:
            async with asyncio.timeout(FOUND_S):
                while not (found and is_whole(found[0])):
                    await asyncio.sleep(0.1)
                    found = await self.search(service, **tags)
        except TimeoutError:
            raise AssertionError(f"no such trace by {tags}: {found}") from None
        assert len(found) == 1, f"{len(found)} traces by {tags}"
        return found[0]

    def kept(self, answered: list[dict[str, Any]]) -> list[Trace]:
        """The traces of an answer."""
        traces = {trace["traceID"]: _trace(trace) for trace in answered}
        self.shown |= {name: len(spans) for name, spans in traces.items()}
        return list(traces.values())


def _trace(answered: dict[str, Any]) -> Trace:
    instances = {
        name: {tag["key"]: tag["value"] for tag in process["tags"]}
        for name, process in answered["processes"].items()
    }
    return tuple(
        Span(
            id=span["spanID"],
            name=span["operationName"],
            parents=tuple(one["spanID"] for one in span["references"]),
            process=instances[span["processID"]]["service.instance.id"],
            tags={tag["key"]: tag["value"] for tag in span["tags"]},
            warnings=tuple(span["warnings"] or ()),
            began_s=span["startTime"] / 1e6,
            duration_s=span["duration"] / 1e6,
        )
        for span in answered["spans"]
    )


@contextlib.asynccontextmanager
async def running_jaeger(folder: Path) -> AsyncIterator[Jaeger]:
    """Started on free ports with its memory as storage, ready, and ended."""
    ports = dict(zip((*TCP, *UDP), free_ports(len(TCP) + len(UDP)), strict=True))
    log = folder / "jaeger.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            str(JAEGER.binary),
            *(f"--{name}=127.0.0.1:{ports[name]}" for name in TCP),
            *(f"--processor.{name}.server-host-port=127.0.0.1:{ports[name]}" for name in UDP),
            stdout=out,
            stderr=out,
        )
    urls = [f"http://127.0.0.1:{ports[name]}" for name in (TCP[4], TCP[7])]
    try:
        async with aiohttp.ClientSession() as http:
            jaeger = Jaeger(*urls, http)
            async with asyncio.timeout(START_S):
                while not await _is_ready(jaeger):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            yield jaeger
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()  # what it keeps is in memory
            await process.wait()


async def _is_ready(jaeger: Jaeger) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        await jaeger.ask("services")
        async with jaeger.http.post(f"{jaeger.otlp_url}/v1/traces", json={}) as answer:
            return answer.status == 200
    return False
