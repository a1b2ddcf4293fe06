"""Spans as the SDK is given them, in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from infra import tracing
from infra.span_conventions import Attributes
from infra.trace_context import TraceContext

SAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
UNSAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00", "tracestate": "vendor=1"}

Ended = Callable[[], tuple[ReadableSpan, ...]]


class SdkSpans:
    """Keeps spans as the SDK has them: an `infra.tracing.SpanSink`."""

    def __init__(self, exporter: InMemorySpanExporter, **resource: str) -> None:
        self._processor = SimpleSpanProcessor(exporter)
        self.shut_down = self._processor.shutdown
        self._resource = Resource.create({"service.name": "test", **resource})
        self._scope = InstrumentationScope("mesh", resource.get("service.version"))

    def send(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        kind: SpanKind,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
        error: str,
    ) -> None:
        has_failed = "error.type" in attributes
        span = ReadableSpan(
            name,
            _sdk_context(context),
            None if parent is None else _sdk_context(parent),
            self._resource,
            attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, error or None) if has_failed else Status(),
            start_time=began_ns,
            end_time=ended_ns,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


def _sdk_context(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    return SpanContext(context.trace_id, context.span_id, context.is_remote, flags, state)


def tracer(exporter: InMemorySpanExporter, sampled: float) -> tracing.Tracer:
    """Keeps spans of this share of new traces; follows the sender where there is one."""
    environment = {
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(sampled),
    }
    return tracing.Tracer(SdkSpans(exporter), tracing.sampler(environment))


@contextmanager
def traced(sampled: float = 1.0) -> Iterator[Ended]:
    """Tracing is on. Yields the spans that have ended, in order."""
    exporter = InMemorySpanExporter()
    ours = tracer(exporter, sampled)
    before, tracing.active = tracing.active, ours

    def ended() -> tuple[ReadableSpan, ...]:
        ours.make_all()
        return exporter.get_finished_spans()

    try:
        yield ended
    finally:
        tracing.active = before


def described(span: ReadableSpan) -> tuple[str, str | None, object]:
    """Its status, the description of that, and its kind of error."""
    assert span.attributes is not None
    return span.status.status_code.name, span.status.description, span.attributes.get("error.type")
