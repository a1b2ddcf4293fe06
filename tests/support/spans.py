"""Spans as the SDK is given them, in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infra import tracing

SAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
UNSAMPLED = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00", "tracestate": "vendor=1"}

Ended = Callable[[], tuple[ReadableSpan, ...]]


def tracer(exporter: InMemorySpanExporter, sampled: float) -> tracing.Tracer:
    """Keeps spans of this share of new traces; follows the sender where there is one."""
    environment = {
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(sampled),
    }
    processor = SimpleSpanProcessor(exporter)
    return tracing.Tracer(processor, tracing.sampler(environment), **{"service.name": "test"})


@contextmanager
def traced(sampled: float = 1.0) -> Iterator[Ended]:
    """Tracing is on. Yields the spans that have ended, in order."""
    exporter = InMemorySpanExporter()
    before, tracing.active = tracing.active, tracer(exporter, sampled)
    try:
        yield exporter.get_finished_spans
    finally:
        tracing.active = before


def described(span: ReadableSpan) -> tuple[str, str | None, object]:
    """Its status, the description of that, and its kind of error."""
    assert span.attributes is not None
    return span.status.status_code.name, span.status.description, span.attributes.get("error.type")
