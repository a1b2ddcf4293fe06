"""One answer: the engine's bytes, untouched, from its HTTP response to the asker's inbox.

HEAD goes out with the first body byte and not before, because until then the router can place
the request elsewhere and no client is the wiser. For the same reason a stream's first bytes are
held for a moment until they prove to be events. After that nothing is held back, parsed or put
together: a chunk in is a frame out.

A relay ends exactly once, with one END frame and one `AnswerEnded`, whatever happens: the engine
ends well or badly, or `abort` cuts the conversation, which closes the engine's connection and by
that aborts the generation. An answer of which everything has been received is not cut any more: an
abort, or a connection that is lost, changes nothing after `[DONE]` or the end of the body.

A stream whose first event is an error becomes the HTTP error that it stands for, so that the
router treats it as any other (`agents.core.engine_error`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace

from agents.adapters.engine import KEY_WANTED, STATUS_UNAUTHORIZED, Engine, is_good
from agents.adapters.frames import FrameWriter
from agents.adapters.http_connection import Connection, HttpBroken
from agents.adapters.http_connection import Head as HttpHead
from agents.core.effects import Hand
from agents.core.engine_error import EngineError, first_error, last_error
from agents.core.events import AnswerBegan, AnswerEnded
from agents.core.reading import NO_USAGE, Usage
from agents.core.stream import Tail, ends_events, has_said_all, starts_events
from agents.core.usage import read_usage
from agents.core.window import Window
from infra import tracing
from schemas.exchange import End, Frame, Head, Outcome, Refused
from schemas.ids import RegionId, ReplicaId

log = logging.getLogger(__name__)
_tracer = tracing.tracer(__name__)

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
TEXT_MAX = 500


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer ended, and for people why. `refused`: said instead if it has not begun."""

    outcome: Outcome
    detail: str = ""
    refused: Refused | None = None


_DONE = Verdict(Outcome.DONE)


