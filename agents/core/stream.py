"""Is this answer whole? Judged from its first and last bytes, never by parsing each token.

A Server-Sent-Events stream (WHATWG HTML, section 9.2) starts with a field name, a comment or a
line end, and ends after a blank line. That is enough to tell an engine that streams from one
that prints a stack trace or dies in the middle of an event. Some engines never send `[DONE]`;
an end on an event boundary is an end all the same.
"""

from collections import deque

from schemas.http import DONE_LINES

TAIL_BYTES = 16 * 1024  # the last events with usage are far below 1 KiB
_FIELDS = (b"data", b"event", b"id", b"retry")
BOM = b"\xef\xbb\xbf"
_BOUNDARIES = (b"\n\n", b"\r\r", b"\r\n\r\n")
_GATE_BYTES_MAX = 64  # blank lines before the first field; more of them is no stream


class Tail:
    """The last bytes of what passed, kept without copying.

    TAIL_BYTES at least; twice that, or that and the largest chunk, at most.
    """

    __slots__ = ("_chunks", "_dropped", "_held")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._held = self._dropped = 0  # bytes

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._held += len(chunk)
        if self._held >= 2 * TAIL_BYTES:
            self._drop()

    def _drop(self) -> None:
        while self._held - len(self._chunks[0]) >= TAIL_BYTES:
            size = len(self._chunks.popleft())
            self._held -= size
            self._dropped += size

    @property
    def total(self) -> int:
        """Bytes that passed."""
        return self._dropped + self._held

    def read(self) -> bytes:
        """The tail, at most TAIL_BYTES of it."""
        return b"".join(self._chunks)[-TAIL_BYTES:]


def starts_events(head: bytes) -> bool | None:
    """Whether an answer that begins with `head` can be an event stream; None: too early to say."""
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


def ends_events(tail: Tail) -> str | None:
    """None when the stream ended whole, else what is wrong, for people."""
    end = tail.read()
    if tail.total <= len(end) and b"data:" not in end:
        return "the stream ended without one event"
    if end.endswith(_BOUNDARIES) or has_said_all(end):
        return None
    return "the stream ended in the middle of an event"


def has_said_all(end: bytes) -> bool:
    """Whether the last event of an OpenAI stream has come: nothing that follows matters."""
    text = end.rstrip()
    if not text.endswith(DONE_LINES):
        return False
    begin = text.rfind(b"data:")  # a model may write the same, but no raw line end before it
    return begin == 0 or text[begin - 1] in b"\r\n"
