"""One answer of the engine, as far as it came: what it is, whether it is whole, and what its end
says about the engine.

A status or a first event says something before the end (`verdict`); `judged` gives the result of an
answer that was received to its end, `judged_early` of one whose reading was broken off.
"""

import logging
from dataclasses import dataclass

from agents.adapters.http_client import ResponseHead
from agents.core.answer_stream import Tail
from agents.core.engine_limit import RETRY_S_MIN
from agents.core.engine_results import (
    ANSWERED,
    BROKEN,
    CUT,
    EMPTY,
    ERROR_FIRST,
    ERROR_INSIDE,
    NOT_IN_TIME,
    NOTHING_SAID,
    Verdict,
    by_status,
)
from agents.core.events import NO_USAGE, TokenUsage
from agents.core.stream_content import OPENING_BYTES_MAX, StreamContent, starts_events
from agents.core.stream_end import PromisedEnds, has_last_event, incomplete, is_cut_json
from agents.core.stream_errors import StreamError, last_error
from agents.core.usage import read_early_usage, read_usage
from schemas.engine_routes import EARLY_USAGE_PATHS, ENGINE_PATHS, GENERATING_PATHS, SERVER_PATHS
from schemas.exchange import Outcome, Refused
from schemas.http_statuses import SUCCESS

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RelayResult:
    """How a response ended and why. `refused`: sent instead if it has not begun."""

    outcome: Outcome
    detail: str = ""
    refused: Refused | None = None
    failure: str | None = None  # how the engine failed the request, if it did


DONE = RelayResult(Outcome.DONE)


class EngineAnswer:
    """Of one request. Call `began` with its head; all that comes goes to `tail`."""

    def __init__(self, path: str, request_id: str, *, is_call: bool) -> None:
        """`is_call`: about a response that the engine keeps; nothing is computed for it."""
        self._path, self._request_id = path, request_id
        self.status: int | None = None
        self.is_good = self.streamed = self._is_json = False
        self.content: StreamContent | None = None  # of a good stream
        self.tail = Tail()
        self.head = b""
        # The HTTP server of an engine that hangs may answer what is not computed.
        self.is_computed = not is_call and path not in SERVER_PATHS
        # As far as its status or first event says.
        self.verdict = ANSWERED if self.is_computed else NOTHING_SAID

    def began(self, head: ResponseHead) -> None:
        """It is an answer to the request, by this head."""
        self.is_good = head.status in SUCCESS
        if not self.is_good:
            return
        media_type = head.content_type.partition(";")[0].strip().lower()
        if media_type == EVENT_STREAM:
            self.streamed, self.content = True, StreamContent(self._path)
        self._is_json = media_type == JSON and self._path in ENGINE_PATHS

    def no_answer(self, first: bytes, *, has_content: bool) -> RelayResult | None:
        """The result of what begins so, where it is no answer; None if it is one."""
        why = None
        if self.streamed and not starts_events(first):
            why = f"no event stream: {first[:80]!r}"
        elif self.streamed and not has_content and len(first) < OPENING_BYTES_MAX:
            why = "the stream ended without content"
        elif self.is_good and not first:
            why = f"HTTP {self.status} with an empty body"
        elif self.is_good and first[:1] == b"<" and self._path in GENERATING_PATHS:
            why = f"a page instead of an answer: {first[:80]!r}"  # of a login, say
        if why is None:
            return None
        failure = BROKEN if first and not starts_events(first) else EMPTY
        return RelayResult(Outcome.ENGINE_BROKEN, why, failure=failure)

    def is_error(self, error: StreamError) -> None:
        """A stream's first event is an error: it is answered with that instead."""
        log.info("%s: the stream begins with an error: %s", self._request_id, error.message)
        self.streamed = self.is_good = False
        self.content = None
        self.verdict = by_status(error.status, ERROR_FIRST, RETRY_S_MIN)

    def judged(
        self, ends: PromisedEnds, began_at: float, now: float, *, parses: bool
    ) -> RelayResult:
        """The result of an answer that was received to its end. `parses`: nothing but its last
        bytes shows that a plain one is whole."""
        end = self.tail.read()
        if not self.streamed:
            is_cut = self._is_json and is_cut_json(end, self.tail.total, parses=parses)
            return _cut("the answer's JSON is not whole") if is_cut else DONE
        if (problem := incomplete(self.tail, end)) is not None:
            return _cut(problem)
        if (error := last_error(end)) is not None:
            log.info("%s: the stream ends with an error: %s", self._request_id, error.message)
            failure = by_status(error.status, ERROR_INSIDE, RETRY_S_MIN).failure
            return RelayResult(Outcome.ENGINE_FAILED, error.message, failure=failure)
        if ends.is_cut(self._path, end, began_at, now):
            return _cut("the stream ended without its last event")
        return DONE

    @property
    def has_last_event(self) -> bool:
        """Whether all of a stream was received: what an abort leaves of it is no fault of the
        engine."""
        return self.streamed and has_last_event(self._path, self.tail.read())

    def verdict_of(self, result: RelayResult, *, is_aborted: bool) -> Verdict:
        """What its end says about the engine."""
        if result is DONE:
            return self.verdict
        if result.failure is not None:
            return Verdict(failure=result.failure)
        if is_aborted and result.outcome is Outcome.ENGINE_LOST:
            # Placed again because of an alarm, which may be a false one, it has not failed.
            return Verdict(failure=NOT_IN_TIME) if result.refused is None else NOTHING_SAID
        return NOTHING_SAID if self.verdict is ANSWERED else self.verdict

    def usage(self, left_out: TokenUsage) -> TokenUsage:
        """At the end of an answer; what is not there, on some routes, at its beginning.
        `left_out`: what the engine's answers leave out."""
        usage = read_usage(self.tail.read(), streamed=self.streamed)
        if self._path in EARLY_USAGE_PATHS:
            usage = usage.or_else(read_early_usage(self.head, streamed=self.streamed))
        if left_out is NO_USAGE or usage.prompt_tokens < 0 or self._path not in GENERATING_PATHS:
            return usage
        return usage.or_else(left_out)


def _cut(why: str) -> RelayResult:
    return RelayResult(Outcome.ENGINE_BROKEN, why, failure=CUT)
