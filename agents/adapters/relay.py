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
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agents.adapters.engine import (
    CLIENT_ERRORS,
    CLIENT_ERRORS_BELIEVED,
    KEY_REQUIRED,
    PATH_UNKNOWN,
    STATUS_BUSY,
    STATUS_NOT_FOUND,
    STATUS_NOT_IMPLEMENTED,
    STATUS_UNAUTHORIZED,
    SUCCESS,
    EngineClient,
)
from agents.adapters.http_client import Connection, HttpBroken, HttpUnreached, ResponseHead
from agents.adapters.outbox import FrameWriter
from agents.adapters.spans import Answered, AnswerTrace
from agents.core.added_usage import (
    UsageEventRemoval,
    with_response_id,
    with_usage_requested,
)
from agents.core.answer_stream import (
    FlowWindow,
    StreamError,
    Tail,
    incomplete,
    last_error,
    read_early_usage,
    read_usage,
    starts_events,
)
from agents.core.effects import StartRelay
from agents.core.engine_limit import RETRY_S_MIN, retry_after_s
from agents.core.engine_results import (
    ANSWERED,
    BROKEN,
    CUT,
    EMPTY,
    ERROR_FIRST,
    ERROR_INSIDE,
    NO_ANSWER,
    NO_CONNECTION,
    NOT_IN_TIME,
    NOTHING_SAID,
    Verdict,
    by_status,
)
from agents.core.events import NO_USAGE, RelayBegan, RelayEnded, TokenUsage
from agents.core.kv_stages import (
    ANSWER_BYTES_MAX,
    StageInvalid,
    handed_out,
    stage_body,
    stage_request_id,
    whole_body,
)
from agents.core.stream_content import OPENING_BYTES_MAX, StreamContent
from agents.core.stream_end import has_last_event, is_cut_json
from schemas.engine_routes import (
    EARLY_USAGE_PATHS,
    ENGINE_PATHS,
    GENERATING_PATHS,
    OPTIONAL_PATHS,
    PLAIN_PATHS,
    SERVER_PATHS,
)
from schemas.exchange import (
    H_ADD_USAGE,
    H_KEEPER,
    H_MODEL,
    H_TENANT,
    End,
    Frame,
    Head,
    Outcome,
    Refusal,
    Refused,
)
from schemas.http import RESPONSES
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.kv_transfer import KvRole, TransferKind
from schemas.request_headers import for_engine
from schemas.response_ids import SECRET_BYTES, response_id
from schemas.subjects import decode_model
from schemas.wire import encode

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
TEXT_MAX = 500
HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RelayResult:
    """How a response ended and why. `refused`: sent instead if it has not begun."""

    outcome: Outcome
    detail: str = ""
    refused: Refused | None = None
    failure: str | None = None  # how the engine failed the request, if it did


