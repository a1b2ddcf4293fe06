"""Bodies on their way in: bytes as they arrive, decoded, and limited in size and time.

A body is decoded in small steps, so that neither a client that sends little nor one whose little
becomes much takes more than its share of memory or time. A client is too slow when WINDOW_S bring
fewer than WINDOW_BYTES.
"""

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncGenerator

from infra.tenant_table import Caller
from mesh.adapters.refused import RequestRefused
from mesh.core.view.bus_status import CATCH_UP_S, STOOD_STILL_S
from mesh.http.front_door import FrontDoor
from mesh.http.http_request import BodyBroken, HttpRequest
from mesh.http.large_bodies import LargeBodies
from mesh.http.read_request import (
    BodyBudget,
    BodyFields,
    LowerHeaders,
    ParsedRequest,
    RequestReader,
    no_room,
    parsed_request,
    read_options,
)
from schemas.exchange import BODY_BYTES_MAX, LARGE_BYTES
from schemas.http import H_EXPECT, Fault
from schemas.ids import RequestId
from schemas.request_headers import CONTENT_TYPE

WINDOW_S = 10.0  # longer than any pause of a network that recovers, or of a process of ours
WINDOW_BYTES = 40 * 1024  # 4 KiB/s: half of what a phone at the edge of its cell (64 kbit/s) sends
UPLOAD_S_MAX = 120.0  # for the whole
STEP_BYTES = 256 * 1024  # decoded at once: well below a millisecond
PIECE_BYTES = 64 * 1024  # that a body is kept in, at least
MEMBERS_MAX = 256  # of one gzip stream (RFC 1952, 2.2): each costs a new decoder
INFLATING_BYTES = 48 * 1024  # what zlib keeps for one stream
H_CONTENT_ENCODING = "content-encoding"
SIZE_BYTES_MAX = 64 * 1024  # of all sizes and extensions, beyond as many as the body has
CHUNK_LINE_BYTES_MAX = 16 * 1024  # a chunk's size with its extensions, or all trailers
ENCODINGS = ("identity", "gzip", "deflate")
ENCODING_ALIASES = {"x-gzip": "gzip"}  # RFC 9110, 8.4.1.3
ENCODINGS_TAKEN = {"accept-encoding": "gzip, deflate"}  # RFC 9110, 12.5.3: so clients choose one
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t -~\x80-\xff]*)?\r\n")
_TRAILER = re.compile(
    rb"(?!(?i:content-length|transfer-encoding):)"  # they say where a body ends, and come too late
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n"
)
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class UploadRate:
    """The least rate of an upload. Times are seconds of the caller's clock."""

    __slots__ = ("_bytes", "_ends_at", "_stood_still", "_window_bytes", "due_at")

    def __init__(
        self, now: float, whole_s: float = UPLOAD_S_MAX, window_bytes: int = WINDOW_BYTES
    ) -> None:
        """`whole_s`: for all of it. `window_bytes`: the least in each WINDOW_S."""
        self._window_bytes = window_bytes
        self._ends_at = now + whole_s
        self.due_at = now + WINDOW_S  # then it is too slow
        self._bytes = 0
        self._stood_still = False

    def arrived(self, count: int, now: float) -> None:
        """Bytes came."""
        self._bytes += count
        if self._bytes >= self._window_bytes:
            self._bytes = 0
            self.due_at = min(now + WINDOW_S, self._ends_at)

    def forgive(self, seconds: float) -> None:
        """The router did not read for so long: that is not the client's time."""
        self._ends_at += seconds
        self.due_at += seconds

    def is_over(self, now: float) -> bool:
        """Whether it is too slow, of a look that was to be at `due_at`. One that comes much later
        says that this process stood still: that is forgiven, once."""
        late_s = now - self.due_at
        if late_s <= STOOD_STILL_S or self._stood_still:
            return True
        self._stood_still = True
        self.forgive(late_s + CATCH_UP_S)
        return False


