"""OpenTelemetry, set up once per process and only when an OTLP endpoint is configured.

Without OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) nothing of the SDK is imported and
`tracer()` hands out the API's no-op tracer: tracing that is off costs a function call.
W3C context travels in NATS headers and HTTP headers by the same two functions.
"""

import logging
import os
import re
import threading
from collections.abc import Mapping, MutableMapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # how long the end of a process may wait for the last spans
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

PARENT, _STATE = "traceparent", "tracestate"
STATE_CHARS_MAX = 512  # what W3C Trace Context requires to pass on; a longer one is dropped
_UNSAMPLED = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace]")  # W3C Trace Context
_PLAIN = re.compile("[\t -~]*")
_PROPAGATOR = TraceContextTextMapPropagator()
is_set_up = False  # in this process


def enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an endpoint for traces is configured."""
    return any(environ.get(variable) for variable in ENDPOINT_VARIABLES)


def set_up(service: str, **resource: str) -> None:
    """Send this process's spans by OTLP over HTTP, if an endpoint is configured.

    `service` and `resource` name the process in Jaeger. Call `shut_down` before exit, or the
    last batch of spans is lost.
    """
    global is_set_up
    if not enabled():
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = Resource.create({"service.name": service, **resource})
    provider = TracerProvider(resource=about, shutdown_on_exit=False)  # `shut_down` is bounded
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    is_set_up = True


def shut_down() -> None:
    """Flush what is left, for FLUSH_S at most. Harmless when tracing was never set up.

    The SDK's own shutdown takes no limit and tries a dead endpoint again and again, so it runs in
    a thread that the process does not wait for.
    """
    stop = getattr(trace.get_tracer_provider(), "shutdown", None)
    if stop is None:
        return
    flushing = threading.Thread(target=stop, name="last spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        log.warning("the last spans are lost: the OTLP endpoint did not take them in %g s", FLUSH_S)


def tracer(name: str) -> trace.Tracer:
    """The tracer for one module: real or no-op, as `set_up` decided."""
    return trace.get_tracer(name)


def inject(carrier: MutableMapping[str, str], context: Context | None = None) -> None:
    """Write `traceparent` (and `tracestate`) of the context into headers, if there is a trace."""
    _PROPAGATOR.inject(carrier, context)


def inject_unrecorded(carrier: MutableMapping[str, str], span: trace.Span) -> None:
    """The same for a span that records nothing, if it is in a trace at all.

    That a trace is not sampled must travel too, or the receiver samples anew. Nearly every
    request comes here where few are sampled, and a context made for the propagator and taken apart
    by it would be a third of what that costs.
    """
    of = span.get_span_context()
    if not of.is_valid:
        return
    carrier[PARENT] = f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"
    if of.trace_state:
        carrier[_STATE] = of.trace_state.to_header()


def unsampled(carrier: Mapping[str, str]) -> dict[str, str]:
    """The headers of a trace that the sender has not sampled; none if it has, or without one.

    They can be passed on as they are, without a span: samplers follow the sender's decision by
    default, and a trace with holes is of no use.
    """
    if not _UNSAMPLED.fullmatch(carrier.get("traceparent", "")):
        return {}
    return _kept(carrier)


def extract(carrier: Mapping[str, str]) -> Context | None:
    """The context that came with headers, or None when they carry no trace."""
    if PARENT not in carrier:
        return None
    return _PROPAGATOR.extract(_kept(carrier))


def _kept(carrier: Mapping[str, str]) -> dict[str, str]:
    """Its trace headers, without a state that is too long or no plain text for a bus header."""
    kept = {PARENT: carrier[PARENT]}
    state = carrier.get(_STATE)
    if state is not None and len(state) <= STATE_CHARS_MAX and _PLAIN.fullmatch(state):
        kept[_STATE] = state
    return kept
