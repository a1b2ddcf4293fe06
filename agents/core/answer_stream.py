"""What the agent keeps of an answer as it passes: its last bytes, and how far it may run ahead."""

from collections import deque

from schemas.exchange import WINDOW_BYTES, window_bytes

TAIL_BYTES = 16 * 1024  # the last events with usage are far below 1 KiB


class FlowWindow:
    """How far the agent may run ahead of one client: a byte window as in HTTP/2 (RFC 9113, section
    5.2), with absolute positions, so that a credit that is lost or repeated does no harm."""

    __slots__ = ("_consumed", "_ends_at", "_first", "sent")

    def __init__(self, first: int = WINDOW_BYTES) -> None:
        """`first`: bytes that may go before the first credit."""
        self._first = self._ends_at = first
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

    def take_back(self) -> int:
        """How many of the bytes that were sent last are beyond the window: they count as not sent,
        and are to be sent once it is open."""
        over = max(0, self.sent - self._ends_at)
        self.sent -= over
        return over

    def credit(self, consumed: int) -> None:
        """The client has consumed so many bytes. Claims beyond what was sent change nothing."""
        if self._consumed < consumed <= self.sent:
            self._consumed = consumed
            self._ends_at = consumed + window_bytes(self._first, consumed)


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
