"""Receives real OTLP over HTTP (protobuf) and keeps the spans by trace."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Span:
    """One received span, with what tests ask about."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    region: str
    attributes: dict[str, object]
    kind: str  # SERVER, CLIENT and so on
    status: tuple[str, str]  # UNSET or ERROR, and its description
    resource: dict[str, str]
    duration_s: float


class Collector:
    """Spans as they come; `until` waits for a condition on them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.url = ""
        self._changed = asyncio.Event()

    async def export(self, request: web.Request) -> web.Response:
        data = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        message = ExportTraceServiceRequest.FromString(data)
        for resource in message.resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(span, about) for span in scope.spans]
        self._changed.set()
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def trace_of(self, request_id: str) -> list[Span]:
        """All spans of the trace that has the router's span of this request."""
        traces = {s.trace for s in self.spans if s.attributes.get("mesh.request_id") == request_id}
        return [span for span in self.spans if span.trace in traces]

    def roots(self, **attributes: object) -> list[Span]:
        """The clients' requests that have these attributes, as a search by tags finds them."""
        return [
            span
            for span in self.spans
            if span.kind == "SERVER" and attributes.items() <= span.attributes.items()
        ]

    async def until(
        self, wanted: set[tuple[str, str]], request_id: str, timeout_s: float = 20.0
    ) -> list[Span]:
        """The request's trace once it has spans of all these kinds and names."""
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted <= {(span.kind, span.name) for span in self.trace_of(request_id)}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            there = sorted({(span.service, span.kind, span.name) for span in self.spans})
            raise AssertionError(f"wanted {sorted(wanted)}, got {there}") from None
        return self.trace_of(request_id)


def _span(span, about: dict[str, str]) -> Span:
    attributes = {a.key: _value(a.value) for a in span.attributes}
    return Span(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        service=about.get("service.name", ""),
        region=about.get("mesh.region", ""),
        attributes=attributes,
        kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        status=(
            Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
            span.status.message,
        ),
        resource=about,
        duration_s=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


def _value(value) -> object:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


@asynccontextmanager
async def otlp_collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", collector.export)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()