class ChunkedBody:
    """Decodes a chunked body (RFC 9112, 7.1); extensions and trailers are dropped.

    What another server could read in another way is no chunk here: lines that end otherwise than
    by CR LF, other controls in them, a size that is more than hexadecimal digits. Nor is a body
    whose sizes outweigh its bytes by far: each costs as much time as many bytes.
    """

    __slots__ = ("_body_bytes", "_in_trailers", "_left", "_line", "_size_bytes", "_trailer_bytes")

    def __init__(self) -> None:
        self._line = b""  # as far as it has come
        self._left = 0  # of a chunk and the CR LF behind it
        self._in_trailers = False
        self._body_bytes = self._size_bytes = self._trailer_bytes = 0

    def decoded(self, data: bytes) -> tuple[bytes, int | None]:
        """The body's bytes in the next ones, and where in these it ends, if it does. Raises
        ValueError for what is no chunk."""
        found, at = bytearray(), 0
        while at < len(data):
            if self._left > 2:
                piece = data[at : at + self._left - 2]
                found += piece
                at += len(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\n", at) + 1
            line = self._line + data[at : end or None]
            if len(line) > CHUNK_LINE_BYTES_MAX:
                raise ValueError("a line of a chunked body is too long")
            if self._left and not b"\r\n".startswith(line):
                raise ValueError("a chunk is longer than its size")
            if not end:
                self._line = line
                break
            self._line, at = b"", end
            if self._left:
                self._left = 0
            elif not self._in_trailers:
                self._begin(line)
            elif line == b"\r\n":
                return bytes(found), at
            else:
                self._check_trailer(line)
        return bytes(found), None

    def _begin(self, line: bytes) -> None:
        size = _CHUNK.fullmatch(line)
        if size is None:
            raise ValueError("a chunk has no size")
        self._size_bytes += len(line)
        if self._size_bytes > SIZE_BYTES_MAX + self._body_bytes:
            raise ValueError("the chunks are too small")
        self._left = int(size[1], 16)
        self._body_bytes += self._left
        self._in_trailers = self._left == 0
        if self._left:
            self._left += 2

    def _check_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > CHUNK_LINE_BYTES_MAX or _TRAILER.fullmatch(line) is None:
            raise ValueError("a trailer is too long, or none")


class Inflater:
    """A gzip or deflate stream, decoded step by step."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
        self._waiting = b""  # of what was fed, not decoded yet
        self._members = 1

    def feed(self, data: bytes) -> None:
        """More of the stream. Call `step` until it gives nothing before the next one."""
        self._waiting += data
        if self._stream is None:
            # RFC 9110 means zlib's format (RFC 1950); some clients send bare RFC 1951.
            is_zlib = self._waiting[0] & 0x0F == zlib.DEFLATED
            self._stream = zlib.decompressobj(_ZLIB if is_zlib else _RAW)

    def step(self) -> bytes:
        """At most STEP_BYTES more; empty if more must be fed. Raises RequestRefused for what is no
        such stream."""
        data = b""
        while not data and self._stream is not None and self._waiting:
            if self._stream.eof:
                self._next_member()
            try:
                data = self._stream.decompress(self._waiting, STEP_BYTES)
            except zlib.error as error:
                raise self.broken() from error
            stream = self._stream
            self._waiting = stream.unused_data if stream.eof else stream.unconsumed_tail
        return data

    def _next_member(self) -> None:
        self._members += 1
        if self._encoding != "gzip" or self._members > MEMBERS_MAX:
            raise self.broken()
        self._stream = zlib.decompressobj(_GZIP)

    @property
    def is_whole(self) -> bool:
        """Whether the stream has come to its end."""
        return self._stream is not None and self._stream.eof and not self._waiting

    def broken(self) -> RequestRefused:
        """The error for a body that is not encoded as its header says."""
        message = f"the body is not {self._encoding}, as its {H_CONTENT_ENCODING} says"
        return RequestRefused(Fault.INVALID, message)


class Upload:
    """The bytes of one body and what they are charged. `release` it if it comes to nothing."""

    def __init__(self, budget: BodyBudget, encoding: str | None, length: int | None) -> None:
        """`length`: as announced. Raises RequestRefused for what is refused before it is read."""
        encoding = "identity" if encoding is None else encoding.lower()
        encoding = ENCODING_ALIASES.get(encoding, encoding)
        if encoding not in ENCODINGS:
            raise encoding_not_taken()
        if length is not None and length > BODY_BYTES_MAX:
            raise too_large()
        self._budget = budget
        self._inflater = None if encoding == "identity" else Inflater(encoding)
        self._arrived_bytes = 0
        self._chunks: list[bytes] = []
        self._small = bytearray()  # of the next one
        self.size = 0  # of the body, decoded
        self.taken = 0  # from the budget
        if self._inflater is not None:
            self._take(INFLATING_BYTES)

    def arrived(self, data: bytes) -> bool:
        """Take bytes in. True: call `decode` until it is False before the next ones.

        Raises RequestRefused when there are too many.
        """
        self._arrived_bytes += len(data)
        if self._arrived_bytes > BODY_BYTES_MAX:
            raise too_large()
        if self._inflater is None:
            self._keep(data)
            return False
        self._inflater.feed(data)
        return True

    def decode(self) -> bool:
        """One step. Whether there may be more to do. Raises RequestRefused."""
        assert self._inflater is not None
        data = self._inflater.step()
        if data:
            self._keep(data)
        return bool(data)

    def chunks(self) -> list[bytes]:
        """The whole body, in pieces. Raises RequestRefused if it ended too early."""
        if self._inflater is not None:
            if not self._inflater.is_whole and self._arrived_bytes:
                raise self._inflater.broken()
            self._give_back(INFLATING_BYTES)
        self._put_away()
        return self._chunks

    def release(self) -> None:
        self._give_back(self.taken)
        self._chunks = []
        self._small.clear()

    def _keep(self, data: bytes) -> None:
        if self.size + len(data) > BODY_BYTES_MAX:
            raise too_large()
        self._take(len(data))
        self.size += len(data)
        if len(data) >= PIECE_BYTES and not self._small:
            self._chunks.append(data)
            return
        self._small += data  # or a body of tiny pieces would take many times its size
        if len(self._small) >= PIECE_BYTES:
            self._put_away()

    def _put_away(self) -> None:
        if self._small:
            self._chunks.append(bytes(self._small))
            self._small.clear()

    def _take(self, count: int) -> None:
        if not self._budget.take(count, self.size):
            raise no_room()
        self.taken += count

    def _give_back(self, count: int) -> None:
        self._budget.give_back(count)
        self.taken -= count


class BodyReader:
    """Reads requests for work: large, compressed or still on their way."""

    def __init__(self, reader: RequestReader, door: FrontDoor) -> None:
        self._reader, self._door = reader, door
        self._large = LargeBodies()
        self._decoding = asyncio.Lock()

    async def read(
        self, request: HttpRequest, path: str, headers: LowerHeaders, known_id: RequestId
    ) -> ParsedRequest:
        """Read the body as it comes; else as `RequestReader.read`."""
        body, first = request.body, b""
        if body.is_whole and H_CONTENT_ENCODING not in headers and H_EXPECT not in headers:
            first = body.taken()
            if len(first) <= LARGE_BYTES:
                return self._reader.read(path, headers, first, known_id)
        charged = 0
        try:
            whole, fields, charged = await self._uploaded(request, path, headers, first)
            return parsed_request(path, headers, whole, fields, known_id)
        except BaseException as error:
            self._reader.refused(error, charged)
            raise

    async def close(self) -> None:
        await self._large.close()

    def _precheck(self, headers: LowerHeaders, caller: Caller | None) -> None:
        """Raise RequestRefused for what is wrong whatever the body will be."""
        self._door.residency(read_options(headers, {}).residency, caller)
        if self._reader.bodies.is_full:
            raise no_room()

    async def _uploaded(
        self, request: HttpRequest, path: str, headers: LowerHeaders, first: bytes
    ) -> tuple[bytes, BodyFields, int]:
        upload = Upload(self._reader.bodies, headers.get(H_CONTENT_ENCODING), request.length)
        try:
            if first:
                upload.arrived(first)
            else:
                if request.waits_for_continue():
                    self._precheck(headers, request.caller)
                    request.say_continue()
                await self._arrival(request, upload)
            body, fields = await self._large.read(
                path, upload.chunks(), headers.get(CONTENT_TYPE, "")
            )
            if not self._reader.bodies.take(len(fields.text.data), upload.size):
                raise no_room()
            upload.taken += len(fields.text.data)
        except BaseException:
            upload.release()
            raise
        return body, fields, upload.taken

    async def _arrival(self, request: HttpRequest, upload: Upload) -> None:
        """Take in the body as it comes. Raises RequestRefused."""
        async with contextlib.aclosing(arriving(request)) as pieces:
            async for piece in pieces:
                if upload.arrived(piece):
                    await self._decode(upload)

    async def _decode(self, upload: Upload) -> None:
        more = True
        while more:
            async with self._decoding:  # one step of one body between two turns of the loop
                more = upload.decode()
                await asyncio.sleep(0)


async def arriving(
    request: HttpRequest, whole_s: float = UPLOAD_S_MAX, window_bytes: int = WINDOW_BYTES
) -> AsyncGenerator[bytes]:
    """The body as it comes. Raises RequestRefused for one that is broken or too slow.

    `whole_s`: what all of it may take. `window_bytes`: the least in each WINDOW_S. What the caller
    does between two pieces is not counted.
    """
    clock = asyncio.get_running_loop().time
    rate = UploadRate(clock(), whole_s, window_bytes)
    try:
        while True:
            try:
                async with asyncio.timeout_at(rate.due_at):
                    piece = await request.body.next()
            except TimeoutError:
                if not request.body.has_news and rate.is_over(clock()):
                    raise
                continue
            if not piece:
                return
            began_at = clock()
            rate.arrived(len(piece), began_at)
            yield piece
            rate.forgive(clock() - began_at)
    except BodyBroken as error:
        raise RequestRefused(Fault.INVALID, "the body is cut or broken") from error
    except TimeoutError as error:
        raise too_slow(whole_s, window_bytes) from error


def encoding_not_taken() -> RequestRefused:
    """The error for an unknown content-encoding."""
    message = f"a body's {H_CONTENT_ENCODING} may be gzip or deflate; send it so, or without any"
    return RequestRefused(Fault.ENCODING, message, H_CONTENT_ENCODING, ENCODINGS_TAKEN)


def too_large() -> RequestRefused:
    """The error for a body beyond the limit on each."""
    return RequestRefused(
        Fault.BODY_TOO_LARGE, f"the body has more than {BODY_BYTES_MAX} bytes; send less at once"
    )


def too_slow(whole_s: float = UPLOAD_S_MAX, window_bytes: int = WINDOW_BYTES) -> RequestRefused:
    """The error for a body that does not arrive; the limits are those of its `UploadRate`."""
    message = (
        f"the body arrives too slowly: {window_bytes} bytes are wanted in each {WINDOW_S:g} s, "
        f"and all of it within {whole_s:g} s"
    )
    return RequestRefused(Fault.REQUEST_TIMEOUT, message)
