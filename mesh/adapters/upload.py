"""One body on its way in: bytes and times go in, the verdict comes out. No I/O, no clock.

What arrives is charged to the budget at once, and decoded in small steps, so that neither a client
that sends little nor one whose little becomes much takes more than its share of memory or time.

A client is too slow when WINDOW_S bring fewer than WINDOW_BYTES. Rejected: a mean since the start
(who has sent much at first may then stand still for long), and a limit on the whole alone (a body
that stops is noticed at its end).
"""

import zlib

from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.problem import Problem
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import Fault

WINDOW_S = 10.0  # longer than any pause of a network that recovers, or of a process of ours
WINDOW_BYTES = 40 * 1024  # 4 KiB/s: half of what a phone at the edge of its cell (64 kbit/s) sends
UPLOAD_S_MAX = 120.0  # for the whole
STEP_BYTES = 256 * 1024  # decoded at once: well below a millisecond
PIECE_BYTES = 64 * 1024  # that a body is kept in, at least
MEMBERS_MAX = 256  # of one gzip stream (RFC 1952, 2.2): each costs a new decoder
INFLATING_BYTES = 48 * 1024  # what zlib keeps for one stream
H_CONTENT_ENCODING = "content-encoding"
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
        """So long nobody read: that is not the client's time."""
        self._ends_at += seconds
        self.due_at += seconds


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
        """At most STEP_BYTES more; empty if more must be fed. Raises Problem for what is no
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

    def broken(self) -> Problem:
        """What to answer for a body that is not what it says."""
        message = f"the body is not {self._encoding}, as its {H_CONTENT_ENCODING} says"
        return Problem(Fault.INVALID, message)


class Upload:
    """The bytes of one body and what they are charged. `release` it if it comes to nothing."""

    def __init__(self, budget: BodyBudget, encoding: str | None, length: int | None) -> None:
        """`length`: as announced. Raises Problem for what is refused before it is read."""
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

        Raises Problem when there are too many.
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
        """One step. Whether there may be more to do. Raises Problem."""
        assert self._inflater is not None
        data = self._inflater.step()
        if data:
            self._keep(data)
        return bool(data)

    def chunks(self) -> list[bytes]:
        """The whole body, in pieces. Raises Problem if it ended too early."""
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


def encoding_not_taken() -> Problem:
    """Of a body that we can't decode."""
    message = f"a body's {H_CONTENT_ENCODING} may be gzip or deflate; send it so, or without any"
    return Problem(Fault.INVALID, message, H_CONTENT_ENCODING)


def too_large() -> Problem:
    """Of a body beyond the limit on each."""
    return Problem(
        Fault.BODY_TOO_LARGE, f"the body has more than {BODY_BYTES_MAX} bytes; send less at once"
    )


def no_room() -> Problem:
    """Of a body beyond the limit on all."""
    return Problem(Fault.SATURATED, "this router holds as many bytes of requests as it may")


def too_slow() -> Problem:
    """Of a body that does not arrive."""
    message = (
        f"the body arrives too slowly: {WINDOW_BYTES} bytes are wanted in each {WINDOW_S:g} s, "
        f"and all of it within {UPLOAD_S_MAX:g} s"
    )
    return Problem(Fault.REQUEST_TIMEOUT, message)
