"""Turns a client's HTTP request for work into a `ParsedRequest`, or into an error that says what
to change.

Bodies that came whole are parsed at once. Those that are large, compressed or still on their way
are read from aiohttp as they come.
"""

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web

from mesh.adapters.client_request import FrontDoor, ParsedRequest
from mesh.adapters.large_bodies import LARGE_BYTES, LargeBodies
from mesh.adapters.request_body import (
    H_CONTENT_ENCODING,
    BodyFields,
    Upload,
    UploadRate,
    no_room,
    read_fields,
    too_slow,
)
from mesh.adapters.request_options import (
    DEFAULT_OPTIONS,
    OPTION_HEADERS,
    RequestRefused,
    read_options,
    timeout_s,
)
from schemas.http import H_EXPECT, Fault
from schemas.ids import ModelId, RequestId

CONTINUE = "100-continue"

LowerHeaders = Mapping[str, str]  # names in lower case


class RequestReader:
    """Reads and checks requests for work. Close it at the end."""

    def __init__(self, door: FrontDoor, count: Callable[[str], None] = lambda why: None) -> None:
        """`count` is called with why a request can't be read: the code of the fault."""
        self._door, self._budget, self._count = door, door.bodies, count
        self._large = LargeBodies()
        self._decoding = asyncio.Lock()

    def parse(
        self, path: str, headers: LowerHeaders, body: bytes, known_id: RequestId, charged: int = 0
    ) -> tuple[ParsedRequest, int]:
        """Check a request that came whole; with the bytes that the budget was charged for it.

        `charged`: those that it was charged before. Raises RequestRefused for anything that an
        engine should not see; then nothing stays charged.
        """
        try:
            if not charged:
                if not self._budget.take(len(body)):
                    raise no_room()
                charged = len(body)
            parsed = _parsed(path, headers, body, read_fields(path, body), known_id)
        except BaseException as error:
            self._refused(error, charged)
            raise
        return self._placeable(parsed, headers, charged)

    async def read(
        self, request: web.BaseRequest, path: str, headers: LowerHeaders, known_id: RequestId
    ) -> tuple[ParsedRequest, int]:
        """Read the body from aiohttp as it comes; else as `parse`."""
        content, first = request.content, b""
        if content.is_eof() and H_CONTENT_ENCODING not in headers and H_EXPECT not in headers:
            first = content.read_nowait()
            if len(first) <= LARGE_BYTES:
                return self.parse(path, headers, first, known_id)
        charged = 0
        try:
            body, fields, charged = await self._uploaded(request, path, headers, first)
            parsed = _parsed(path, headers, body, fields, known_id)
        except BaseException as error:
            self._refused(error, charged)
            raise
        return self._placeable(parsed, headers, charged)

    async def close(self) -> None:
        """End what reads large bodies."""
        await self._large.close()

    def _refused(self, error: BaseException, charged: int) -> None:
        self._budget.give_back(charged)
        if isinstance(error, RequestRefused):
            self._count(error.fault.value.code)

    def _placeable(
        self, parsed: ParsedRequest, headers: LowerHeaders, charged: int
    ) -> tuple[ParsedRequest, int]:
        """Check what does not depend on how the request was read."""
        door = self._door
        try:
            parsed.residency = door.residency(parsed.options.residency, headers)
            parsed.tenant = door.tenant(headers)
            models = door.known_models()
            if models and parsed.model not in models:
                known = ", ".join(models)
                message = f"the model {parsed.model!r} is not served here; known: {known}"
                raise RequestRefused(Fault.MODEL_UNKNOWN, message, "model")
        except BaseException:
            self._budget.give_back(charged)
            raise
        return parsed, charged

    def _precheck(self, headers: LowerHeaders) -> None:
        """Raise RequestRefused for what is wrong whatever the body will be."""
        self._door.residency(read_options(headers, {}).residency, headers)
        if self._budget.is_full:
            raise no_room()

    async def _uploaded(
        self, request: web.BaseRequest, path: str, headers: LowerHeaders, first: bytes
    ) -> tuple[bytes, BodyFields, int]:
        upload = Upload(self._budget, headers.get(H_CONTENT_ENCODING), request.content_length)
        try:
            if first:
                upload.arrived(first)
            else:
                await self._continue(request, headers)
                await self._arrival(request, upload)
            body, fields = await self._large.read(path, upload.chunks())
            if not self._budget.take(len(fields.text.data), upload.size):
                raise no_room()
            upload.taken += len(fields.text.data)
        except BaseException:
            upload.release()
            raise
        return body, fields, upload.taken

    async def _continue(self, request: web.BaseRequest, headers: LowerHeaders) -> None:
        """Say that the body may be sent, if the client waits for that (RFC 9110, 10.1.1)."""
        expected = headers.get(H_EXPECT)
        if expected is None or request.version < (1, 1):
            return
        if expected.strip().lower() != CONTINUE:
            message = f"{H_EXPECT} may be {CONTINUE}, or be left out"
            raise RequestRefused(Fault.EXPECTATION, message, H_EXPECT)
        self._precheck(headers)
        if not request.content.is_eof() and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _arrival(self, request: web.BaseRequest, upload: Upload) -> None:
        """Take in the body as it comes. Raises RequestRefused."""
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
            raise RequestRefused(Fault.INVALID, "the body is cut or broken") from error
        except TimeoutError as error:
            raise too_slow() from error

    async def _decode(self, upload: Upload) -> None:
        more = True
        while more:
            async with self._decoding:  # one step of one body between two turns of the loop
                more = upload.decode()
                await asyncio.sleep(0)


def _parsed(
    path: str, headers: LowerHeaders, body: bytes, fields: BodyFields, known_id: RequestId
) -> ParsedRequest:
    options, timeout = DEFAULT_OPTIONS, None
    if fields.options or not OPTION_HEADERS.isdisjoint(headers):  # mostly there are none
        options, timeout = read_options(headers, fields.options), timeout_s(headers)
    model = ModelId(fields.model)
    return ParsedRequest(known_id, model, path, body, fields.text, timeout, options)