class Relay:
    """One answer in the making. Run `run` in a task of its own; `abort` and `credit` from outside.

    `began` is awaited at the first body byte.
    """

    def __init__(
        self,
        hand: Hand,
        *,
        engine: Engine,
        frames: FrameWriter,
        region: RegionId,
        replica: ReplicaId,
        clock: Callable[[], float],
        began: Callable[[AnswerBegan], Awaitable[None]],
    ) -> None:
        self._inbox, self._path, self._request_id = hand.inbox, hand.path, hand.request_id
        self._headers = hand.headers
        self._body = hand.body
        self._engine = engine
        self._frames = frames
        self._region, self._replica = region, replica
        self._clock = clock
        self._began = began
        self._handed_at = clock()
        self._first_byte_at: float | None = None
        self._streamed = self._is_good = False
        self._span: trace.Span = trace.INVALID_SPAN
        self._passed_on = tracing.unsampled(hand.headers)  # to the engine, of nobody's trace
        self._tail = Tail()
        self._window = Window()
        self._answer: Connection | None = None  # on which the engine answers
        self._talking: asyncio.Task[Any] | None = None  # while it may be cancelled
        self._aborted: Verdict | None = None
        self._received: Verdict | None = None  # what it amounts to, once all of it was received

    def credit(self, consumed_bytes: int) -> None:
        """The client is so far."""
        self._window.credit(consumed_bytes)
        if self._window.open and self._answer is not None:
            self._answer.go_on()
            self._hold(False)

    def abort(self, outcome: Outcome, detail: str, refused: Refused | None = None) -> None:
        """Cut the conversation at once. Without effect when it is over already.

        `refused`: what to say instead of an END if nothing of the answer was said.
        """
        if self._aborted is None:
            self._aborted = Verdict(outcome, detail, refused)
            if self._talking is not None:
                self._talking.cancel()

    async def run(self) -> AnswerEnded:
        """Relay the answer to its END frame; what came of it."""
        if self._passed_on:
            return await self._run()
        self._span = span = _tracer.start_span(
            "agent.answer",
            context=tracing.extract(self._headers),
            kind=trace.SpanKind.CONSUMER,
            attributes={"mesh.region": self._region, "mesh.replica": self._replica},
        )
        if not span.is_recording():  # contexts cost more than all else that is done here
            return await self._run()
        with trace.use_span(span, end_on_exit=True):
            return await self._run()

    async def _run(self) -> AnswerEnded:
        verdict = await self._outcome()
        usage = read_usage(self._tail.read()) if self._tail.total else NO_USAGE
        if self._span.is_recording():
            self._span.set_attributes(_attributes(verdict, usage, self._ttft_s))
        if verdict.refused is not None and self._first_byte_at is None:
            self._frames.say(Frame.REFUSED, verdict.refused)
        else:
            self._frames.say(Frame.END, self._end(verdict, usage))
        return AnswerEnded(
            inbox=self._inbox,
            outcome=verdict.outcome,
            usage=usage,
            streamed=self._streamed,
        )

    @property
    def _ttft_s(self) -> float:
        return -1.0 if self._first_byte_at is None else self._first_byte_at - self._handed_at

    def _end(self, verdict: Verdict, usage: Usage) -> End:
        return End(
            outcome=verdict.outcome,
            detail=verdict.detail,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=self._ttft_s,
        )

    async def _outcome(self) -> Verdict:
        if (cut := self._cut()) is not None:
            return cut
        self._talking = task = asyncio.current_task()
        assert task is not None
        try:
            return await self._converse()
        except asyncio.CancelledError:
            # Our own cancel, or the whole agent is being cancelled.
            cut = self._cut()
            if cut is None or task.uncancel() > 0:
                raise
            return self._received or cut
        finally:
            self._talking = None  # from here on a cancel would hit the END frame

    def _cut(self) -> Verdict | None:
        return self._aborted

    async def _converse(self) -> Verdict:
        if not self._span.is_recording():
            return await self._called()
        with _tracer.start_as_current_span("engine.call", kind=trace.SpanKind.CLIENT):
            return await self._called()

    async def _called(self) -> Verdict:
        try:
            return await self._exchange(self._request_headers())
        except OSError as problem:
            return self._received or Verdict(Outcome.ENGINE_LOST, _described(problem))
        except HttpBroken as problem:
            return self._received or Verdict(Outcome.ENGINE_BROKEN, _described(problem))

    def _request_headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", **self._passed_on}
        if self._request_id:
            headers["X-Request-Id"] = self._request_id
        if self._span.is_recording():
            tracing.inject(headers)
        else:
            # The asker's trace reaches the engine even where this process sends no spans.
            tracing.inject_unrecorded(headers, self._span)
        return headers

    async def _exchange(self, headers: dict[str, str]) -> Verdict:
        self._answer = answer = await self._engine.post(self._path, self._body, headers)
        self._body = b""  # up to 32 MiB that nobody needs during a long answer
        try:
            return await self._relay(answer)
        finally:
            self._answer = None
            self._hold(False)
            self._engine.release(answer)

    async def _relay(self, answer: Connection) -> Verdict:
        head = await answer.until_head()
        if head.status == STATUS_UNAUTHORIZED:  # of this agent, and no fault of the client
            self._engine.refused_key()
            return Verdict(Outcome.ENGINE_BROKEN, f"the engine {KEY_WANTED}")
        good = is_good(head.status)
        self._streamed = good and _media_type(head) == EVENT_STREAM
        first = await self._first_bytes(answer)
        if self._streamed:
            if not starts_events(first):
                return Verdict(Outcome.ENGINE_BROKEN, f"no event stream: {first[:80]!r}")
            if isinstance(error := first_error(first, more=False), EngineError):
                return await self._say_error(error)
        if good and not first:
            return Verdict(Outcome.ENGINE_BROKEN, f"HTTP {head.status} with an empty body")
        await self._head(head)
        if (cut := self._cut()) is not None:  # and the cancel was swallowed on the way
            return cut
        if first:
            self._pass_on(first)
        try:
            await answer.pour(self._pass_on)
        except (OSError, HttpBroken, asyncio.CancelledError):
            if answer.is_ended or (self._streamed and has_said_all(self._tail.read())):
                self._received = self._judged()
            raise
        return self._judged()

    async def _first_bytes(self, answer: Connection) -> bytes:
        """The first chunk; of a stream as many as it takes to tell what it begins with."""
        first = await answer.read()
        while first and self._streamed and _is_undecided(first):
            chunk = await answer.read()
            if not chunk:
                break
            first += chunk
        return first

    async def _say_error(self, error: EngineError) -> Verdict:
        """Answer with the HTTP error that the stream's first event stands for."""
        log.info("%s: the stream begins with an error: %s", self._request_id, error.message)
        self._streamed = False
        await self._head(HttpHead(error.status, JSON))
        self._pass_on(error.body)
        return _DONE

    def _judged(self) -> Verdict:
        """What an answer of which everything was received amounts to."""
        if not self._streamed:
            return _DONE
        if (problem := ends_events(self._tail)) is not None:
            return Verdict(Outcome.ENGINE_BROKEN, problem)
        if (error := last_error(self._tail.read())) is not None:
            log.info("%s: the stream ends with an error: %s", self._request_id, error.message)
            return Verdict(Outcome.ENGINE_FAILED, error.message)
        return _DONE

    async def _head(self, head: HttpHead) -> None:
        self._first_byte_at = self._clock()
        self._is_good = is_good(head.status)
        said = Head(
            status=head.status,
            content_type=head.content_type[:TEXT_MAX],
            region=self._region,
            replica=self._replica,
            headers=head.headers,
        )
        self._frames.say(Frame.HEAD, said)
        await self._began(AnswerBegan(self._inbox, self._is_good))

    def _pass_on(self, chunk: bytes) -> None:
        now = self._clock()
        if self._is_good:
            self._engine.heard_at = now
        self._tail.add(chunk)
        self._frames.data(chunk, now)
        if not self._window.send(len(chunk)) and self._answer is not None:
            self._answer.hold()
            self._hold(True)

    def _hold(self, held: bool) -> None:
        """Whether the engine may have said more than was read."""
        if held:
            self._engine.held.add(self._inbox)
        else:
            self._engine.held.discard(self._inbox)


def _is_undecided(first: bytes) -> bool:
    """Whether more must come to tell what a stream begins with."""
    starts = starts_events(first)
    return starts is None or (starts and first_error(first, more=True) is True)


def _media_type(head: HttpHead) -> str:
    return head.content_type.partition(";")[0].strip().lower()


def _described(problem: BaseException) -> str:
    words = str(problem) or type(problem).__name__
    return words[:TEXT_MAX].encode("utf-8", "replace").decode()


def _attributes(verdict: Verdict, usage: Usage, ttft_s: float) -> dict[str, str | int | float]:
    return {
        "mesh.outcome": verdict.outcome,
        "mesh.ttft_s": ttft_s,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "mesh.cached_tokens": usage.cached_tokens,
    }
