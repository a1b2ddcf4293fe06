"""One request's spans: client → router (hold, decide) → bus → agent → engine.

    mesh.request            this router, from the client's first byte to its last
      mesh.hold             while nobody could take it
      mesh.decide           one a placement, with its receipt
      mesh.dispatch         one an attempt, until its first byte; its context travels on the bus
    mesh.ingress            the peer's router, under the asking router's mesh.dispatch

With tracing off every span is the API's shared no-op. A request that is not sampled has nothing to
tell, and one in no trace nothing to pass on either, so then only the first span is asked for.
"""

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from infra import tracing
from mesh.adapters.receipts import attributes
from schemas.decision import Decision, Placement

_TRACER = tracing.tracer("mesh.router")


class RequestSpans:
    """The spans of one client's request. `end` must be called, once."""

    def __init__(self, request_id: str, model: str, parent: Context | None) -> None:
        self._root = _TRACER.start_span(
            "mesh.request",
            parent,
            kind=SpanKind.SERVER,
            attributes={"mesh.request_id": request_id, "gen_ai.request.model": model},
        )
        self._is_recording = self._root.is_recording()
        self._context = trace.set_span_in_context(self._root) if self._is_recording else None
        self._hold: Span | None = None
        self._dispatch: Span | None = None

    def decided(self, decision: Decision) -> None:
        """A placement was made: a point in time with its receipt."""
        if not self._is_recording:
            return
        self._end_hold()
        span = _TRACER.start_span("mesh.decide", self._context)
        if span.is_recording():
            span.set_attributes(attributes(decision))
        span.end()
        if decision.placement is Placement.HOLD:
            self._hold = _TRACER.start_span("mesh.hold", self._context)

    def dispatched(self, target: str, attempt: int, headers: dict[str, str]) -> None:
        """An attempt leaves for the bus: its context goes into the message's headers."""
        if not self._is_recording:
            tracing.inject_unrecorded(headers, self._root)
            return
        self._end_dispatch("placed again")
        self._dispatch = _TRACER.start_span(
            "mesh.dispatch",
            self._context,
            kind=SpanKind.PRODUCER,
            attributes={"mesh.target": target, "mesh.attempt": attempt},
        )
        tracing.inject(headers, trace.set_span_in_context(self._dispatch))

    def first_byte(self) -> None:
        """The attempt under way has begun to answer."""
        self._end_dispatch(None)

    def end(self, status: int, error: str | None = None) -> None:
        """The client has its answer or its error."""
        if not self._is_recording:
            return
        self._end_hold()
        self._end_dispatch(error)
        self._root.set_attribute("http.response.status_code", status)
        if error is not None:
            self._root.set_status(Status(StatusCode.ERROR, error))
        self._root.end()

    def _end_hold(self) -> None:
        if self._hold is not None:
            self._hold.end()
            self._hold = None

    def _end_dispatch(self, error: str | None) -> None:
        if self._dispatch is not None:
            if error is not None:
                self._dispatch.set_status(Status(StatusCode.ERROR, error))
            self._dispatch.end()
            self._dispatch = None


class IngressSpan:
    """The peer's side of a forwarded request: placed or refused at once."""

    def __init__(self, request_id: str, origin: str, parent: Context | None) -> None:
        self._span = _TRACER.start_span(
            "mesh.ingress",
            parent,
            kind=SpanKind.CONSUMER,
            attributes={"mesh.request_id": request_id, "mesh.origin": origin},
        )
        self._is_recording = self._span.is_recording()
        self._context = trace.set_span_in_context(self._span) if self._is_recording else None

    def decided(self, decision: Decision) -> None:
        """A replica was found."""
        if not self._is_recording:
            return
        span = _TRACER.start_span("mesh.decide", self._context)
        if span.is_recording():
            span.set_attributes(attributes(decision))
        span.end()

    def dispatched(self, headers: dict[str, str]) -> None:
        """The request leaves for the agent."""
        if self._is_recording:
            tracing.inject(headers, self._context)
        else:
            tracing.inject_unrecorded(headers, self._span)

    def end(self, refused: str | None = None) -> None:
        """Placed, or refused for this reason."""
        if refused is not None and self._is_recording:
            self._span.set_status(Status(StatusCode.ERROR, f"refused: {refused}"))
        self._span.end()
