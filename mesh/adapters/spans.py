"""One request's spans: client → router (hold, decide) → bus → agent → engine.

    mesh.request            this router, from the client's first byte to its last
      mesh.hold             while no replica was available
      mesh.decide           one a placement, with its receipt
      mesh.dispatch         one an attempt, until its first byte; its context travels on the bus
    mesh.ingress            the peer's router, under the asking router's mesh.dispatch; it has
                            mesh.hold and mesh.decide below it too

A request that is not sampled has only the first span, whose context it passes on. With tracing off,
a request without a client's trace has no spans at all (`NO_TRACE`).

The candidates are on a span twice: all of them as JSON, and the chosen one and its runner-up as
plain numbers, because traces are searched and plotted by attributes and not by what is inside them.
"""

from collections.abc import Iterator
from dataclasses import replace
from time import time_ns

import orjson
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from infra import tracing
from mesh.core.model import effects as fx
from mesh.session.record import Trace
from schemas.decision import Candidate, Decision, Placement, rounded

CANDIDATES_MAX = 16  # on a span; the rest is counted


def attributes(decision: Decision) -> dict[str, str | int | float]:
    """One placement as span attributes; unknown values are left out."""
    decision = rounded(replace(decision, candidates=decision.candidates[:CANDIDATES_MAX]))
    chosen, runner_up = chosen_and_runner_up(decision)
    return {
        "mesh.policy": decision.policy,
        "mesh.placement": decision.placement.value,
        "mesh.target": decision.replica or decision.peer or "",
        "mesh.reason": decision.reason,
        "mesh.attempt": decision.attempt,
        "mesh.hops": decision.hops,
        "mesh.held_s": decision.held_s,
        "mesh.considered": decision.considered,
        "mesh.candidates": orjson.dumps(decision.candidates).decode(),
        **dict(_numbers("mesh.chosen", chosen)),
        **dict(_numbers("mesh.runner_up", runner_up)),
    }


def _answered(receipt: Decision) -> dict[str, str | float]:
    """Of a root span: who answers, and what the wait for the first byte consists of."""
    seconds = {
        "mesh.held_s": receipt.held_s,
        "mesh.peer_held_s": receipt.peer_held_s,
        "mesh.attempts_s": receipt.attempts_s,
        "mesh.ttft_s": receipt.ttft_s,
    }
    return {
        "mesh.placement": receipt.placement.value,
        "mesh.region": receipt.peer or receipt.region,
        "mesh.replica": receipt.replica or "",
        **{name: round(value, 6) for name, value in seconds.items() if value is not None},
    }


def chosen_and_runner_up(decision: Decision) -> tuple[Candidate | None, Candidate | None]:
    """The chosen candidate, and the best of the other available ones; None if there is none."""
    target = decision.replica or decision.peer
    free = [one for one in decision.candidates if one.available]
    chosen = next((one for one in free if one.name == target), None)
    return chosen, next((one for one in free if one is not chosen), None)


def receipt_line(decision: Decision) -> str:
    target = decision.replica or decision.peer or "-"
    free = sum(candidate.available for candidate in decision.candidates)
    chosen, runner_up = chosen_and_runner_up(decision)
    prices = "".join(
        f", {one.name} {one.seconds:.3f} s"
        for one in (chosen, runner_up)
        if one is not None and one.seconds is not None
    )
    return (
        f"{decision.request} {decision.placement.value} {target} attempt {decision.attempt} "
        f"held {decision.held_s:.3f} s free {free}/{decision.considered}{prices}: {decision.reason}"
    )


def _numbers(prefix: str, one: Candidate | None) -> Iterator[tuple[str, str | float]]:
    if one is None:
        return
    yield f"{prefix}.name", one.name
    if one.seconds is not None:
        yield f"{prefix}.seconds", one.seconds
    for name, value in one.terms.items():
        if value is not None:
            yield f"{prefix}.{name}", value


_TRACER = tracing.tracer("mesh.router")


class _Spans(Trace):
    """A root span; it has others below it only where it `is_recording`."""

    is_traced = True

    def __init__(self, root: Span) -> None:
        self._root = root
        self.is_recording = root.is_recording()
        self.trace_id = trace.format_trace_id(root.get_span_context().trace_id)
        self._context = trace.set_span_in_context(root) if self.is_recording else None

    def decided(self, effect: fx.Decided) -> None:
        span = _TRACER.start_span("mesh.decide", self._context)
        if span.is_recording():
            span.set_attributes(attributes(effect.decision))
        span.end()


class RequestSpans(_Spans):
    """The spans of one client's request. `end` must be called, once, if it `is_recording`."""

    def __init__(self, request_id: str, model: str, parent: Context | None) -> None:
        about = {"mesh.request_id": request_id, "gen_ai.request.model": model}
        super().__init__(
            _TRACER.start_span("mesh.request", parent, kind=SpanKind.SERVER, attributes=about)
        )
        self._hold: Span | None = None
        self._dispatch: Span | None = None

    def decided(self, effect: fx.Decided) -> None:
        self._end_hold()
        super().decided(effect)
        if effect.decision.placement is Placement.HOLD:
            self._hold = _TRACER.start_span("mesh.hold", self._context)

    def dispatched(self, target: str, attempt: int, headers: dict[str, str]) -> None:
        if not self.is_recording:
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

    def first_byte(self, receipt: Decision) -> None:
        self._end_dispatch(None)
        self._root.set_attributes(_answered(receipt))

    def end(self, status: int, error: str | None = None) -> None:
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


class IngressSpan(_Spans):
    """The peer's side of a forwarded request: placed or refused at once."""

    def __init__(self, request_id: str, origin: str, parent: Context | None) -> None:
        about = {"mesh.request_id": request_id, "mesh.origin": origin}
        super().__init__(
            _TRACER.start_span("mesh.ingress", parent, kind=SpanKind.CONSUMER, attributes=about)
        )

    def decided(self, effect: fx.Decided) -> None:
        held_s = effect.decision.held_s
        if held_s > 0.0:  # the core reports the wait when it is over
            ended_ns = time_ns()
            began_ns = ended_ns - round(held_s * 1e9)
            _TRACER.start_span("mesh.hold", self._context, start_time=began_ns).end(ended_ns)
        super().decided(effect)

    def dispatched(self, target: str, attempt: int, headers: dict[str, str]) -> None:
        if self.is_recording:
            tracing.inject(headers, self._context)
        else:
            tracing.inject_unrecorded(headers, self._root)

    def end(self, status: int, error: str | None = None) -> None:
        if error is not None:
            self._root.set_status(Status(StatusCode.ERROR, f"refused: {error}"))
        self._root.end()
