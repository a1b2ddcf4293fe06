"""OpenTelemetry, set up once per process and only when an OTLP endpoint is configured.

Without OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) nothing of the SDK is imported and
`active` is None: tracing that is off costs a look at it. Resource, batches and OTLP are the SDK's.
Its spans are not used: a `Tracer` samples by the request's ids alone, and spans are encoded when
they are over (`infra.otlp`), so a request that is not sampled costs next to nothing.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from importlib import metadata
from random import getrandbits
from typing import Protocol

from opentelemetry.trace import SpanKind

from infra.process import LimitedLog
from infra.span_conventions import Attributes
from infra.trace_context import TraceContext

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # how long the end of a process may wait for the last spans
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SAMPLER, SHARE = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_FOLLOWS = "parentbased_"
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_SPAN_BITS = 64
_SPAN_IDS = 1 << _SPAN_BITS
_SPAN_ID = _SPAN_IDS - 1
_IDS_BYTES = 24  # of a trace and of a span
# A request is a few percent of what its processor does, so code that runs for some requests alone
# is not in its caches: run once it takes twice as long as run again at once. Hence some things are
# done for several requests together.
BEGUN_TOGETHER = 64
LATER_S = 1.0
LATER_MAX = 256  # requests of which spans are to be made
LATER_TOGETHER = 16  # in one turn of the event loop, which must stay short

Sampler = Callable[[int, TraceContext | None], bool]


class SpanSink(Protocol):
    """Takes spans that have ended."""

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
        """Keep it to be sent; never waits. Times are nanoseconds since 1970."""

    def shut_down(self) -> None:
        """Send what is left."""


class Tracer:
    """Decides which traces are sampled, and passes ended spans on."""

    def __init__(self, sink: SpanSink, sampler: Sampler) -> None:
        self._send, self._flush, self._is_sampled = sink.send, sink.shut_down, sampler
        self._begun: list[TraceContext | str] = []
        self._later: deque[Callable[[], None]] = deque()
        self._limited = LimitedLog(log)

    def begin_request(self, parent: TraceContext | None) -> TraceContext | str:
        """As `begin`; of a trace that is not sampled the `traceparent` alone, which costs a third.

        Those of new traces are made together, for the reason of `later`.
        """
        if parent is not None:
            return self._begin_request(parent, new_ids())
        if not self._begun:
            self._begun = [self._begin_request(None, new_ids()) for _ in range(BEGUN_TOGETHER)]
        return self._begun.pop()

    def _begin_request(self, parent: TraceContext | None, ids: int) -> TraceContext | str:
        trace_id = ids >> _SPAN_BITS if parent is None else parent.trace_id
        if self._is_sampled(trace_id, parent):
            return self.begin(parent, ids)
        text = ids.to_bytes(_IDS_BYTES, "big").hex()
        trace = text[:32] if parent is None else parent.trace
        return f"00-{trace}-{text[32:]}-00"

    def later(self, make: Callable[[], None]) -> None:
        """Call this within LATER_S to make and send spans; at once where no event loop runs."""
        waiting = self._later
        waiting.append(make)
        if len(waiting) == 1:
            try:
                asyncio.get_running_loop().call_later(LATER_S, self._make_some)
            except RuntimeError:
                self._make(1)
        elif len(waiting) > LATER_MAX:
            self._make(LATER_TOGETHER)

    def _make_some(self) -> None:
        self._make(LATER_TOGETHER)
        if self._later:
            asyncio.get_running_loop().call_soon(self._make_some)

    def _make(self, most: int) -> None:
        for _ in range(min(most, len(self._later))):
            try:
                self._later.popleft()()
            except Exception as fault:  # ours: it must cost neither other spans nor a request
                self._limited.warning("spans", type(fault).__name__, "no span made: %r", fault)

    def make_all(self) -> None:
        """Make and send at once what `later` was called with."""
        self._make(len(self._later))

    def shut_down(self) -> None:
        """Send what is left; waits for who receives it."""
        self.make_all()
        self._flush()

    def begin(self, parent: TraceContext | None, ids: int | None = None) -> TraceContext:
        """The context of a new span under that one; without one, of a new trace."""
        ids = new_ids() if ids is None else ids
        span_id = ids & _SPAN_ID
        if parent is None:
            trace_id = ids >> _SPAN_BITS
            return TraceContext(trace_id, span_id, self._is_sampled(trace_id, None))
        is_sampled = self._is_sampled(parent.trace_id, parent)
        return TraceContext(parent.trace_id, span_id, is_sampled, parent.state)

    def send(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """Send one span that has ended. Times are nanoseconds since 1970.

        `error` says what went wrong. Its status is an error where `attributes` have `error.type`.
        """
        ended_ns = max(began_ns, ended_ns)
        self._send(name, context, parent, kind, began_ns, ended_ns, attributes, error)


def new_ids() -> int:
    """Of a trace and of a span in it; one of zero is as likely as two equal ones."""
    return getrandbits(3 * _SPAN_BITS)


def child(context: TraceContext) -> TraceContext:
    """The context of a new span in the same trace."""
    return context._replace(span_id=getrandbits(_SPAN_BITS))


active: Tracer | None = None  # of this process


def enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an endpoint for traces is configured, and not all of OpenTelemetry switched off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return any(environ.get(variable) for variable in ENDPOINT_VARIABLES)


def set_up(service: str, instance: str, **resource: str) -> None:
    """Send this process's spans by OTLP over HTTP, if an endpoint is configured.

    `instance` tells processes of one service apart. Call `shut_down` before exit, or the last
    batch of spans is lost.
    """
    global active
    if not enabled():
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from infra import otlp

    about = {
        "service.name": service,
        "service.version": package_version(),
        "service.instance.id": instance,
        **resource,
    }
    otlp.use(otlp.RequestEncoder(**about))
    active = Tracer(otlp.OtlpSpans(BatchSpanProcessor(OTLPSpanExporter())), sampler(os.environ))


def package_version() -> str:
    """Of the installed package, as semver; 0.0.0 where none is."""
    try:
        return metadata.version("inference-mesh")
    except metadata.PackageNotFoundError:
        return "0.0.0"


def sampler(environ: Mapping[str, str]) -> Sampler:
    """OpenTelemetry's standard sampler that the environment names, by default
    `parentbased_always_on`; what it does not know is logged, and sampled so too."""
    name, share = environ.get(SAMPLER, "").strip().lower(), 1.0
    plain = name.removeprefix(_FOLLOWS)
    if plain not in _SAMPLERS:
        if name:
            log.warning("%s=%r is unknown: every trace is sampled", SAMPLER, name)
        name, plain = _FOLLOWS, "always_on"
    if plain == "traceidratio":
        share = _share(environ.get(SHARE, ""))
    bound = 0 if plain == "always_off" else round(share * _SPAN_IDS)
    follows_parent = name.startswith(_FOLLOWS)

    def is_sampled(trace_id: int, parent: TraceContext | None) -> bool:
        if follows_parent and parent is not None:
            return parent.is_sampled
        return trace_id & _SPAN_ID < bound

    return is_sampled


def _share(text: str) -> float:
    try:
        share = float(text or 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        log.warning("%s=%r is no share from 0 to 1: every trace is sampled", SHARE, text)
        return 1.0
    return share


def shut_down() -> None:
    """Flush what is left, for FLUSH_S at most. Harmless when tracing was never set up.

    The SDK's own shutdown takes no limit and tries a dead endpoint again and again, so it runs in
    a thread that the process does not wait for.
    """
    if active is None:
        return
    flushing = threading.Thread(target=active.shut_down, name="last spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        log.warning("the last spans are lost: the OTLP endpoint did not take them in %g s", FLUSH_S)
