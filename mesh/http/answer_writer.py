"""Writes the answer to one client request to the client's socket, as the engine sent it.

The session calls `changed` when the answer or its failure may have more for the client, and, while
`ClientRequest.direct_writer` is set, `pass_on` with each frame: a frame that is just the next event
of a stream goes to the socket with no other step. Both run for every token of every client.

A client that reads slowly makes the transport pause this writer. Then nothing is taken from the
answer, no credit goes to the agent, and the agent stops reading its engine: the pressure reaches
the GPU's own buffers, and no process in between grows.

An answer is finished when its last byte has left this process, not when it was written: until
then it counts for the drain and its deadline holds. Nothing follows the last event of a stream:
once it is here, the client's answer ends well, whatever becomes of the request.

The session also calls `fell_silent` where a stream has been silent for long. The first time, before
the answer has begun, the head of a stream leaves: from then on the request may still be placed
elsewhere unseen, and whatever ends it becomes an event.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from http import HTTPStatus
from math import ceil
from typing import Protocol

from mesh.adapters.refused import RequestRefused
from mesh.http.answer_head import answer_head
from mesh.http.front_door import FrontDoor
from mesh.session.answer import EVENT_STREAM, LAST_BYTES, AnswerReceiver
from mesh.session.client_request import ClientRequest
from mesh.session.record import Failure
from schemas.decision import header_value, without_matches
from schemas.engine_routes import error_form
from schemas.failed_response import FIRST_BYTES, Sent, last_number
from schemas.http import (
    H_BUFFERING,
    H_DECISION,
    H_REGION,
    H_REQUEST_ID,
    RESPONSES,
    Fault,
    engine_error_event,
    error_body,
    error_event,
    error_headers,
    keep_alive_event,
)

log = logging.getLogger(__name__)

BEHIND_BYTES = 32 * 1024  # unsent, above the kernel's own buffer: then the transport pauses writers
DEADLINE_GRACE_S = 5.0  # for the core's own deadline error to reach the client first
LAST_CHUNK = b"0\r\n\r\n"
NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
JSON = "application/json"
NO_STREAM = "the engine answered with a whole body where a stream was asked for"
ROUTER_FAILED = "the router failed on this request; its log says why"


class ClientSocket(Protocol):
    """The connection that an answer is written to."""

    transport: asyncio.Transport
    is_paused: bool  # for writing

    def wake_by(self, due_at: float) -> None:
        """Call the writer's `deadline_passed` at that time of the loop's clock."""


class AnswerState(Enum):
    """How far an answer has come."""

    WAITING = "waiting"  # nothing is written
    KEPT_ALIVE = "kept alive"  # the head of a stream, and what readers pass over
    STARTING = "starting"
    STREAMING = "streaming"
    FLUSHING = "flushing"  # all is written, some is still in this process
    OVER = "over"


class AnswerWriter:
    """Give it the request by `begin`; `over` is called once, when no more will be written."""

    _answer: AnswerReceiver

    __slots__ = (
        "_answer",
        "_door",
        "_first",
        "_headers",
        "_is_chunked",
        "_minor",
        "_number",
        "_over",
        "_request",
        "_socket",
        "_state",
        "_transport",
        "keep_alive",
    )

    def __init__(
        self,
        socket: ClientSocket,
        door: FrontDoor,
        headers: dict[str, str],
        over: Callable[[], None],
        *,
        keep_alive: bool = True,
        minor: int = 1,
    ) -> None:
        """`headers`: of any answer to this request. `minor`: of the client's HTTP version."""
        self._socket, self._transport, self._door = socket, socket.transport, door
        self._headers, self._over = headers, over
        self.keep_alive, self._minor = keep_alive, minor
        self._is_chunked = minor == 1
        self._state = AnswerState.WAITING
        self._request: ClientRequest | None = None
        self._first = b""  # of a stream of Responses: its first bytes
        self._number = -1  # the last one that its answer may not keep

    # What the session calls.

    def pass_on(self, frame: bytes) -> bool:
        """Write what a frame brings, past the answer's buffer. False if it is to be fed to it."""
        transport = self._transport
        answer = self._answer
        if transport.is_closing() or not (data := answer.passing(frame)):
            return False
        # RFC 9112, section 7.1; an HTTP/1.0 client gets the bytes as they are.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        if answer.taken_bytes >= answer.credit_at_bytes:
            assert self._request is not None
            self._door.passed(self._request)
        return True

    def changed(self) -> None:
        """The answer, or the request's failure, may have more for the client."""
        request = self._request
        if request is None:  # not admitted yet, or over
            return
        try:
            if self._transport.is_closing():
                self.leave()
            elif self._state is AnswerState.WAITING:
                if (
                    request.failure is not None
                    or request.pass_engine_error
                    or ((answer := request.answer) is not None and answer.is_startable)
                ):
                    self._start(request)
            elif self._state is AnswerState.STREAMING:
                self._send(request)
            elif self._state is AnswerState.KEPT_ALIVE:
                self._go_on(request)
        except Exception as error:
            self.fail(error)

    def fell_silent(self) -> None:
        """The client's stream has been silent for long."""
        request = self._request
        if request is None:
            return
        try:
            if self._transport.is_closing():
                self.leave()
            elif self._state is AnswerState.WAITING:
                self._start_kept_alive(request)
            elif self._transport.get_write_buffer_size() == 0 and (
                self._state is AnswerState.KEPT_ALIVE
                or (self._state is AnswerState.STREAMING and self._answer.is_between_events)
            ):
                self._transport.write(self._chunk(keep_alive_event(error_form(request.path))))
        except Exception as error:
            self.fail(error)

    # What the connection, or the HTTP handler, calls.

    def begin(self, request: ClientRequest) -> None:
        self._request = request
        if request.limit_headers is not None:
            self._headers.update(request.limit_headers)
        request.fell_silent = self.fell_silent
        self.changed()

    def close_after(self) -> None:
        """Say in the answer's head, if that is not written yet, that the connection closes."""
        if self._state is AnswerState.WAITING:
            self.keep_alive = False

    def refuse(self, refused: RequestRefused, route: str) -> None:
        self._door.ended.refused(self._headers[H_REQUEST_ID], route, refused)
        self._write_error(refused.fault, refused.message, route, refused.param, refused.headers)

    def fail(self, error: Exception, route: str = "") -> None:
        """The router itself failed: say so if nothing is written yet, else cut the answer.

        `route`: of a request that was not admitted."""
        log.error("request failed inside the router", exc_info=error)
        self.keep_alive = False
        request, self._request = self._request, None
        if request is not None:
            request.direct_writer, route = None, request.path
            request.failure = request.failure or Failure(Fault.INTERNAL, ROUTER_FAILED)
            self._door.leave(request)
        elif self._state is AnswerState.WAITING:
            refused = RequestRefused(Fault.INTERNAL, ROUTER_FAILED)
            self._door.ended.refused(self._headers[H_REQUEST_ID], route or "-", refused)
        if self._state is AnswerState.WAITING or self._state is AnswerState.STARTING:
            self._write_error(Fault.INTERNAL, ROUTER_FAILED, route)
        elif self._state is not AnswerState.OVER:
            self._transport.close()
            self._end()

    def paused(self) -> None:
        if self._request is not None:
            self._request.direct_writer = None

    def resumed(self) -> None:
        request = self._request
        if request is None:
            return
        try:
            if self._state is AnswerState.STREAMING:
                self._door.passed(request)
                self._send(request)
            elif self._state is AnswerState.FLUSHING:
                self._transport.set_write_buffer_limits(BEHIND_BYTES)
                # Not at once: it may close, and asyncio's transport closes then itself, once more.
                asyncio.get_running_loop().call_soon(self._check_flushed)
        except Exception as error:
            self.fail(error)

    def deadline_passed(self) -> None:
        """The client has stopped reading an answer that is complete.

        An answer that is incomplete at the deadline was ended by the core before this; if not, this
        process stood still, and the core is about to.
        """
        request = self._request
        if request is not None and not _is_ending(request):
            self._socket.wake_by(asyncio.get_running_loop().time() + DEADLINE_GRACE_S)
            return
        self.leave()
        self._transport.abort()

    def leave(self) -> None:
        """The client is gone. Without effect when the answer is over."""
        request, self._request = self._request, None
        if request is not None:
            self.keep_alive = False
            request.direct_writer = None
            self._door.leave(request)
            self._end()

    def _start(self, request: ClientRequest) -> None:
        if request.failure is not None or request.pass_engine_error:
            self._add_receipt(request)
            self._start_failed(request)
            return
        self._state = AnswerState.STARTING
        answer = request.answer
        assert answer is not None and answer.head is not None, "an answer that starts has a head"
        self._answer, head = answer, answer.head
        request.sent_status = head.status
        self._door.started(request)
        self._add_receipt(request)
        headers = {**answer.passed, **self._headers}
        headers["content-type"] = head.content_type
        headers[H_REGION] = head.region
        if head.status in NO_BODY or head.status < HTTPStatus.OK:
            answer.take()
            self._transport.write(self._head(head.status, headers))
            self._flush()
        elif answer.end is not None and not answer.is_event_stream:
            data = answer.take()
            headers["content-length"] = str(len(data))
            self._transport.write(self._head(head.status, headers) + data)
            self._flush()
        else:
            self._start_stream(request, answer, headers)

    def _add_receipt(self, request: ClientRequest) -> None:
        if request.wants_decision and (receipt := request.receipt) is not None:
            shown = without_matches(receipt) if request.tenant == "" else receipt
            self._headers[H_DECISION] = header_value(shown)

    def _start_stream(
        self, request: ClientRequest, answer: AnswerReceiver, headers: dict[str, str]
    ) -> None:
        assert answer.head is not None
        self._stream(request, answer, self._stream_head(answer.head.status, headers))

    def _stream_head(self, status: int, headers: dict[str, str]) -> bytes:
        if headers["content-type"].startswith(EVENT_STREAM):
            headers["cache-control"] = "no-cache"
            headers[H_BUFFERING] = "no"
        if self._is_chunked:
            headers["transfer-encoding"] = "chunked"
        else:
            self.keep_alive = False
        return self._head(status, headers)

    def _stream(self, request: ClientRequest, answer: AnswerReceiver, head: bytes = b"") -> None:
        data = answer.take()
        if request.path == RESPONSES:
            self._first = data[:FIRST_BYTES]
            self._note_number(data)
        data = self._chunk(data)
        if answer.end is not None and request.failure is None:
            self._transport.write(head + data + self._last_chunk)
            self._flush()
            return
        self._socket.wake_by(request.request.deadline + DEADLINE_GRACE_S)
        self._state = AnswerState.STREAMING
        self._transport.write(head + data)
        if not self._socket.is_paused:
            self._door.passed(request)
            self._send(request)

    def _start_kept_alive(self, request: ClientRequest) -> None:
        """Begin a stream before there is an answer."""
        self._state = AnswerState.KEPT_ALIVE
        request.sent_status = HTTPStatus.OK
        self._add_receipt(request)
        head = self._stream_head(HTTPStatus.OK, {**self._headers, "content-type": EVENT_STREAM})
        self._socket.wake_by(request.request.deadline + DEADLINE_GRACE_S)
        self._transport.write(head + self._chunk(keep_alive_event(error_form(request.path))))

    def _go_on(self, request: ClientRequest) -> None:
        """What becomes of a request whose stream has begun without an answer."""
        answer = request.answer
        if request.failure is not None or request.pass_engine_error:
            self._start_failed(request)
        elif answer is not None and answer.head is not None and answer.is_startable:
            if answer.is_event_stream:
                self._answer = answer
                self._door.started(request)
                self._stream(request, answer)
            elif answer.head.status < HTTPStatus.BAD_REQUEST:
                request.failure = Failure(Fault.ENGINE_FAILED, NO_STREAM)
                self._start_failed(request)
            elif answer.end is not None:  # the engine has refused
                self._answer, status = answer, answer.head.status
                self._door.started(request)
                event = engine_error_event(status, answer.take(), error_form(request.path))
                self._transport.write(self._chunk(event) + self._last_chunk)
                self._flush()

    def _send(self, request: ClientRequest) -> None:
        """Write what is there, unless the client is behind."""
        answer = self._answer
        request.direct_writer = None
        while not self._socket.is_paused:
            data = answer.take()
            if answer.end is not None and request.failure is None:
                self._transport.write(self._chunk(data) + self._last_chunk)
                self._flush()
                return
            if data:
                if self._first:
                    self._note_number(data)
                self._transport.write(self._chunk(data))
                if not self._socket.is_paused:
                    self._door.passed(request)
            elif request.failure is not None:
                self._end_failed(request, answer)
                return
            elif (following := request.answer) is not answer:  # it broke, and goes on
                if following is None or not following.is_startable:
                    return
                self._answer = answer = following
                self._door.started(request)
            else:
                is_direct = answer.is_wanted and answer.splice is None
                request.direct_writer = self if is_direct else None
                return

    def _note_number(self, data: bytes) -> None:
        """An event that holds a whole text is longer than what the answer keeps of it."""
        if len(data) > LAST_BYTES:
            self._number = max(self._number, last_number(data))

    def _end_failed(self, request: ClientRequest, answer: AnswerReceiver) -> None:
        """End an answer that broke, well or with an error that the client can read."""
        assert request.failure is not None
        if answer.is_whole:
            self._transport.write(self._last_chunk)
        elif answer.is_event_stream:
            # The client must not read the error as part of an unfinished event.
            gap = b"" if answer.is_between_events else b"\n\n"
            failure, form = request.failure, error_form(request.path)
            sent = Sent(self._first, answer.given_out_last, self._number)
            event = error_event(failure.fault, failure.message, form, sent)
            self._transport.write(self._chunk(gap + event) + self._last_chunk)
        else:
            # A plain answer can't carry an error after its bytes: the connection is cut.
            self._request = None
            self._door.failed(request)
            self.keep_alive = False
            self._transport.close()
            self._end()
            return
        self._flush()

    def _flush(self) -> None:
        """All is written. The answer is over when the kernel has every byte."""
        self._state = AnswerState.FLUSHING
        if self._transport.get_write_buffer_size() == 0:
            self._flushed()
        else:  # uvloop writes at the end of the loop's turn
            asyncio.get_running_loop().call_soon(self._check_flushed)

    def _check_flushed(self) -> None:
        request = self._request
        if request is None:
            return
        if self._transport.is_closing():
            self.leave()
        elif self._transport.get_write_buffer_size() == 0:
            self._flushed()
        else:  # the transport pauses us, and resumes us when all has left
            now = asyncio.get_running_loop().time()
            self._socket.wake_by(max(request.request.deadline, now) + DEADLINE_GRACE_S)
            self._transport.set_write_buffer_limits(high=0)

    def _flushed(self) -> None:
        request, self._request = self._request, None
        assert request is not None
        try:
            if request.failure is None or self._answer.is_whole:
                self._door.finished(request)
            else:
                self._door.failed(request)
        finally:
            self._end()

    def _end(self) -> None:
        self._state = AnswerState.OVER
        self._over()

    # Errors before the first byte.

    def _start_failed(self, request: ClientRequest) -> None:
        self._request = None
        self._door.failed(request)
        failure = request.failure
        if failure is not None:
            path = request.path
            if self._state is AnswerState.KEPT_ALIVE:
                self._end_with(error_event(failure.fault, failure.message, error_form(path)))
                return
            retry_after_s = ceil(failure.retry_after_s or 1.0)
            self._write_error(failure.fault, failure.message, path, retry_after_s=retry_after_s)
            return
        error = request.engine_error
        assert error is not None, "the engine's error answer is here"
        if self._state is AnswerState.KEPT_ALIVE:
            self._end_with(engine_error_event(error.status, error.body, error_form(request.path)))
            return
        headers = {**error.headers, **self._headers, "content-type": error.content_type}
        self._write_whole(error.status, headers, error.body)

    def _end_with(self, event: bytes) -> None:
        self._transport.write(self._chunk(event) + self._last_chunk)
        self._end()

    def _write_error(
        self,
        fault: Fault,
        message: str,
        path: str,
        param: str | None = None,
        headers: Mapping[str, str] = {},
        *,
        retry_after_s: int = 1,
    ) -> None:
        of_fault = error_headers(fault, retry_after_s)
        headers = {**self._headers, **of_fault, **headers, "content-type": JSON}
        body = error_body(fault, message, param, error_form(path))
        self._write_whole(fault.value.status, headers, body)

    def _write_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        headers["content-length"] = str(len(body))
        self._transport.write(self._head(status, headers) + body)
        self._end()

    # Bytes of HTTP.

    @property
    def _last_chunk(self) -> bytes:
        return LAST_CHUNK if self._is_chunked else b""

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._is_chunked else data

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        return answer_head(status, headers, self._minor, keep_alive=self.keep_alive)


def _is_ending(request: ClientRequest) -> bool:
    """Whether it is known how it ends."""
    is_whole = request.answer is not None and request.answer.end is not None
    return is_whole or request.pass_engine_error or request.failure is not None
