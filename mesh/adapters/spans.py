"""One request's spans: client → router (hold, decide) → bus → agent → engine.

    chat MODEL                this router, from the client's first byte to its last
      mesh.hold               while no replica was available
      mesh.decide             one a placement, with its receipt
      publish mesh.{region}…  one an attempt, until its first byte; its context travels on the bus.
                              One of its prefill stage, if it has that, until that is over
    process mesh.{region}…    the peer's router, under the asking router's attempt; it has mesh.hold
                              and mesh.decide below it too

Names and attributes follow `infra.span_conventions`. While a request is under way the contexts of
its attempts are kept, and nothing else; spans are made of its record's steps soon after its end.
So a request that is not sampled can still be traced if it fails or is slow (`TailRule`), and costs
next to nothing if not. What other processes do for such a request is not in its trace: they had it
as not sampled.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from time import time_ns
from typing import NamedTuple

from opentelemetry.trace import SpanKind

from infra import span_conventions as names
from infra import trace_context, tracing
from infra.span_conventions import Attributes
from infra.trace_context import TraceContext
from mesh.adapters.span_attributes import decision_attributes, receipt_attributes
from mesh.adapters.tail_rule import CLIENT_GONE, TailRule
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import model_of
from mesh.session.client_request import ClientRequest
from mesh.session.record import NO_TRACE, Ending, OpenRequest, Step, StepKind, Trace
from schemas import exchange, subjects
from schemas.decision import Placement
from schemas.exchange import Outcome, Refusal
from schemas.ids import RegionId

HOST_CHARS_MAX = 255
_REASONS = frozenset(Refusal)
_OUTCOMES = frozenset(Outcome)
NS = 1_000_000_000
TURN_NS = NS // 10  # of the loop
TRACE_IN_HEADER = slice(3, 35)  # of a `traceparent`


def _first_byte(record: OpenRequest) -> tuple[float | None, bool]:
    """Seconds to an answer's first byte, None without one, and whether it is a stream."""
    if not isinstance(record, ClientRequest) or record.first_byte_at is None:
        return None, False
    assert record.answer is not None
    return record.first_byte_at - record.request.arrived_at, record.answer.is_event_stream


class PassedOn(Trace):
    """A trace to which this process adds nothing."""

    is_traced = True

    def __init__(self, headers: Mapping[str, str], parent: TraceContext) -> None:
        self._headers = headers
        self.trace_id = parent.trace

    def dispatched(self, effect: fx.Dispatch | fx.Forward, headers: dict[str, str]) -> None:
        headers.update(self._headers)

    prefill_dispatched = dispatched


