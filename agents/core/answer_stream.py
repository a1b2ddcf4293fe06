"""What the agent reads out of a response's bytes: is it an event stream, and is it whole? It looks
at the first and last bytes only, and never parses each token. And the response's flow control.

A Server-Sent-Events stream (WHATWG HTML, section 9.2) starts with a field name, a comment or a line
end, and ends after a blank line. That distinguishes an engine that streams from one that prints a
stack trace or dies in the middle of an event. `agents.core.stream_end` says whether an end on an
event boundary is one.
"""

from collections import deque

from schemas.exchange import WINDOW_BYTES
from schemas.http import DONE_LINES

TAIL_BYTES = 16 * 1024  # the last events with usage are far below 1 KiB
BOM = b"\xef\xbb\xbf"
_FIELDS = (b"data", b"event", b"id", b"retry")
EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")
_GATE_BYTES_MAX = 64  # blank lines before the first field; more of them is no stream

EVENT_BYTES_MAX = 16 * 1024  # a longer event is passed on as any other


class FlowWindow:
    """How far the agent may run ahead of one client: a byte window as in HTTP/2 (RFC 9113, section
    5.2), with absolute positions, so that a credit that is lost or repeated does no harm."""

    __slots__ = ("_consumed", "_ends_at", "_size", "sent")

    def __init__(self, size: int = WINDOW_BYTES) -> None:
        self._size = self._ends_at = size
        self.sent = 0  # bytes
        self._consumed = 0

    @property
    def open(self) -> bool:
        """Whether the engine may be read further."""
        return self.sent < self._ends_at

    def send(self, size: int) -> bool:
        """Bytes were sent; whether the window is still open."""
        self.sent = sent = self.sent + size
        return sent < self._ends_at

    def credit(self, consumed: int) -> None:
        """The client has consumed so many bytes. Claims beyond what was sent change nothing."""
        if self._consumed < consumed <= self.sent:
            self._consumed, self._ends_at = consumed, consumed + self._size


class Tail:
    """The last bytes that passed, kept without copying: at least TAIL_BYTES; at most twice that, or
    that and the largest chunk."""

    __slots__ = ("_chunks", "_drop_at", "total")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self.total = 0  # bytes that passed
        self._drop_at = 2 * TAIL_BYTES  # of the total

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.total = total = self.total + len(chunk)
        if total >= self._drop_at:
            self._drop()

    def _drop(self) -> None:
        held = sum(map(len, self._chunks))
        while held - len(self._chunks[0]) >= TAIL_BYTES:
            held -= len(self._chunks.popleft())
        self._drop_at = self.total - held + 2 * TAIL_BYTES

    def read(self) -> bytes:
        """The tail, at most TAIL_BYTES of it."""
        return b"".join(self._chunks)[-TAIL_BYTES:]


def starts_events(head: bytes) -> bool | None:
    """Whether a response that begins with `head` can be an event stream; None: too early to say."""
    if len(head) < len(BOM) and BOM.startswith(head):
        return None
    text = head.removeprefix(BOM).lstrip(b"\r\n")
    if not text:
        return None if len(head) < _GATE_BYTES_MAX else False
    if text[:1] == b":":
        return True
    for field in _FIELDS:
        if text.startswith(field):
            after = text[len(field) : len(field) + 1]
            return after in b":\r\n" if after else None
        if field.startswith(text):
            return None
    return False


def incomplete(tail: Tail, end: bytes) -> str | None:
    """Why a stream with these last bytes did not end whole, for people; None if it did."""
    if tail.total <= len(end) and b"data:" not in end:
        return "the stream ended without one event"
    if end.endswith(EVENT_ENDS) or has_done_event(end):
        return None
    return "the stream ended in the middle of an event"


def has_done_event(end: bytes) -> bool:
    """Whether the last event of an OpenAI stream has come: nothing that follows matters."""
    text = end.rstrip()
    if not text.endswith(DONE_LINES):
        return False
    begin = text.rfind(b"data:")  # a model may write the same, but no raw line end before it
    return begin == 0 or text[begin - 1] in b"\r\n"
