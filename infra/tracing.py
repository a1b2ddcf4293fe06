"""OpenTelemetry, set up once per process and only when an OTLP endpoint is configured.

Without OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) nothing of the SDK is imported and
`tracer()` hands out the API's no-op tracer: tracing that is off costs a function call.
W3C context travels in NATS headers and HTTP headers by the same two functions.
"""

import os
from collections.abc import Mapping, MutableMapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_PROPAGATOR = TraceContextTextMapPropagator()


def enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was told where to send traces."""
    return any(environ.get(variable) for variable in ENDPOINT_VARIABLES)


def set_up(service: str, **resource: str) -> None:
    """Send this process's spans by OTLP over HTTP, if an endpoint is configured.

    `service` and `resource` name the process in Jaeger. Call `shut_down` before exit, or the
    last batch of spans is lost.
    """
    if not enabled():
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service, **resource}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def shut_down() -> None:
    """Flush what is left. Harmless when tracing was never set up."""
    provider = trace.get_tracer_provider()
    stop = getattr(provider, "shutdown", None)
    if stop is not None:
        stop()


def tracer(name: str) -> trace.Tracer:
    """The tracer for one module: real or no-op, as `set_up` decided."""
    return trace.get_tracer(name)


def inject(carrier: MutableMapping[str, str], context: Context | None = None) -> None:
    """Write `traceparent` (and `tracestate`) of the context into headers, if there is a trace."""
    _PROPAGATOR.inject(carrier, context)


def extract(carrier: Mapping[str, str]) -> Context | None:
    """The context that came with headers, or None when they carry no trace."""
    if "traceparent" not in carrier:
        return None
    return _PROPAGATOR.extract(carrier)
