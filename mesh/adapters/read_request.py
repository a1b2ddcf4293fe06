"""From a client's HTTP request to an `Ask`, or to a problem that says what to change."""

import asyncio
import os
from collections.abc import Callable

from aiohttp import web

from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.body_fields import BodyFields, read_fields
from mesh.adapters.large_bodies import LARGE_BYTES, LargeBodies
from mesh.adapters.problem import Problem
from mesh.adapters.ticket import Ask
from mesh.adapters.upload import (
    H_CONTENT_ENCODING,
    Upload,
    UploadRate,
    no_room,
    too_slow,
)
from mesh.adapters.wishes import read_wishes
from schemas.http import H_EXPECT, H_REQUEST_ID, H_TIMEOUT_S, Fault
from schemas.ids import ModelId, RequestId, is_request_id

TIMEOUT_S_MAX = 3600.0
REQUEST_ID_BYTES = 16  # of one that we make
CONTINUE = "100-continue"
Precheck = Callable[[web.BaseRequest], None]


def request_id(request: web.BaseRequest) -> RequestId:
    """The client's own id if it is fit to be kept, else a new one."""
    given = request.headers.get(H_REQUEST_ID)
    if given is not None and is_request_id(given):
        return RequestId(given)
    return RequestId(os.urandom(REQUEST_ID_BYTES).hex())


class RequestReader:
    """Reads and checks requests for work. Close it at the end."""

    def __init__(self, budget: BodyBudget, precheck: Precheck = lambda request: None) -> None:
        """`precheck` raises Problem for what the headers alone forbid: clients that ask before they
        send a body are told so at once."""
        self._budget = budget
        self._precheck = precheck
        self._large = LargeBodies()
        self._turn = asyncio.Lock()  # of who decodes

    async def read(
        self, request: web.BaseRequest, path: str, known_id: RequestId
    ) -> tuple[Ask, int]:
        """Read and check the body; with the bytes that were taken from the budget for it.

        Raises Problem for anything an engine should not see; then nothing stays taken.
        """
        body, fields, taken = await self._body(request, path)
        try:
            wishes = read_wishes(request.headers, fields.wishes)
            timeout_s = _timeout_s(request)
        except Problem:
            self._budget.give_back(taken)
            raise
        ask = Ask(known_id, ModelId(fields.model), path, body, fields.text, timeout_s, wishes)
        return ask, taken

    async def close(self) -> None:
        """End what reads large bodies."""
        await self._large.close()

    async def _body(self, request: web.BaseRequest, path: str) -> tuple[bytes, BodyFields, int]:
        content, headers = request.content, request.headers
        if not content.is_eof() or H_CONTENT_ENCODING in headers or H_EXPECT in headers:
            return await self._uploaded(request, path)
        body = content.read_nowait()  # all of it came with the headers, as it mostly does
        if len(body) > LARGE_BYTES:
            return await self._uploaded(request, path, body)
        if not self._budget.take(len(body)):
            raise no_room()
        try:
            return body, read_fields(path, body), len(body)
        except BaseException:
            self._budget.give_back(len(body))
            raise

    async def _uploaded(
        self, request: web.BaseRequest, path: str, first: bytes = b""
    ) -> tuple[bytes, BodyFields, int]:
        encoding = request.headers.get(H_CONTENT_ENCODING)
        upload = Upload(self._budget, encoding, request.content_length)
        try:
            if first:
                upload.arrived(first)
            else:
                await self._continue(request)
                await self._arrival(request, upload)
            body, fields = await self._large.read(path, upload.chunks())
            if not self._budget.take(len(fields.text.data), upload.size):
                raise no_room()
            upload.taken += len(fields.text.data)
        except BaseException:
            upload.release()
            raise
        return body, fields, upload.taken

    async def _continue(self, request: web.BaseRequest) -> None:
        """Say that the body may be sent, if the client waits for that (RFC 9110, 10.1.1)."""
        expected = request.headers.get(H_EXPECT)
        if expected is None or request.version < (1, 1):
            return
        if expected.strip().lower() != CONTINUE:
            message = f"{H_EXPECT} may be {CONTINUE}, or be left out"
            raise Problem(Fault.EXPECTATION, message, H_EXPECT)
        self._precheck(request)
        if not request.content.is_eof() and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _arrival(self, request: web.BaseRequest, upload: Upload) -> None:
        """Take in the body as it comes. Raises Problem."""
        clock = asyncio.get_running_loop().time
        rate = UploadRate(clock())
        try:
            while True:
                async with asyncio.timeout_at(rate.due_at):
                    chunk = await request.content.readany()
                if not chunk:
                    return
                began_at = clock()
                rate.arrived(len(chunk), began_at)
                if upload.arrived(chunk):
                    await self._decode(upload)
                    rate.forgive(clock() - began_at)
        except web.RequestPayloadError as error:
            raise Problem(Fault.INVALID, "the body is cut or broken") from error
        except TimeoutError as error:
            raise too_slow() from error

    async def _decode(self, upload: Upload) -> None:
        more = True
        while more:
            async with self._turn:  # one step between two looks of the loop, whoever's it is
                more = upload.decode()
                await asyncio.sleep(0)


def _timeout_s(request: web.BaseRequest) -> float | None:
    given = request.headers.get(H_TIMEOUT_S)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not 0.0 < seconds <= TIMEOUT_S_MAX:
        message = f"{H_TIMEOUT_S} must be seconds, more than 0 and at most {TIMEOUT_S_MAX:g}"
        raise Problem(Fault.INVALID, message, H_TIMEOUT_S)
    return seconds