_DONE = RelayResult(Outcome.DONE)


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
        region: RegionId,
        replica: ReplicaId,
        clock: Callable[[], float],
        began: Callable[[RelayBegan], Awaitable[None]],
        engine_kind: str = "openai",
        adapter: ModelId | None = None,
        transfer: TransferKind | None = None,
    ) -> None:
        """`adapter`: the one that the request is for, if it is not for a model. `transfer`: of KV
        caches between engines, where this one has a part in pairs."""
        self._adapter = adapter
        self._stage, self._transfer, self._call = start.stage, transfer, start.call
        self._inbox, self._path, self._request_id = start.inbox, start.path, start.request_id
        self._body = start.body
        self._engine = engine
        self._frames = frames
        self._region, self._replica = region, replica
        self._clock = clock
        self._began = began
        self._started_at = clock()
        self._first_byte_at: float | None = None
        self._streamed = self._is_good = self._is_json = False
        self._content: StreamContent | None = None  # of a good stream
        self._shows_work: Callable[[bytes], bool] = (
            _nothing  # whether a chunk shows that the engine computes
        )
        self._adds_usage = H_ADD_USAGE in start.headers
        self._goes_on = H_KEEPER in start.headers
        self._tenant = start.headers.get(H_TENANT, "")  # where its response is kept
        self._for_engine = for_engine(start.headers)
        named = start.headers.get(H_MODEL)
        self._model = None if named is None or self._call else decode_model(named)
        self._removal: UsageEventRemoval | None = None  # of an event that no client asked for
        self._engine_kind = engine_kind
        self._status: int | None = None  # of the engine's answer
        # The HTTP server of an engine that hangs may answer what is not computed.
        self._is_computed = self._call is None and self._path not in SERVER_PATHS
        # As far as its status or first event says.
        self._verdict = ANSWERED if self._is_computed else NOTHING_SAID
        self._trace = AnswerTrace(start.headers)
        self._tail = Tail()
        self._head = b""
        self._window = FlowWindow()
        self._response: Connection | None = None  # while it is read
        self._reading: asyncio.Task[Any] | None = None  # while it may be cancelled
        self._aborted: RelayResult | None = None
        self._received: RelayResult | None = None  # once all of the response was received

    def credit(self, consumed_bytes: int) -> None:
        self._window.credit(consumed_bytes)
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
        usage = self._usage() if self._tail.total and not self._call else NO_USAGE  # not its own
        ttft_s = -1.0 if self._first_byte_at is None else self._first_byte_at - self._started_at
        if self._trace.is_recording:
            self._send_spans(result, usage)
        if result.refused is not None and self._first_byte_at is None:
            self._frames.send(Frame.REFUSED, encode(result.refused))
        else:
            if self._removal is not None and (rest := self._removal.rest()):
                self._frames.data(rest, self._clock())
            end = End(
                outcome=result.outcome,
                detail=result.detail,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_s=ttft_s,
            )
            self._frames.send(Frame.END, encode(end))
        return RelayEnded(
            inbox=self._inbox,
            outcome=result.outcome,
            usage=usage,
            streamed=self._streamed,
            verdict=self._verdict if result is _DONE else self._judge(result),
        )

    def _judge(self, result: RelayResult) -> Verdict:
        """What a response that did not end well says about the engine."""
        if result.failure is not None:
            return Verdict(failure=result.failure)
        if result is self._aborted and result.outcome is Outcome.ENGINE_LOST:
            # Placed again because of an alarm, which may be a false one, it has not failed.
            return Verdict(failure=NOT_IN_TIME) if result.refused is None else NOTHING_SAID
        return NOTHING_SAID if self._verdict is ANSWERED else self._verdict

    def _usage(self) -> TokenUsage:
        """At the end of an answer; what is not there, on some routes, at its beginning."""
        usage = read_usage(self._tail.read())
        if self._path in EARLY_USAGE_PATHS:
            usage = usage.or_else(read_early_usage(self._head))
        if self._path in GENERATING_PATHS and usage.prompt_tokens >= 0:
            usage = usage.or_else(self._engine.left_out)
        return usage

    def _send_spans(self, result: RelayResult, usage: TokenUsage) -> None:
        began_at = self._first_byte_at
        ttft_s = None if began_at is None else began_at - self._started_at
        self._trace.send(
            Answered(result.outcome, result.detail, usage, self._status, ttft_s, self._streamed),
            method="POST" if self._call is None else self._call.method,
            path=self._path,
            region=self._region,
            replica=self._replica,
            kind=self._engine_kind,
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
        headers = {"Content-Type": JSON, **self._trace.headers, **self._for_engine}
        if self._request_id:
            headers["X-Request-Id"] = self._request_id
        api, method, target = self._engine.api, "POST", self._path
        try:
            body, self._body = self._body, b""
            if self._call is None:
                body = self._own_body(body, headers)
            else:
                method, target, body = self._call.method, self._call.target, b""
            named, body = self._engine.addressed(headers, body, self._adapter)
            response = await api.request(method, target, named, body)
            del body  # up to 32 MiB that are not needed during a long response
            self._response = response
            relay = self._hand_out if self._is_prefill else self._relay
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
            is_its = isinstance(problem, HttpBroken) or self._status is not None
            return self._received or RelayResult(
                Outcome.ENGINE_BROKEN, _described(problem), failure=BROKEN if is_its else None
            )

    def _how_lost(self, problem: OSError) -> str:
        if self._status is not None:
            return CUT
        return NO_CONNECTION if isinstance(problem, HttpUnreached) else NO_ANSWER

    def _own_body(self, body: bytes, headers: dict[str, str]) -> bytes:
        """The client's body with what this engine is to have besides. Raises StageInvalid."""
        if self._transfer is not None:
            body = self._for_transfer(body, self._transfer, headers)
        if self._adds_usage and self._engine.asks_usage:
            body = with_usage_requested(body)
            self._removal = UsageEventRemoval()
        if self._path == RESPONSES and self._engine.takes_response_ids:
            secret = os.urandom(SECRET_BYTES)
            name = response_id(self._region, self._replica, secret, self._tenant)
            body = with_response_id(body, name)
        return body

    def _for_transfer(self, body: bytes, kind: TransferKind, headers: dict[str, str]) -> bytes:
        """The body for an engine that gives its KV cache to others, or gets it. Raises
        StageInvalid."""
        stage = self._stage
        if stage is None:
            return whole_body(body, kind)
        if (request_id := stage_request_id(kind, stage)) is not None:
            headers["X-Request-Id"] = request_id
        return stage_body(body, kind, stage)

    async def _relay(self, response: Connection, head: ResponseHead) -> RelayResult:
        self._status = head.status
        unserved = await self._other_engine(response) or self._unserved(head)
        if unserved is not None:
            return unserved
        self._is_good = head.status in SUCCESS
        media_type = head.content_type.partition(";")[0].strip().lower()
        self._streamed = self._is_good and media_type == EVENT_STREAM
        self._is_json = self._is_good and media_type == JSON and self._path in ENGINE_PATHS
        if self._streamed:
            self._content = StreamContent(self._path)
        else:
            self._removal = None
        first, has_content = await self._first_bytes(response)
        if self._content is not None and self._content.error is not None:
            return await self._send_error(self._content.error)
        if (problem := self._no_answer(first, has_content)) is not None:
            return RelayResult(Outcome.ENGINE_BROKEN, problem, failure=_how_empty(first))
        self._learn_path(head.status, first)
        await self._send_head(head)
        if self._aborted is not None:  # and the cancel was swallowed on the way
            return self._aborted
        if first:
            self._head = first[:HEAD_BYTES]
            self._pass_on(first)
        self._watch_work(has_content)
        try:
            await response.stream_to(self._pass_on)
        except (OSError, HttpBroken, asyncio.CancelledError):
            self._received = self._judged_early(is_ended=response.is_ended)
            raise
        return self._judged()

    @property
    def _is_prefill(self) -> bool:
        return self._stage is not None and self._stage.role is KvRole.PREFILL

    async def _hand_out(self, response: Connection, head: ResponseHead) -> RelayResult:
        """Of a prefill stage's good answer, send only what the decode engine needs."""
        if head.status not in SUCCESS or self._transfer is None:
            return await self._relay(response, head)
        self._status = head.status
        if (unserved := await self._other_engine(response)) is not None:
            return unserved
        self._is_good = True
        answer = bytearray()
        while chunk := await response.read():
            answer += chunk
            if len(answer) > ANSWER_BYTES_MAX:
                raise StageInvalid(f"the prefill engine's answer is over {ANSWER_BYTES_MAX} bytes")
        params = handed_out(bytes(answer), self._transfer)
        self._tail.add(bytes(answer))
        await self._send_head(ResponseHead(head.status, JSON))
        self._frames.data(params, self._clock())
        return _DONE

    async def _other_engine(self, response: Connection) -> RelayResult | None:
        """The result of an answer by an engine that serves other models, in this one's place."""
        if self._model is None or await self._engine.still_serves(self._model, response):
            return None
        refused = Refused(Refusal.WRONG_MODEL, self._region, self._replica, -1, -1)
        return RelayResult(Outcome.ENGINE_LOST, "the engine serves other models now", refused)

    def _unserved(self, head: ResponseHead) -> RelayResult | None:
        """The result of a status that is no answer to the client's request; None for any other."""
        status = head.status
        if status in SUCCESS:
            return None
        self._verdict = by_status(status, f"HTTP {status}", retry_after_s(head.headers))
        if status == STATUS_UNAUTHORIZED:  # of this agent, and no fault of the client
            self._engine.refused_key()
            why = f"the engine {KEY_REQUIRED}"
            return RelayResult(Outcome.ENGINE_BROKEN, why, failure=f"HTTP {status}")
        if status not in PATH_UNKNOWN or self._goes_on:
            return None  # 404 may be what vLLM says of a response that it does not keep
        is_gone = self._adapter is not None and status == STATUS_NOT_FOUND
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
        return status != STATUS_NOT_IMPLEMENTED or self._path not in GENERATING_PATHS

    def _learn_path(self, status: int, first: bytes) -> None:
        """`first`: of an answer that has begun well."""
        tells = self._path in OPTIONAL_PATHS and (self._is_good or self._says_no_path(status))
        if tells and self._model is not None:
            self._engine.answered(self._model, self._path, status, first)

    def _not_here(self, why: str) -> RelayResult:
        refused = Refused(Refusal.WRONG_MODEL, self._region, self._replica, -1, -1)
        return RelayResult(Outcome.ENGINE_LOST, why, refused)

    async def _first_bytes(self, response: Connection) -> tuple[bytes, bool]:
        """What comes until the first content, and that; whether there was any. An engine, or a
        server in front of it, may send other bytes before anything is computed."""
        first = chunk = await response.read()
        content = self._content
        while chunk and len(first) < OPENING_BYTES_MAX:
            if content is not None and starts_events(first) is False:
                return first, False
            has_content = _is_text(chunk) if content is None else content.came(chunk)
            if has_content or not self._is_good:
                return first, has_content
            chunk = await response.read()
            first += chunk
        if content is not None:
            content.ended()
        return first, False

    def _no_answer(self, first: bytes, has_content: bool) -> str | None:
        """Why what begins so is no answer, for people; None if it is one."""
        if self._streamed and not starts_events(first):
            return f"no event stream: {first[:80]!r}"
        if self._streamed and not has_content and len(first) < OPENING_BYTES_MAX:
            return "the stream ended without content"
        if self._is_good and not first:
            return f"HTTP {self._status} with an empty body"
        if self._is_good and first[:1] == b"<" and self._path in GENERATING_PATHS:
            return f"a page instead of an answer: {first[:80]!r}"  # of a login, say
        return None

    def _watch_work(self, has_content: bool) -> None:
        """From here on content shows that the engine computes; so does the first, if it came."""
        if self._is_good and self._is_computed:
            self._shows_work = _is_text if self._content is None else self._content.came
            if has_content:
                self._engine.last_content_at = self._clock()

    async def _send_error(self, error: StreamError) -> RelayResult:
        """Answer with the HTTP error that the stream's first event amounts to."""
        log.info("%s: the stream begins with an error: %s", self._request_id, error.message)
        self._streamed = self._is_good = False
        self._content = self._removal = None
        self._verdict = by_status(error.status, ERROR_FIRST, RETRY_S_MIN)
        await self._send_head(ResponseHead(error.status, JSON))
        self._pass_on(error.body)
        return _DONE

    def _judged(self) -> RelayResult:
        """The result of a response that was received to its end."""
        if not self._streamed:
            return self._judged_plain()
        end = self._tail.read()
        if (problem := incomplete(self._tail, end)) is not None:
            return RelayResult(Outcome.ENGINE_BROKEN, problem, failure=CUT)
        if (error := last_error(end)) is not None:
            log.info("%s: the stream ends with an error: %s", self._request_id, error.message)
            failure = by_status(error.status, ERROR_INSIDE, RETRY_S_MIN).failure
            return RelayResult(Outcome.ENGINE_FAILED, error.message, failure=failure)
        if self._engine.ends.is_cut(self._path, end, self._started_at, self._clock()):
            problem = "the stream ended without its last event"
            return RelayResult(Outcome.ENGINE_BROKEN, problem, failure=CUT)
        return _DONE

    def _judged_early(self, *, is_ended: bool) -> RelayResult | None:
        """The result of a response whose reading was broken off, by its engine or by an abort; None
        where not all of it was received. What an abort left unfinished is no fault of the engine.
        """
        if is_ended:
            return self._judged()
        if not (self._streamed and has_last_event(self._path, self._tail.read())):
            return None
        judged = self._judged()
        return judged if judged is _DONE else None

    def _judged_plain(self) -> RelayResult:
        response = self._response
        if not self._is_json or response is None:
            return _DONE
        parses = response.ends_with_connection
        if is_cut_json(self._tail.read(), self._tail.total, parses=parses):
            problem = "the answer's JSON is not whole"
            return RelayResult(Outcome.ENGINE_BROKEN, problem, failure=CUT)
        return _DONE

    async def _send_head(self, head: ResponseHead) -> None:
        self._first_byte_at = self._clock()
        message = Head(
            status=head.status,
            content_type=head.content_type[:TEXT_MAX],
            region=self._region,
            replica=self._replica,
            headers=head.headers,
            doubted=self._is_doubted(head.status),
        )
        self._frames.send(Frame.HEAD, encode(message))
        await self._began(RelayBegan(self._inbox, self._is_good))

    def _is_doubted(self, status: int) -> int:
        """1 for a client error where the engine gave one to each of its last requests, too."""
        if self._is_good:
            self._engine.client_errors = 0
            return 0
        is_of_body = self._call is None and not self._goes_on
        if status not in CLIENT_ERRORS or status == STATUS_BUSY or not is_of_body:
            return 0
        self._engine.client_errors += 1
        return int(self._engine.client_errors > CLIENT_ERRORS_BELIEVED)

    def _pass_on(self, chunk: bytes) -> None:
        now = self._clock()
        if self._shows_work(chunk):
            self._engine.last_content_at = now
        self._tail.add(chunk)
        if self._removal is not None:
            chunk = self._removal.without_event(chunk)
            if not chunk:
                return
        is_open = self._window.send(len(chunk))
        self._frames.data(chunk, now)
        if not is_open and self._response is not None:
            self._response.pause()
            self._engine.held.add(self._inbox)


def _how_empty(first: bytes) -> str:
    """How an engine failed that sent this where an answer was to begin."""
    return BROKEN if first and not starts_events(first) else EMPTY


def _nothing(_chunk: bytes) -> bool:
    return False


def _is_text(chunk: bytes) -> bool:
    """Whether a chunk of a plain answer is more than white space, which servers send to wait."""
    return not chunk.isspace()


def _described(problem: BaseException) -> str:
    text = str(problem) or type(problem).__name__
    return text[:TEXT_MAX].encode("utf-8", "replace").decode()
