"""The spans of one answer at the agent, made when it is over: the message that brought the request,
and below it the engine's work.

    process mesh.{region}.replica.{replica}.work    from the message to the end of the answer
      chat MODEL                                    the request to the engine; it gets the context

Names and attributes follow `infra.span_conventions`. Whether a trace is sampled is the router's
decision: nothing is recorded of one that is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import time_ns

from opentelemetry.trace import SpanKind

from agents.core.events import TokenUsage
from infra import span_conventions as names
from infra import trace_context, tracing
from infra.address import Address
from infra.span_conventions import Attributes
from schemas import subjects
from schemas.exchange import H_MODEL, H_REQUEST, Outcome
from schemas.ids import RegionId, ReplicaId

_NAME = f"{names.PROCESS} {names.WORK_TEMPLATE}"
_CLIENT_ERROR = 400


@dataclass(frozen=True, slots=True)
class Answered:
    """How an answer ended. `ttft_s`: None where no byte came; `status`: the engine's, of HTTP."""

    outcome: Outcome
    detail: str
    usage: TokenUsage
    status: int | None
    ttft_s: float | None
    is_stream: bool


class AnswerTrace:
    """The trace of one answer. Its `headers` go to the engine."""

    def __init__(self, received: Mapping[str, str]) -> None:
        """`received`: the headers of the message that brought the request."""
        self.headers: dict[str, str] = {}
        self.is_recording = False
        tracer = tracing.active
        if tracer is None and trace_context.PARENT not in received:
            return
        parent = trace_context.read(received)
        if tracer is None or (parent is not None and not parent.is_sampled):
            if parent is not None:
                self.headers = trace_context.passed_on(received)
            return
        self._received, self._tracer, self._parent = received, tracer, parent
        self._context = tracer.begin(parent)
        self.is_recording = self._context.is_sampled
        self._engine = tracing.child(self._context)
        (self._engine if self.is_recording else self._context).write(self.headers)
        self._began_ns = time_ns()
        self._engine_began_ns = self._engine_ended_ns = 0

    def engine_began(self) -> None:
        """The request is being sent to the engine."""
        self._engine_began_ns = time_ns()

    def engine_ended(self) -> None:
        """The engine's answer is over, well or not."""
        self._engine_ended_ns = time_ns()

    def send(
        self,
        answered: Answered,
        *,
        method: str,
        path: str,
        region: RegionId,
        replica: ReplicaId,
        kind: str,
        engine: Address,
    ) -> None:
        """Send both spans, soon. `kind`: of the engine."""
        send = partial(self._send, answered, method, path, region, replica, kind, engine, time_ns())
        self._tracer.later(send)

    def _send(
        self,
        answered: Answered,
        method: str,
        path: str,
        region: RegionId,
        replica: ReplicaId,
        kind: str,
        engine: Address,
        ended_ns: int,
    ) -> None:
        about = {
            **names.message(names.PROCESS, subjects.work(region, replica), names.WORK_TEMPLATE),
            "mesh.request_id": self._received.get(H_REQUEST, ""),
            "mesh.region": region,
            "mesh.replica": replica,
            "mesh.outcome": answered.outcome.value,
        }
        error = answered.outcome is not Outcome.DONE
        if error:
            about[names.ERROR_TYPE] = answered.outcome.value
        self._tracer.send(
            _NAME,
            self._context,
            self._parent,
            kind=SpanKind.CONSUMER,
            began_ns=self._began_ns,
            ended_ns=ended_ns,
            attributes=about,
            error=answered.detail,
        )
        if not self._engine_began_ns:
            return  # it was cancelled before
        call = self._call(answered, method, path, kind, engine)
        self._tracer.send(
            f"{call[names.OPERATION]} {call[names.MODEL]}".strip(),
            self._engine,
            self._context,
            kind=SpanKind.CLIENT,
            began_ns=self._engine_began_ns,
            ended_ns=self._engine_ended_ns,
            attributes=call,
            error=answered.detail if error else "",
        )

    def _call(
        self, answered: Answered, method: str, path: str, kind: str, engine: Address
    ) -> Attributes:
        """The attributes of the request to the engine."""
        usage = answered.usage
        about = names.asked_of_model(path, _model(self._received), kind)
        about |= {names.ADDRESS: engine.host, names.PORT: engine.port, names.METHOD: method}
        about |= names.tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if answered.status is not None:
            about[names.STATUS] = answered.status
        if answered.is_stream:
            about[names.STREAM] = True
            if answered.ttft_s is not None:
                about[names.FIRST_CHUNK_S] = round(answered.ttft_s, 6)
        if answered.outcome is not Outcome.DONE:
            about[names.ERROR_TYPE] = answered.outcome.value
        elif answered.status is not None and answered.status >= _CLIENT_ERROR:
            about[names.ERROR_TYPE] = str(answered.status)
        return about


def _model(received: Mapping[str, str]) -> str:
    """The model that is asked; empty where the message names none."""
    try:
        return subjects.decode_model(received.get(H_MODEL, ""))
    except ValueError:
        return ""
