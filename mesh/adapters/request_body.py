"""Bodies of requests: how many bytes the router keeps, one body on its way in, and its fields.

The budget limits the sum, not each body alone. A body stays until its client has been sent a first
byte, because until then it may have to be placed again; so a full hold queue of large bodies would
be gigabytes. Bytes are charged as they arrive: what is announced and not sent takes no room. What
does not fit is shed. Bodies of peers' requests that wait here count as well. The last part of the
room is for small bodies alone: clients that fill the rest with large ones shut nobody else out.

A body is decoded in small steps, so that neither a client that sends little nor one whose little
becomes much takes more than its share of memory or time. A client is too slow when WINDOW_S bring
fewer than WINDOW_BYTES. Rejected: a mean since the start (a client that sent much at first may then
stop for long), and a limit on the whole alone (a body that stops is noticed at its end).
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from mesh.adapters.request_options import IN_BODY, RequestRefused
from mesh.core.model.prompt import PromptInvalid, PromptText, prompt_text
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import CHAT, Fault
from schemas.ids import MODEL_CHARS_MAX

BODIES_BYTES_MAX = 512 * 1024 * 1024
SMALL_BYTES = 1024 * 1024  # ten times what a prompt of 25,000 tokens takes
FOR_SMALL_BYTES = 64 * 1024 * 1024


class BodyBudget:
    """Bytes of bodies and prompts in memory, against a limit."""

    def __init__(
        self, limit_bytes: int = BODIES_BYTES_MAX, for_small_bytes: int = FOR_SMALL_BYTES
    ) -> None:
        self._limit_bytes = limit_bytes
        self._for_small_bytes = for_small_bytes
        self.taken_bytes = 0

    def take(self, more: int, so_far: int = 0) -> bool:
        """Take room for `more` bytes of a body that has `so_far`. False, and nothing taken, if
        there is none."""
        limit = self._limit_bytes
        if so_far + more > SMALL_BYTES:
            limit -= self._for_small_bytes
        if self.taken_bytes + more > limit:
            return False
        self.taken_bytes += more
        return True

    @property
    def is_full(self) -> bool:
        """Whether even a small body may be refused."""
        return self.taken_bytes + SMALL_BYTES > self._limit_bytes

    def settle(self, taken: int, actual: int) -> None:
        """The body is here, read, and has another size than was taken."""
        self.taken_bytes += actual - taken

    def give_back(self, taken: int) -> None:
        """A body is not needed any more."""
        self.taken_bytes -= taken
        assert self.taken_bytes >= 0, "more was given back than taken"


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The fields that the router reads. Values are plain: they cross to another process."""

    model: str
    options: Mapping[str, str]  # the fields that options are read from, those that are text
    text: PromptText


def read_fields(path: str, body: bytes) -> BodyFields:
    """Read a whole body, sent to that path.

    Raises RequestRefused for anything that an engine should not see. Holds the interpreter for up
    to seconds where a body is large.
    """
    fields = _json_object(body)
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        raise RequestRefused(
            Fault.INVALID, "model must be the name of a model, as a string", "model"
        )
    if not isinstance(fields.get("stream"), bool | None):
        raise RequestRefused(Fault.INVALID, "stream must be true or false", "stream")
    try:
        text = prompt_text(fields, chat=path == CHAT)
    except PromptInvalid as error:
        raise RequestRefused(Fault.INVALID, str(error), error.param) from error
    options = {name: given for name in IN_BODY if isinstance(given := fields.get(name), str)}
    return BodyFields(model, options, text)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(Fault.INVALID, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestRefused(Fault.INVALID, "the body must be a JSON object")
    return fields


WINDOW_S = 10.0  # longer than any pause of a network that recovers, or of a process of ours
WINDOW_BYTES = 40 * 1024  # 4 KiB/s: half of what a phone at the edge of its cell (64 kbit/s) sends
UPLOAD_S_MAX = 120.0  # for the whole
STEP_BYTES = 256 * 1024  # decoded at once: well below a millisecond
PIECE_BYTES = 64 * 1024  # that a body is kept in, at least
MEMBERS_MAX = 256  # of one gzip stream (RFC 1952, 2.2): each costs a new decoder
INFLATING_BYTES = 48 * 1024  # what zlib keeps for one stream
H_CONTENT_ENCODING = "content-encoding"
CHUNK_LINE_BYTES_MAX = 16 * 1024  # a chunk's size with its extensions, or one trailer
ENCODINGS = ("identity", "gzip", "deflate")
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class UploadRate:
    """When a body must have brought more. Times are seconds of the caller's clock."""

    __slots__ = ("_bytes", "_ends_at", "due_at")

    def __init__(self, now: float) -> None:
        self._ends_at = now + UPLOAD_S_MAX
        self.due_at = now + WINDOW_S  # then it is too slow
        self._bytes = 0

    def arrived(self, count: int, now: float) -> None:
        """Bytes came."""
        self._bytes += count
        if self._bytes >= WINDOW_BYTES:
            self._bytes = 0
            self.due_at = min(now + WINDOW_S, self._ends_at)

    def forgive(self, seconds: float) -> None:
        """The router did not read for so long: that is not the client's time."""
        self._ends_at += seconds
        self.due_at += seconds


class ChunkedBody:
    """Finds where a chunked body ends (RFC 9112, 7.1), and no more: aiohttp reads it."""

    def __init__(self) -> None:
        self._line = b""
        self._skip = 0  # of a chunk and the line end behind it
        self._in_trailers = False

    def end_in(self, data: bytes) -> int | None:
        """Where in the next bytes it ends, if it does. Raises ValueError for what is no chunk."""
        at = 0
        while True:
            at += self._skip
            if at >= len(data):
                self._skip = at - len(data)
                return None
            self._skip = 0
            end = data.find(b"\n", at)
            line = self._line + data[at : end if end >= 0 else None]
            if len(line) > CHUNK_LINE_BYTES_MAX:
                raise ValueError("a line of a chunked body is too long")
            if end < 0:
                self._line = line
                return None
            self._line, at = b"", end + 1
            if self._in_trailers:
                if line.rstrip(b"\r") == b"":
                    return at
                continue
            digits = line.partition(b";")[0].rstrip(b" \t\r")
            if not digits.isalnum():  # `int` takes signs and underscores
                raise ValueError("a chunk has no size")
            size = int(digits, 16)
            self._in_trailers, self._skip = size == 0, size + 2 if size else 0


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
        """It is not kept."""
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


def encoding_not_taken() -> RequestRefused:
    """Of a body that we can't decode."""
    message = f"a body's {H_CONTENT_ENCODING} may be gzip or deflate; send it so, or without any"
    return RequestRefused(Fault.INVALID, message, H_CONTENT_ENCODING)


def too_large() -> RequestRefused:
    """Of a body beyond the limit on each."""
    return RequestRefused(
        Fault.BODY_TOO_LARGE, f"the body has more than {BODY_BYTES_MAX} bytes; send less at once"
    )


def no_room() -> RequestRefused:
    """Of a body beyond the limit on all."""
    return RequestRefused(Fault.SATURATED, "this router holds as many bytes of requests as it may")


def too_slow() -> RequestRefused:
    """Of a body that does not arrive."""
    message = (
        f"the body arrives too slowly: {WINDOW_BYTES} bytes are wanted in each {WINDOW_S:g} s, "
        f"and all of it within {UPLOAD_S_MAX:g} s"
    )
    return RequestRefused(Fault.REQUEST_TIMEOUT, message)