class _Spans(Trace):
    """Makes spans of a request's steps, below a root."""

    is_traced = True

    def __init__(
        self,
        tracer: tracing.Tracer,
        parent: TraceContext | None,
        context: TraceContext | None = None,
    ) -> None:
        """`context`: of the root, where it is known already."""
        self._began_ns = time_ns()
        self._tracer, self._parent = tracer, parent
        self._context = context or tracer.begin(parent)
        self.is_recording = self._context.is_sampled
        self.trace_id = self._context.trace

    def _send_root(
        self, name: str, kind: SpanKind, ended_ns: int, attributes: Attributes, ending: Ending
    ) -> None:
        if ending.error_type:
            attributes[names.ERROR_TYPE] = ending.error_type
        self._tracer.send(
            name,
            self._context,
            self._parent,
            kind=kind,
            began_ns=self._began_ns,
            ended_ns=ended_ns,
            attributes=attributes,
            error=ending.detail,
        )

    def _send_child(
        self,
        name: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
        *,
        context: TraceContext | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> None:
        if context is None or context.span_id == self._context.span_id:
            context = tracing.child(self._context)
        self._tracer.send(
            name,
            context,
            self._context,
            kind=kind,
            began_ns=began_ns,
            ended_ns=ended_ns,
            attributes=attributes,
            error=error,
        )


def request_trace(
    tracer: tracing.Tracer,
    parent: TraceContext | None = None,
    tail: TailRule | None = None,
    host: str = "",
) -> Trace:
    """Of one client's request; `end` must be called once.

    `tail` decides about a request that is not sampled; `host` is the request's header.
    """
    begun = tracer.begin_request(parent)
    if isinstance(begun, str):
        return UnsampledRequest(tracer, parent, begun, tail, host)
    return RequestSpans(tracer, parent, begun, host)


class UnsampledRequest(Trace):
    """A request that is not sampled: most are, so this does the least that lets it be traced if it
    fails or is slow."""

    __slots__ = ("_header", "_host", "_parent", "_sent", "_tail", "_tracer", "quiet_s", "trace_id")
    is_traced = True

    def __init__(
        self,
        tracer: tracing.Tracer,
        parent: TraceContext | None,
        header: str,
        tail: TailRule | None,
        host: str,
    ) -> None:
        """`header`: its `traceparent`."""
        self._tracer, self._parent, self._header = tracer, parent, header
        self._tail, self._host = tail, host
        self.quiet_s = inf if tail is None else tail.soonest_s
        self._sent: tuple[fx.Dispatch | fx.Forward, ...] = ()
        self.trace_id = header[TRACE_IN_HEADER]

    def dispatched(self, effect: fx.Dispatch | fx.Forward, headers: dict[str, str]) -> None:
        self.prefill_dispatched(effect, headers)
        self._sent += (effect,)

    def prefill_dispatched(self, effect: fx.Dispatch | fx.Forward, headers: dict[str, str]) -> None:
        headers[trace_context.PARENT] = self._header
        if self._parent is not None and self._parent.state:
            headers[trace_context.STATE] = self._parent.state

    def end(self, record: OpenRequest, ending: Ending) -> None:
        tail, duration_s = self._tail, ending.ended_at - record.request.arrived_at
        if tail is None:
            return
        ttft_s, is_stream = _first_byte(record)
        reason = tail.keeps(ending, ttft_s if is_stream else None, duration_s)
        if reason is not None:
            headers: dict[str, str] = {}
            if self._parent is not None:
                self._parent.write(headers)
            headers[trace_context.PARENT] = self._header
            context = trace_context.read(headers)
            assert context is not None
            context = context._replace(is_remote=False)
            kept = RequestSpans(self._tracer, self._parent, context, self._host)
            kept.end_kept(record, ending, self._sent, reason)


class RequestSpans(_Spans):
    """The spans of a request that is sampled, or kept. `end` must be called once."""

    def __init__(
        self,
        tracer: tracing.Tracer,
        parent: TraceContext | None = None,
        context: TraceContext | None = None,
        host: str = "",
    ) -> None:
        super().__init__(tracer, parent, context)
        self._host = host
        self._sent: dict[int, _Sent] = {}  # attempts, which are few, by number
        self._prefills: dict[int, _Sent] = {}  # their prefill stages, and when these ended
        self._prefills_ended: dict[int, tuple[int, ev.Event | None]] = {}

    def dispatched(self, effect: fx.Dispatch | fx.Forward, headers: dict[str, str]) -> None:
        self._sent[effect.attempt] = effect, self._sends(headers), time_ns()

    def prefill_dispatched(self, effect: fx.Dispatch, headers: dict[str, str]) -> None:
        self._prefills[effect.attempt] = effect, self._sends(headers), time_ns()

    def prefill_ended(self, attempt: int, event: ev.Event | None) -> None:
        self._prefills_ended[attempt] = time_ns(), event

    def _sends(self, headers: dict[str, str]) -> TraceContext:
        context = tracing.child(self._context)
        context.write(headers)
        return context

    def end(self, record: OpenRequest, ending: Ending) -> None:
        self._tracer.later(partial(self._send, record, ending, time_ns(), ""))

    def end_kept(
        self,
        record: OpenRequest,
        ending: Ending,
        sent: Sequence[fx.Dispatch | fx.Forward],
        reason: str,
    ) -> None:
        """The end of a request that was not sampled, with the attempts that left for the bus."""
        ended_ns = time_ns()
        self._began_ns = ended_ns - round((ending.ended_at - record.request.arrived_at) * NS)
        self._sent = {effect.attempt: (effect, self._context, 0) for effect in sent}
        self._send(record, ending, ended_ns, reason)

    def _send(self, record: OpenRequest, ending: Ending, ended_ns: int, kept_because: str) -> None:
        ttft_s, is_stream = _first_byte(record)
        first_ns = ended_ns if ttft_s is None else self._began_ns + round(ttft_s * NS)
        times = _Times(ending.ended_at, self._began_ns, ended_ns, min(first_ns, ended_ns))
        self._send_steps(record, times, _STARTED if ttft_s is not None else ending)
        for number, sent in self._prefills.items():
            until_ns, event = self._prefills_ended.get(number, (times.ended_ns, None))
            self._send_attempt(record, 0, sent, until_ns, _attempt_ending(event), "prefill")
        about = self._about(record, ending, is_stream=is_stream, has_begun=ttft_s is not None)
        if kept_because:
            about["mesh.kept_because"] = kept_because
        request = record.request
        name = f"{names.operation(record.path)} {model_of(request.model)}"
        self._send_root(name, SpanKind.SERVER, ended_ns, about, ending)

    def _about(
        self, record: OpenRequest, ending: Ending, *, is_stream: bool, has_begun: bool
    ) -> Attributes:
        """The attributes of the root span."""
        request, answer = record.request, record.answer
        about = names.asked_of_model(record.path, model_of(request.model), names.MESH)
        about |= {"mesh.request_id": request.request_id, "mesh.outcome": ending.outcome}
        about |= receipt_attributes(record, is_stream=is_stream)
        if is_stream:
            about[names.STREAM] = True
        if answer is not None and (end := answer.end) is not None:
            about |= names.tokens(end.prompt_tokens, end.cached_tokens, end.completion_tokens)
        about |= {
            names.METHOD: record.method,
            names.ROUTE: record.path,
            names.URL_PATH: record.path,
            names.URL_SCHEME: "http",
            **names.server(self._host[:HOST_CHARS_MAX]),
        }
        if has_begun and answer is not None and answer.head is not None:
            about[names.STATUS] = answer.head.status
        elif ending.outcome != CLIENT_GONE:  # then none was sent
            about[names.STATUS] = ending.status
        return about

    def _send_steps(self, record: OpenRequest, times: "_Times", ending: Ending) -> None:
        """Spans of holds, decisions and attempts. `ending`: of an attempt that nothing followed."""
        held_ns: int | None = None
        refused_ns, held_s = 0, 0.0
        attempt: tuple[int, _Sent] | None = None
        for step in _turns(record):
            at_ns, what = times.of(step), step.what
            if attempt is not None:
                self._send_attempt(record, *attempt, at_ns, _attempt_ending(what, step.outcome))
                attempt, refused_ns = None, at_ns
            if not isinstance(what, fx.Decided):
                continue
            decision = what.decision
            if held_ns is None and refused_ns and decision.held_s > held_s:
                held_ns = refused_ns  # the core returned it to the hold queue, and said nothing
            if held_ns is not None:
                self._send_child("mesh.hold", held_ns, at_ns, {})
            held_ns, held_s = None, decision.held_s
            self._send_child("mesh.decide", at_ns, at_ns, decision_attributes(decision))
            if decision.placement is Placement.HOLD:
                held_ns = at_ns
            elif decision.placement is not Placement.SHED and decision.attempt in self._sent:
                attempt = at_ns, self._sent[decision.attempt]
        if held_ns is not None:
            self._send_child("mesh.hold", held_ns, times.ended_ns, {})
        if attempt is not None:
            self._send_attempt(record, *attempt, times.first_byte_ns, ending)

    def _send_attempt(
        self, record: OpenRequest, began_ns: int, sent: "_Sent", ended_ns: int, ending: Ending,
        stage: str = "",
    ) -> None:  # fmt: skip
        effect, context, sent_ns = sent
        if isinstance(effect, fx.Dispatch):
            template, target = names.WORK_TEMPLATE, str(effect.replica)
            subject = subjects.work(effect.region or _home(record), effect.replica)
        elif record.request.residency:
            template, target, subject = names.INGRESS_WITHIN_TEMPLATE, str(effect.peer), ""
        else:
            template, target = names.INGRESS_TEMPLATE, str(effect.peer)
            subject = subjects.ingress(effect.peer)
        about = names.message(names.PUBLISH, subject, template)
        about |= {"mesh.target": target, "mesh.attempt": effect.attempt}
        about |= {"mesh.stage": stage} if stage else {}
        if ending.error_type:
            about[names.ERROR_TYPE] = ending.error_type
        self._send_child(
            f"{names.PUBLISH} {template}",
            sent_ns or began_ns,
            ended_ns,
            about,
            context=context,
            kind=SpanKind.PRODUCER,
            error=ending.detail,
        )


# An attempt, its context on the bus and when it was sent: exact where others have spans below it,
# since the clock of steps stands still within a turn of the loop; 0 where it is that of its step.
_Sent = tuple[fx.Dispatch | fx.Forward, TraceContext, int]


class _Times(NamedTuple):
    """When a request ended, by the clock of its steps and in nanoseconds since 1970.

    That clock stands still within a turn of the loop, so by it a step may seem to be before the
    request's span: it is not.
    """

    ended_at: float
    began_ns: int
    ended_ns: int
    first_byte_ns: int  # of its answer, or its end

    def of(self, step: Step) -> int:
        return self.at(step.at)

    def at(self, at: float) -> int:
        at_ns = self.ended_ns - round((self.ended_at - at) * NS)
        return self.began_ns if 0 < self.began_ns - at_ns < TURN_NS else at_ns


def _turns(record: OpenRequest) -> list[Step]:
    """Without those by which an attempt went on, at a peer or after its prefill stage."""
    return [step for step in record.steps if not isinstance(step.what, _GOES_ON)]


_GOES_ON = exchange.Placed, ev.PrefillEnded
_STARTED = Ending("ok", 0)
_GIVEN_UP = Ending("failed", 0, "given_up", "the router gave it up")


def _home(record: OpenRequest) -> RegionId:
    """The region of the router that placed it."""
    assert record.decision is not None, "no attempt without a decision"
    return RegionId(record.decision.region)


def _attempt_ending(what: StepKind | ev.Event | None, outcome: str = "") -> Ending:
    """How an attempt ended; its kind of error is one of a few, whatever the agent wrote."""
    if isinstance(what, ev.PrefillEnded):
        return _STARTED
    if isinstance(what, ev.AttemptRefused):
        reason = what.reason if what.reason in _REASONS else "other"
        return Ending("refused", 0, reason, f"refused: {reason}")
    if not isinstance(what, ev.AttemptFailed):
        return _GIVEN_UP
    if what.status is not None:
        return Ending("failed", 0, str(what.status), what.detail)
    return Ending("failed", 0, outcome if outcome in _OUTCOMES else "lost", what.detail)


class IngressSpan(_Spans):
    """The peer's side of a sampled request: placed or refused at once."""

    def __init__(
        self, tracer: tracing.Tracer, parent: TraceContext | None, origin: str, subject: str
    ) -> None:
        super().__init__(tracer, parent)
        self._origin, self._subject = origin, subject

    def dispatched(self, effect: fx.Dispatch | fx.Forward, headers: dict[str, str]) -> None:
        self._context.write(headers)

    prefill_dispatched = dispatched

    def end(self, record: OpenRequest, ending: Ending) -> None:
        if self.is_recording:
            self._tracer.later(partial(self._send, record, ending, time_ns()))

    def _send(self, record: OpenRequest, ending: Ending, ended_ns: int) -> None:
        times = _Times(ending.ended_at, self._began_ns, ended_ns, ended_ns)
        for step in record.steps:
            if not isinstance(step.what, fx.Decided):
                continue
            at_ns, decision = times.of(step), step.what.decision
            if decision.held_s > 0.0:  # the core reports the wait when it is over
                self._send_child("mesh.hold", times.at(step.at - decision.held_s), at_ns, {})
            self._send_child("mesh.decide", at_ns, at_ns, decision_attributes(decision))
        is_within = subjects.ingress_label(self._subject) is not None
        template = names.INGRESS_WITHIN_TEMPLATE if is_within else names.INGRESS_TEMPLATE
        about = names.message(names.PROCESS, self._subject, template)
        request = record.request
        about |= names.asked_of_model(record.path, model_of(request.model), names.MESH)
        about |= {"mesh.request_id": request.request_id, "mesh.origin": self._origin}
        about |= {"mesh.outcome": ending.outcome}
        if ending.error_type:
            ending = ending._replace(detail=f"refused: {ending.error_type}")
        name = f"{names.PROCESS} {template}"
        self._send_root(name, SpanKind.CONSUMER, ended_ns, about, ending)


def ingress_trace(headers: Mapping[str, str], origin: str, subject: str) -> Trace:
    """Of a peer's request. Its headers go on to the agent, and with them a trace that this process
    has no spans of: only its id is known then."""
    parent, tracer = trace_context.read(headers), tracing.active
    if parent is not None and (tracer is None or not parent.is_sampled):
        return PassedOn({}, parent)
    if tracer is None:
        return NO_TRACE
    return IngressSpan(tracer, parent, origin, subject)
