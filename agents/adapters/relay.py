"""One response: the engine's bytes, untouched, from its HTTP response to the request's inbox.

HEAD goes out with the first content and not before, because until then the router can place the
request elsewhere: comments, opening events and a chat's role are held back, as are a plain answer's
leading white space. After that a chunk in is a frame out. Only content is a sign that the engine
computes (`EngineClient.last_content_at`).

A relay ends exactly once, with one END frame and one `RelayEnded`: the engine ends well or badly,
or `abort` closes the engine's connection, which aborts the generation. Once all of a response was
received (`[DONE]`, or the end of the body), an abort or a lost connection changes nothing. A stream
whose first event is an error becomes the HTTP error that it amounts to.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agents.adapters.engine import (
    KEY_REQUIRED,
    EngineClient,
)
from agents.adapters.engine_answer import DONE, HEAD_BYTES, JSON, EngineAnswer, RelayResult
from agents.adapters.engine_request import ReplicaSite, engine_request
from agents.adapters.http_client import Connection, HttpBroken, HttpUnreached, ResponseHead
from agents.adapters.outbox import FrameWriter
from agents.adapters.spans import Answered, AnswerTrace
from agents.core.answer_stream import FlowWindow
from agents.core.effects import StartRelay
from agents.core.engine_limit import retry_after_s
from agents.core.engine_results import BROKEN, CUT, NO_ANSWER, NO_CONNECTION, by_status
from agents.core.events import NO_USAGE, RelayBegan, RelayEnded, TokenUsage
from agents.core.kv_stages import ANSWER_BYTES_MAX, StageInvalid, handed_out
from agents.core.stream_content import OPENING_BYTES_MAX, starts_events
from agents.core.stream_errors import StreamError
from agents.core.usage import UsageEventRemoval
from schemas.engine_routes import GENERATING_PATHS, OPTIONAL_PATHS, PLAIN_PATHS
from schemas.exchange import H_KEEPER, End, Frame, Head, Outcome, Refusal, Refused
from schemas.http_statuses import (
    NOT_FOUND,
    NOT_IMPLEMENTED,
    PATH_UNKNOWN,
    SUCCESS,
    UNAUTHORIZED,
)
from schemas.ids import ModelId
from schemas.kv_transfer import KvRole
from schemas.wire import encode

TEXT_MAX = 500


class Relay:
    """One response. Run `run` in a task of its own; call `abort` and `credit` from outside.

    `began` is awaited at the first content.
    """

    def __init__(
        self,
        start: StartRelay,
        *,
        engine: EngineClient,
        frames: FrameWriter,
        site: ReplicaSite,
        clock: Callable[[], float],
        began: Callable[[RelayBegan], Awaitable[None]],
        adapter: ModelId | None = None,
    ) -> None:
        """`adapter`: the one that the request is for, if it is not for a model."""
        self._start: StartRelay | None = start  # until it is sent: its body may be large
        work = start.work
        self._stage, self._call = work.stage, work.call
        self._inbox, self._path = start.inbox, work.path
        self._engine, self._frames, self._site = engine, frames, site
        self._clock, self._began, self._adapter = clock, began, adapter
        self._started_at = clock()
        self._first_byte_at: float | None = None
        self._answer = EngineAnswer(work.path, work.request_id, is_call=work.call is not None)
        self._window = FlowWindow(work.first_window)
        self._unsent = bytearray()  # beyond the window
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        # Whether a chunk shows that the engine computes.
        self._shows_work: Callable[[bytes], bool] = _nothing
        self._goes_on = H_KEEPER in start.headers
        self._model = work.model or None  # a call about a response names none
        self._removal: UsageEventRemoval | None = None  # of an event that no client asked for
        self._trace = AnswerTrace(start.headers)
        self._response: Connection | None = None  # while it is read
        self._reading: asyncio.Task[Any] | None = None  # while it may be cancelled
        self._aborted: RelayResult | None = None
        self._received: RelayResult | None = None  # once all of the response was received

    def credit(self, consumed_bytes: int) -> None:
        self._frames.is_known = True
        self._window.credit(consumed_bytes)
        if self._unsent and self._window.open:
            chunk, self._unsent = bytes(self._unsent), bytearray()
            self._send(chunk)
        if not self._unsent:
            self._all_sent.set()
        if self._window.open and self._response is not None:
            self._response.resume()
            self._engine.held.discard(self._inbox)

    def abort(self, outcome: Outcome, detail: str, refused: Refused | None = None) -> None:
        """Close the engine's connection at once. Without effect when the response is over.

        `refused`: sent instead of END if no frame of the response was sent.
        """
        if self._aborted is None:
            self._aborted = RelayResult(outcome, detail, refused)
            if self._reading is not None:
                self._reading.cancel()

    async def run(self) -> RelayEnded:
        result = self._aborted or await self._result()
        answer, usage = self._answer, NO_USAGE
        if answer.tail.total and not self._call:  # else it is not of this request
            usage = answer.usage(self._engine.left_out)
        began_at = self._first_byte_at
        if self._trace.is_recording:
            self._send_spans(result, usage)
        if result.refused is not None and began_at is None:
            self._frames.send(Frame.REFUSED, encode(result.refused))
        else:
            if self._removal is not None and (rest := self._removal.rest()):
                self._frames.data(rest)
            end = End(
                outcome=result.outcome,
                detail=result.detail,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_s=-1.0 if began_at is None else began_at - self._started_at,
            )
            self._frames.send(Frame.END, encode(end))
        return RelayEnded(
            inbox=self._inbox,
            outcome=result.outcome,
            usage=usage,
            streamed=answer.streamed,
            verdict=answer.verdict_of(result, is_aborted=result is self._aborted),
        )

    def _send_spans(self, result: RelayResult, usage: TokenUsage) -> None:
        began_at, answer, site = self._first_byte_at, self._answer, self._site
        ttft_s = None if began_at is None else began_at - self._started_at
        self._trace.send(
            Answered(result.outcome, result.detail, usage, answer.status, ttft_s, answer.streamed),
            method="POST" if self._call is None else self._call.method,
            path=self._path,
            region=site.region,
            replica=site.replica,
            kind=site.engine_kind,
            engine=self._engine.api.address,
        )

    async def _result(self) -> RelayResult:
        self._reading = task = asyncio.current_task()
        assert task is not None
        if self._trace.is_recording:
            self._trace.engine_began()
        try:
            return await self._request()
        except asyncio.CancelledError:
            # Our own cancel, or the whole agent is being cancelled.
            if self._aborted is None or task.uncancel() > 0:
                raise
            return self._received or self._aborted
        finally:
            self._reading = None  # from here on a cancel would hit the END frame
            if self._trace.is_recording:
                self._trace.engine_ended()

    async def _request(self) -> RelayResult:
        api, start = self._engine.api, self._start
        assert start is not None, "it runs once"
        self._start = None
        try:
            asked = engine_request(
                start, self._engine, self._site, self._adapter, self._trace.headers
            )
            if asked.adds_usage:
                self._removal = UsageEventRemoval()
            response = await api.request(asked.method, asked.target, asked.headers, asked.body)
            del start, asked  # up to 32 MiB that are not needed during a long response
            self._response = response
            relay = self._relay if self._stage is None else self._relay_stage
            try:
                return await relay(response, await response.head())
            finally:
                self._response = None
                self._engine.held.discard(self._inbox)
                api.release(response)
        except OSError as problem:
            failure = self._how_lost(problem)
            return self._received or RelayResult(
                Outcome.ENGINE_LOST, _described(problem), failure=failure
            )
        except (HttpBroken, StageInvalid) as problem:
            # Before the engine answered, a stage is invalid by the request's body.
            is_its = isinstance(problem, HttpBroken) or self._answer.status is not None
            return self._received or RelayResult(
                Outcome.ENGINE_BROKEN, _described(problem), failure=BROKEN if is_its else None
            )

    def _how_lost(self, problem: OSError) -> str:
        if self._answer.status is not None:
            return CUT
        return NO_CONNECTION if isinstance(problem, HttpUnreached) else NO_ANSWER

    async def _relay(self, response: Connection, head: ResponseHead) -> RelayResult:
        answer = self._answer
        answer.status = head.status
        unserved = await self._other_engine(response) or self._unserved(head)
        if unserved is not None:
            return unserved
        answer.began(head)
        if not answer.streamed:
            self._removal = None
        first, has_content = await self._first_bytes(response)
        if answer.content is not None and answer.content.error is not None:
            return await self._send_error(answer.content.error)
        if (no_answer := answer.no_answer(first, has_content=has_content)) is not None:
            return no_answer
        self._learn_path(head.status, first)
        await self._send_head(head)
        if self._aborted is not None:  # and the cancel was swallowed on the way
            return self._aborted
        if first:
            answer.head = first[:HEAD_BYTES]
            self._pass_on(first)
        self._watch_work(has_content=has_content)
        try:
            await self._pass_all(response)
        except (OSError, HttpBroken, asyncio.CancelledError):
            if not self._unsent and (response.is_ended or answer.has_last_event):
                judged = self._judged(response)
                self._received = judged if response.is_ended or judged is DONE else None
            raise
        return self._judged(response)

    async def _pass_all(self, response: Connection) -> None:
        """Pass on the rest of the body, and wait until all of it is sent, also where the engine's
        connection breaks. A cancel does not wait."""
        try:
            await response.stream_to(self._pass_on)
        except (OSError, HttpBroken):
            await self._all_sent.wait()
            raise
        await self._all_sent.wait()

    def _watch_work(self, *, has_content: bool) -> None:
        """From here on content shows that the engine computes; so does the first, if it came."""
        answer = self._answer
        if answer.is_good and answer.is_computed:
            self._shows_work = _is_text if answer.content is None else answer.content.came
            if has_content:
                self._engine.last_content_at = self._clock()

    def _judged(self, response: Connection) -> RelayResult:
        """The result of a response that was received to its end."""
        ends, parses = self._engine.ends, response.ends_with_connection
        return self._answer.judged(ends, self._started_at, self._clock(), parses=parses)

    async def _relay_stage(self, response: Connection, head: ResponseHead) -> RelayResult:
        """Of a prefill stage's good answer, send only what the decode engine needs."""
        is_handed_out = self._stage is not None and self._stage.role is KvRole.PREFILL
        transfer = self._site.transfer
        if not is_handed_out or head.status not in SUCCESS or transfer is None:
            return await self._relay(response, head)
        self._answer.status = head.status
        if (unserved := await self._other_engine(response)) is not None:
            return unserved
        self._answer.is_good = True
        answer = bytearray()
        while chunk := await response.read():
            answer += chunk
            if len(answer) > ANSWER_BYTES_MAX:
                raise StageInvalid(f"the prefill engine's answer is over {ANSWER_BYTES_MAX} bytes")
        params = handed_out(bytes(answer), transfer)
        self._answer.tail.add(bytes(answer))
        await self._send_head(ResponseHead(head.status, JSON))
        self._frames.data(params)
        return DONE

    # Answers that are none to the client's request.

    async def _other_engine(self, response: Connection) -> RelayResult | None:
        """The result of an answer by an engine that serves other models, in this one's place."""
        if self._model is None or await self._engine.still_serves(self._model, response):
            return None
        return self._not_here("the engine serves other models now")

    def _unserved(self, head: ResponseHead) -> RelayResult | None:
        """The result of a status that is no answer to the client's request; None for any other."""
        status = head.status
        if status in SUCCESS:
            return None
        self._answer.verdict = by_status(status, f"HTTP {status}", retry_after_s(head.headers))
        if status == UNAUTHORIZED:  # of this agent, and no fault of the client
            self._engine.refused_key()
            why = f"the engine {KEY_REQUIRED}"
            return RelayResult(Outcome.ENGINE_BROKEN, why, failure=f"HTTP {status}")
        if status not in PATH_UNKNOWN or self._goes_on:
            return None  # 404 may be what vLLM says of a response that it does not keep
        is_gone = self._adapter is not None and status == NOT_FOUND
        if is_gone and self._path in PLAIN_PATHS:  # the adapter was unloaded in the meantime
            self._engine.refresh_models()
            return self._not_here(f"the engine has no adapter {self._adapter} any more")
        # It answered on this path before. Another engine may have its place, or it is about this
        # request, as 404 is of a model that only another path knows.
        if not (self._says_no_path(status) and self._engine.lacks(self._path)):
            return None
        return self._not_here(f"the engine answers {status} on {self._path}")

    def _says_no_path(self, status: int) -> bool:
        """Whether a status says that the engine has no such optional path. About the request are
        404 where the engine keeps what it goes on with, and vLLM's 501 to a field of a request."""
        if status not in PATH_UNKNOWN or self._path not in OPTIONAL_PATHS or self._goes_on:
            return False
        return status != NOT_IMPLEMENTED or self._path not in GENERATING_PATHS

    def _learn_path(self, status: int, first: bytes) -> None:
        """`first`: of an answer that has begun well."""
        tells = self._path in OPTIONAL_PATHS
        tells = tells and (self._answer.is_good or self._says_no_path(status))
        if tells and self._model is not None:
            self._engine.answered(self._model, self._path, status, first)

    def _not_here(self, why: str) -> RelayResult:
        refused = Refused(Refusal.WRONG_MODEL, self._site.region, self._site.replica, -1, -1)
        return RelayResult(Outcome.ENGINE_LOST, why, refused)

    # What goes out.

    async def _first_bytes(self, response: Connection) -> tuple[bytes, bool]:
        """What comes until the first content, and that; whether there was any. An engine, or a
        server in front of it, may send other bytes before anything is computed."""
        first = chunk = await response.read()
        answer, content = self._answer, self._answer.content
        while chunk and len(first) < OPENING_BYTES_MAX:
            if content is not None and starts_events(first) is False:
                return first, False
            has_content = _is_text(chunk) if content is None else content.came(chunk)
            if has_content or not answer.is_good:
                return first, has_content
            chunk = await response.read()
            first += chunk
        if content is not None:
            content.ended()
        return first, False

    async def _send_error(self, error: StreamError) -> RelayResult:
        """Answer with the HTTP error that the stream's first event amounts to."""
        self._answer.is_error(error)
        self._removal = None
        await self._send_head(ResponseHead(error.status, JSON))
        self._pass_on(error.body)
        await self._all_sent.wait()
        return DONE

    async def _send_head(self, head: ResponseHead) -> None:
        self._first_byte_at = self._clock()
        is_doubted = False
        if self._answer.is_good:
            self._engine.client_errors.in_a_row = 0
        elif self._call is None and not self._goes_on:  # it may be of its body
            is_doubted = self._engine.client_errors.are_doubted(head.status)
        message = Head(
            status=head.status,
            content_type=head.content_type[:TEXT_MAX],
            region=self._site.region,
            replica=self._site.replica,
            headers=head.headers,
            doubted=int(is_doubted),
        )
        self._frames.send(Frame.HEAD, encode(message))
        await self._began(RelayBegan(self._inbox, self._answer.is_good))

    def _pass_on(self, chunk: bytes) -> None:
        if self._shows_work(chunk):
            self._engine.last_content_at = self._clock()
        self._answer.tail.add(chunk)
        if self._removal is not None:
            chunk = self._removal.without_event(chunk)
            if not chunk:
                return
        self._send(chunk)

    def _send(self, chunk: bytes) -> None:
        if self._window.send(len(chunk)):
            self._frames.data(chunk)
        else:
            self._send_within(chunk)

    def _send_within(self, chunk: bytes) -> None:
        """A chunk that was counted as sent and closes the window: send as much as it has room for,
        and keep the rest until the next credit."""
        if over := self._window.take_back():
            self._unsent += chunk[len(chunk) - over :]
            self._all_sent.clear()
            chunk = chunk[: len(chunk) - over]
        if chunk:
            self._frames.data(chunk)
        if self._response is not None:
            self._response.pause()
            self._engine.held.add(self._inbox)


def _nothing(_chunk: bytes) -> bool:
    return False


def _is_text(chunk: bytes) -> bool:
    """Whether a chunk of a plain answer is more than white space, which servers send to wait."""
    return not chunk.isspace()


def _described(problem: BaseException) -> str:
    text = str(problem) or type(problem).__name__
    return text[:TEXT_MAX].encode("utf-8", "replace").decode()
